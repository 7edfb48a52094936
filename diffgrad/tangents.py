"""Forward mode: the tangent of every op's output in closed form, with its bar, and the check of a run's tangents.

A tangent is linear in the tangents of the inputs and parameters. Most ops are multilinear, so each of its terms is the
op itself with one operand's tangent in that operand's place; activations and softmax have symmetric Jacobians, so their
tangent is their VJP. The bars hold for what forward modes do: evaluate such formulas as they are, differentiate a
composed forward operation by operation, or differentiate the backward with respect to its cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diffgrad.bars import Array, Bounded, Precision, add, bilinear, gamma, neg, quiet, recorded, scale, summation
from diffgrad.chains import Chain, Link
from diffgrad.check import Quantity, Row, compare, name_looser
from diffgrad.ops import (
    EXACT,
    Add,
    AddPosition,
    Attention,
    AttentionCore,
    BatchNorm,
    ClsSlice,
    Conv2d,
    Copy,
    Dense,
    Depthwise,
    DropPath,
    Flatten,
    GeluErf,
    GeluTanh,
    GlobalAveragePool,
    LayerNorm,
    LayerScale,
    Op,
    PrependCls,
    Products,
    Relu,
    Relu6,
    Scores,
    SmoothedCrossEntropy,
    SoftmaxRows,
    Swish,
    Weighted,
)
from diffgrad.ops.attention import softmax, softmax_back
from diffgrad.ops.mask import blank
from diffgrad.ops.norm import Norm
from diffgrad.oracle import Fed, Key, Tensors, Walk, as_fed
from diffgrad.trace import Trace

Operands = tuple[Bounded, ...]
Moving = tuple[Bounded | None, ...]
"""The tangents of some operands, in their order; None for a constant."""


def tangent(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """The tangent of an op's output, with the bar of a run in the operands' precision.

    Args:
        op: the op.
        xs: its inputs.
        ps: its parameters, then its constants.
        dxs: the inputs' tangents.
        dps: the parameters' tangents.
    """
    return RULES[type(op)](op, xs, ps, dxs, dps)


def _still(v: Bounded) -> Bounded:
    zero = np.zeros_like(v.val)
    return Bounded(zero, zero, v.p)


def _filled(values: Operands, tangents: Moving) -> Operands:
    """The tangents, exact zeros in the place of None."""
    return tuple(_still(v) if d is None else d for v, d in zip(values, tangents, strict=True))


def _sum(terms: Sequence[Bounded], like: Callable[[], Bounded]) -> Bounded:
    """The sum; if there is no term, zeros in the shape of ``like()``."""
    if not terms:
        return _still(like())
    return terms[0] if len(terms) == 1 else add(*terms)


def _linear(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """A map that is linear in all its operands together: itself, of the tangents."""
    return op.bound(_filled(xs, dxs), _filled(ps, dps))


def _pool(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    y = _linear(op, xs, ps, dxs, dps)
    # Its backward differentiated scales every element before the sum, and any of them may be flushed.
    size = xs[0].val[0, 0].size if xs[0].val.size else 1
    return y.widen(np.minimum(y.reach, size * y.p.lost))


def _multilinear(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """A product of the operands: one of them after the other is replaced by its tangent."""
    values, moves = (*xs, *ps), (*dxs, *dps)
    terms = []
    for i, move in enumerate(moves):
        if move is not None:
            operands = (*values[:i], move, *values[i + 1 :])
            terms.append(op.bound(operands[: len(xs)], operands[len(xs) :]))
    return _again(op, _sum(terms, lambda: op.bound(xs, ps)))


def _extra(wide: Bounded, plain: Bounded) -> Array:
    """What the one bar has beyond the other; nothing where both are infinite."""
    return np.where(np.isfinite(plain.err), wide.err - plain.err, 0.0)


def _again(op: Op, y: Bounded) -> Bounded:
    """The sum of products that are rounded to less precision is rounded to it once more."""
    products: Products = getattr(op, "products", EXACT)
    return products.result(y)


def _biased(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """A convolution or matrix product, and the bias of its output channels."""
    w, *rest = ps
    bias = (_still(rest[0]),) if rest and isinstance(op, Dense) else ()
    terms = []
    if dxs[0] is not None:
        terms.append(op.bound((dxs[0],), (w, *bias)))
    if dps[0] is not None:
        terms.append(op.bound(xs, (dps[0], *bias)))
    plain = _sum(terms, lambda: op.bound(xs, ps))
    y = _again(op, plain)
    if len(dps) == 1 or dps[1] is None:
        return y
    b = dps[1].reshape(-1, 1, 1) if isinstance(op, Conv2d) else dps[1]
    # The bias may be the first term of either sum, and takes part in all its roundings then.
    fan = w.val[0].size if isinstance(op, Conv2d) else w.val.shape[0]
    if not terms:
        return add(y, b)
    return add(*terms, b).widen(_extra(y, plain) + summation(fan, y.p, 0) * b.mag)


def _symmetric(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """A map of one operand whose Jacobian is symmetric."""
    if dxs[0] is None:
        return _still(op.bound(xs, ps))
    return op.vjp(xs, ps, dxs[0]).inputs[0]


def _norm(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """gamma * P(dx) + xhat*dgamma + dbeta, P the three-term map with gamma 1, which is symmetric."""
    assert isinstance(op, Norm)
    x, ndim, p = xs[0], xs[0].val.ndim, xs[0].p
    g = ps[0].reshape(*op.spread(ndim))
    dg, db = (None if d is None else d.reshape(*op.spread(ndim)) for d in dps)
    m = op._moments(x)
    alpha, uncentred = m.inv_std.mag, x.mag + m.mean.mag
    terms = []
    parts: Array = np.zeros_like(x.val)
    if dxs[0] is not None:
        moved, lost = _normalised(op, x, dxs[0])
        terms.append(g * moved)
        parts = parts + g.mag * lost
    if dg is not None:
        terms.append(m.normalised * dg)
        parts = parts + uncentred * alpha * dg.mag
    if db is not None:
        shape = x.val.shape
        terms.append(db.moved(lambda v: np.broadcast_to(v, shape)))
        parts = parts + db.mag
    y = _sum(terms, lambda: x)
    # The affine map may be folded: dx*alpha + x*dalpha + (dbeta - dmean*alpha - mean*dalpha).
    factors = 1.0 + g.mag + (0.0 if dg is None else dg.mag)
    flushed = (m.n + 8.0) * p.lost * factors * (1.0 + alpha) * (1.0 + uncentred)
    lost = gamma(8, p) * parts + np.minimum(parts, flushed)
    return y.widen(np.where(parts <= p.largest, lost, np.inf))


def _normalised(op: Norm, x: Bounded, dx: Bounded) -> tuple[Bounded, Array]:
    """P(dx), and the sum of magnitudes that a folded evaluation of it rounds."""
    axes, p = op.axes(x.val.ndim), x.p
    m = op._moments(x)
    one = recorded(np.ones(1), p)
    # Parameters of one element suit every kind of spread but a vector's, which takes its length from the input.
    size = int(np.prod([n for n, s in zip(x.val.shape, op.spread(x.val.ndim), strict=True) if s == -1], dtype=int))
    ones = Bounded(np.repeat(one.val, size), np.zeros(size), p)
    moved = op.vjp((x,), (ones, _still(ones)), dx).inputs[0]
    # The mean square is also differentiated centred, 2*mean(c*(dx - mean(dx))), with a rounding of dx - mean(dx), and
    # the result multiplied with c*s**3.
    alpha = m.inv_std.mag
    centred = dx.mag + dx.mag.mean(axes, keepdims=True)
    along = (m.centred.mag * centred).mean(axes, keepdims=True) * alpha**3
    lost = gamma(4, p) * along * m.centred.mag
    moved = moved.widen(np.where(along <= p.largest, lost, np.inf))
    return moved, alpha * centred + (x.mag + m.mean.mag) * along


def _attention(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """The core: scores, softmax rows and weighted sum, each in its tangent form."""
    assert isinstance(op, Attention)
    q, k, v = xs
    scores, weighted = Scores(op.heads, op.products), Weighted(op.heads, op.products)
    shares = op._shares(q, k)
    ds = blank(_multilinear(scores, (q, k), (), dxs[:2], ()), op.softmax.seen)
    dp = softmax_back(shares, ds)
    if op.inner:
        # A kernel that holds the scores in less precision holds their tangents in it, too, and sums them in it.
        dot = (shares.mag * ds.mag).sum(-1, keepdims=True)
        dp = dp.widen(op.inner * (8.0 + q.val.shape[1]) * shares.mag * (ds.mag + dot) + 4.0 * op._inner_tiny)
    return _multilinear(weighted, (shares, v), (), (dp, dxs[2]), ())


def _attention_core(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    assert isinstance(op, AttentionCore)
    return _attention(op.core, (*xs, *ps), (), (*dxs, *dps), ())


def _cross_entropy(op: Op, xs: Operands, ps: Operands, dxs: Moving, dps: Moving) -> Bounded:
    """<dz, softmax(z) - t>/B; log softmax differentiated gives the two products one by one."""
    z, t, dz = xs[0], ps[0], dxs[0]
    if dz is None:
        return _still(op.bound(xs, ps))
    shares = softmax(z)
    slack = np.abs(t.val.sum(-1, keepdims=True) - 1.0)
    moved, held = (bilinear(lambda a, b: np.asarray(np.vdot(a, b)), v, dz, z.val.size, 2) for v in (shares, t))
    loose = (shares.mag * dz.mag * slack).sum()
    rows = summation(2 * z.val.shape[-1] + 4, z.p, 4) * ((1.0 + slack) * shares.mag * dz.mag).sum()
    return scale(add(moved, neg(held)).widen(loose + rows), 1.0 / len(z.val), roundings=2.0)


Rule = Callable[[Op, Operands, Operands, Moving, Moving], Bounded]

RULES: dict[type[Op], Rule] = {
    **dict.fromkeys((Add, AddPosition, ClsSlice, Copy, Flatten, PrependCls), _linear),
    **dict.fromkeys((DropPath, LayerScale, Scores, Weighted), _multilinear),
    **dict.fromkeys((Conv2d, Dense, Depthwise), _biased),
    **dict.fromkeys((GeluErf, GeluTanh, Relu, Relu6, SoftmaxRows, Swish), _symmetric),
    **dict.fromkeys((BatchNorm, LayerNorm), _norm),
    GlobalAveragePool: _pool,
    Attention: _attention,
    AttentionCore: _attention_core,
    SmoothedCrossEntropy: _cross_entropy,
}
"""Op -> how its tangent is taken."""


class TangentWalk(Walk):
    """Forward through every link, then once more for the tangents, each link on what was recorded (or end to end).

    Args:
        chain, tensors, p, trace, compiled, ops: as of Walk.
        tangents: the tangent of every differentiated tensor, in the run's dtype.
    """

    def __init__(
        self,
        chain: Chain,
        tensors: Tensors,
        tangents: Tensors,
        p: Precision,
        trace: Trace | None = None,
        compiled: bool = False,
        ops: Mapping[str, Op] | None = None,
    ) -> None:
        super().__init__(chain, tensors, p, trace, compiled, ops)
        self._moving = {name: recorded(v.astype(np.float64), p) for name, v in tangents.items()}

    def each(self, give: Callable[[Key, Bounded], None]) -> None:
        """Give away ("acts", site) for every link, then ("tangents", site) for every link."""
        with quiet():
            self._tangents(give, self._forward(give))

    def _tangents(self, give: Callable[[Key, Bounded], None], fed: dict[str, Fed]) -> None:
        x = self._moving.get(self._chain.input)
        moving: dict[str, Fed | None] = {self._chain.input: None if x is None else as_fed(x)}
        for link in self._chain.links:
            op, ps = self._op(link), self._params(link)
            dps = tuple(self._moving.get(name) for name in (*link.feeds, *link.constants))

            def evaluate(kind: str, op: Op = op, link: Link = link, ps: Operands = ps, dps: Moving = dps) -> Bounded:
                xs = tuple(getattr(fed[s], kind) for s in link.reads)
                dxs = tuple(None if (d := moving[s]) is None else getattr(d, kind) for s in link.reads)
                return tangent(op, xs, ps, dxs, dps)

            y = own = evaluate("carried")
            if self._compiled and op.stored(tuple(fed[s].carried for s in link.reads), ps)[0]:
                own = evaluate("plain")
            key = ("tangents", link.writes)
            moving[link.writes] = self._feed(key, y, own.err)
            give(key, y)


class _Checked(NamedTuple):
    """What is checked, and against what."""

    chain: Chain
    tensors: Tensors
    tangents: Tensors
    trace: Trace
    p: Precision
    compiled: bool

    def links(self, p: Precision, ops: Mapping[str, Op]) -> list[Quantity]:
        """Every link on the run's own activations and tangents."""
        return self._compare(TangentWalk(self.chain, self.tensors, self.tangents, p, self.trace, self.compiled, ops))

    def whole(self) -> list[Quantity]:
        """End to end from the case's tensors."""
        return self._compare(TangentWalk(self.chain, self.tensors, self.tangents, self.p))

    def _compare(self, walk: TangentWalk) -> list[Quantity]:
        titles = {link.writes: link.title for link in self.chain.links}
        rows: list[Row] = []

        def row(key: Key, expected: Bounded) -> None:
            part, site = key
            what = "activation" if part == "acts" else "tangent"
            rows.append(Row(titles[site], what, site, getattr(self.trace, part).get(site), expected))

        walk.each(row)
        return compare(rows, self.p)


def check_tangents(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    tangents: Tensors,
    p: Precision,
    compiled: bool,
    without: Collection[str] = (),
) -> list[Quantity]:
    """Check a run in forward mode: link by link in its own precision and, in float64, end to end as well.

    Args:
        chain: the block's chain.
        tensors: the case's tensors in the run's dtype.
        trace: what the adapter returned.
        tangents: the tangent of every differentiated tensor, in the run's dtype.
        p: the run's precision.
        compiled: True for modes in which a compiler may recompute a producer inside its consumer.
        without: looser models that this run cannot have used.
    """
    checked = _Checked(chain, tensors, tangents, trace, p, compiled)
    named = name_looser(chain, tensors, trace, p, checked.links(p, {}), checked.links, without)
    quantities = [*named, *_strays(chain, trace)]
    # A net's worst-case bars, propagated, prove nothing.
    if p.name == "float64" and not chain.deep and all(q.verdict in ("ok", "vacuous") for q in quantities):
        quantities += checked.whole()
    return quantities


def _strays(chain: Chain, trace: Trace) -> list[Quantity]:
    """What a run delivered that forward mode, or this chain, does not have."""
    written = {link.writes for link in chain.links}
    got = {"activation": trace.acts, "tangent": trace.tangents, "cotangent": trace.cots, "gradient": trace.grads}
    return [
        Quantity("block", what, name, "wrong", "stray", "delivered, but forward mode has none here")
        for what, arrays in got.items()
        for name in arrays
        if what in ("cotangent", "gradient") or name not in written
    ]
