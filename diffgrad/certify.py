"""Certifying the oracle: every VJP and tangent against the complex-step derivative of its forward (FORMULAS section 6).

The forwards are analytic, so evaluating them at theta + i*h*delta with h = 1e-30 gives J.delta with no cancellation.
Each cotangent must satisfy <dy, J.delta> = <VJP(dy), delta>, for random non-uniform dy and delta, on generated shapes,
and each tangent <dy, J.delta> = <dy, tangent(delta)>, for a delta of all operands at once. The two sides may differ by
their own float64 rounding and no more: the bar of the inner product, once for each side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffgrad.bars import PRECISIONS, Bounded, bilinear, quiet, recorded
from diffgrad.case import Case
from diffgrad.chains import CHAINS, Chain, chain_of
from diffgrad.ops import (
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
    Relu,
    Relu6,
    Scores,
    SmoothedCrossEntropy,
    SoftmaxRows,
    Swish,
    Weighted,
)
from diffgrad.ops.conv import Padding, Pads
from diffgrad.ops.norm import Kind
from diffgrad.oracle import Key, end_to_end
from diffgrad.strategies import cases, sample
from diffgrad.tangents import TangentWalk, tangent
from diffgrad.values import Bits

_H = 1e-30
_P = PRECISIONS["float64"]

Floats = NDArray[np.float64]
Shape = tuple[int, ...]


class Certificate(msgspec.Struct, frozen=True):
    """One subject (an op or a block): how many identities were checked, and the worst mismatch.

    ``residual`` is |<dy, J.delta> - <VJP(dy), delta>| relative to the sum of absolute products, the largest of the
    instance (a shift that a batch norm undoes has a gradient of exactly 0), of a tangent likewise; ``holds`` says
    whether every mismatch lies within its bar.
    """

    subject: str
    checks: int
    residual: float
    worst_over_bar: float

    @property
    def holds(self) -> bool:
        """False also for NaN."""
        return self.worst_over_bar <= 1.0


class _Draw:
    """Random non-uniform tensors for one instance of an op."""

    def __init__(self, key: int) -> None:
        self._bits = Bits(key, "certify")

    def __call__(self, *shape: int) -> Floats:
        return self._bits.normal(shape)


Instance = tuple[Op, tuple[Floats, ...], tuple[Floats, ...]]
"""An op with its inputs and parameters."""


def _conv(op: type[Conv2d]) -> Callable[[st.DataObject | Any, _Draw], Instance]:
    def make(pick: Any, draw: _Draw) -> Instance:
        n, c, h, w, k = pick(1, 3), pick(1, 4), pick(1, 7), pick(1, 7), pick(1, 7)
        stride = pick(1, 3)
        padding: Padding | Pads = (*get_args(Padding), (0, 0, 0, 0))[pick(0, 3)]
        if padding == "symmetric" and k % 2 == 0:
            k += 1
        if not isinstance(padding, str):
            padding = (pick(-1, k), pick(-1, k), pick(-1, k), pick(-1, k))
            h, w = h + k + 1, w + k + 1
        elif padding == "valid":
            h, w = h + k - 1, w + k - 1
        kernel = draw(c, 1, k, k) if op is Depthwise else draw(pick(1, 4), c, k, k)
        bias = (draw(kernel.shape[0]),) if pick(0, 1) else ()
        return op(stride, padding), (draw(n, c, h, w),), (kernel, *bias)

    return make


def _map(pick: Any, draw: _Draw) -> Floats:
    return draw(pick(1, 3), pick(1, 4), pick(1, 6), pick(1, 6))


def _batchnorm(pick: Any, draw: _Draw) -> Instance:
    x = _map(pick, draw) + 3.0 * pick(0, 2)
    return BatchNorm(), (x,), (draw(x.shape[1]), draw(x.shape[1]))


def _plain(op: Op, inputs: int, spread: float = 1.0) -> Callable[[Any, _Draw], Instance]:
    def make(pick: Any, draw: _Draw) -> Instance:
        x = spread * _map(pick, draw)
        return op, (x, *(draw(*x.shape) for _ in range(inputs - 1))), ()

    return make


def _droppath(pick: Any, draw: _Draw) -> Instance:
    x = _map(pick, draw)
    return DropPath(), (x,), (np.array([1.25 * pick(0, 1) for _ in range(x.shape[0])]),)


def _layernorm(pick: Any, draw: _Draw) -> Instance:
    kind = get_args(Kind)[pick(0, 3)]
    x = _map(pick, draw) if kind in ("channel", "scalar") else draw(pick(1, 3), pick(1, 4), pick(1, 6))
    size = {"channel": x.shape[1], "token": x.shape[-1]}.get(kind, 1)
    return LayerNorm(kind=kind), (x + 3.0 * pick(0, 2),), (draw(size), draw(size))


def _layerscale(pick: Any, draw: _Draw) -> Instance:
    x = _map(pick, draw)
    return LayerScale(), (x,), (draw(x.shape[1]) if pick(0, 1) else draw(*x.shape[1:]),)


def _dense(pick: Any, draw: _Draw) -> Instance:
    n, inputs, outputs = pick(1, 4), pick(1, 6), pick(1, 6)
    return Dense(), (draw(n, inputs),), (draw(inputs, outputs), draw(outputs))


def _heads(op: type[Scores | Weighted | Attention | AttentionCore]) -> Callable[[Any, _Draw], Instance]:
    """Q and K for the scores, P and V for the weighted sum, Q, K and V for the core, or K and V as its parameters.

    Of a core's masks some hide a whole row.
    """

    def make(pick: Any, draw: _Draw) -> Instance:
        n, t, heads, d = pick(1, 3), pick(1, 5), pick(1, 3), pick(1, 4)
        tokens = [draw(n, t, heads * d) for _ in range(3)]
        if op is Weighted:
            return op(heads), (np.abs(draw(n, heads, t, t)), tokens[0]), ()
        if op is Scores:
            return op(heads), tuple(tokens[:2]), ()
        core = Attention(heads, mask=_mask(pick, t, t), uniform_empty=bool(pick(0, 1)))
        return (AttentionCore(core), (tokens[0],), tuple(tokens[1:])) if op is AttentionCore else (core, (*tokens,), ())

    return make


def _mask(pick: Any, rows: int, places: int) -> tuple[str, ...]:
    if pick(0, 1):
        return ()
    return tuple("".join(str(min(1, pick(0, 2))) for _ in range(places)) for _ in range(rows))


def _softmaxrows(pick: Any, draw: _Draw) -> Instance:
    rows, places = pick(1, 5), pick(1, 5)
    op = SoftmaxRows(mask=_mask(pick, rows, places), uniform_empty=bool(pick(0, 1)))
    return op, (3.0 * draw(pick(1, 2), pick(1, 3), rows, places),), ()


def _prependcls(pick: Any, draw: _Draw) -> Instance:
    x = _map(pick, draw)
    return PrependCls(), (x,), (draw(x.shape[1]),)


def _tokens(op: Op, position: bool) -> Callable[[Any, _Draw], Instance]:
    def make(pick: Any, draw: _Draw) -> Instance:
        x = draw(pick(1, 4), pick(1, 5), pick(1, 6))
        return op, (x,), (draw(*x.shape[1:]),) if position else ()

    return make


def _flatten(pick: Any, draw: _Draw) -> Instance:
    return Flatten(), (draw(pick(1, 4), pick(1, 6), 1, 1),), ()


def _cross_entropy(pick: Any, draw: _Draw) -> Instance:
    n, classes = pick(1, 4), pick(2, 6)
    targets = draw(n, classes) ** 2
    return SmoothedCrossEntropy(), (3.0 * draw(n, classes),), (targets / targets.sum(1, keepdims=True),)


OPS: dict[str, Callable[[Any, _Draw], Instance]] = {
    "conv2d": _conv(Conv2d),
    "depthwise": _conv(Depthwise),
    "batchnorm": _batchnorm,
    "relu": _plain(Relu(), 1),
    "copy": _plain(Copy(), 1),
    "add": _plain(Add(), 2),
    "droppath": _droppath,
    "layernorm": _layernorm,
    "layerscale": _layerscale,
    "gelutanh": _plain(GeluTanh(), 1, 3.0),
    "geluerf": _plain(GeluErf(), 1, 3.0),
    "relu6": _plain(Relu6(), 1, 4.0),
    "swish": _plain(Swish(), 1, 4.0),
    "globalaveragepool": _plain(GlobalAveragePool(), 1),
    "flatten": _flatten,
    "dense": _dense,
    "smoothedcrossentropy": _cross_entropy,
    "scores": _heads(Scores),
    "softmaxrows": _softmaxrows,
    "weighted": _heads(Weighted),
    "attention": _heads(Attention),
    "attentioncore": _heads(AttentionCore),
    "prependcls": _prependcls,
    "addposition": _tokens(AddPosition(), position=True),
    "clsslice": _tokens(ClsSlice(), position=False),
}
"""Op name -> how to draw an instance of it. A test holds this table against the ops that exist."""


def certify_op(name: str, instances: int = 40) -> Certificate:
    """Certify one op on generated instances."""
    drawn: list[list[_Identity]] = []
    for key in range(instances):
        bits = Bits(key, name)
        op, xs, ps = OPS[name](lambda low, high, b=bits: int(b.integers(low, high, (1,))[0]), _Draw(key))
        drawn.append(_identities_of_op(op, xs, ps, key))
    return _certificate(name, drawn)


def _identities_of_op(op: Op, xs: tuple[Floats, ...], ps: tuple[Floats, ...], key: int) -> list[_Identity]:
    delta_bits = Bits(key, "delta")
    y = op.forward(xs, ps)
    dy = Bits(key, "dy").normal(y.shape)
    held_xs, held_ps = (tuple(recorded(v, _P) for v in group) for group in (xs, ps))
    with quiet():
        v = op.vjp(held_xs, held_ps, recorded(dy, _P))
    cotangents = (*v.inputs, *v.params)
    operands = [*xs, *ps]
    deltas = [delta_bits.normal(a.shape) for a in operands[: len(cotangents)]]

    def moved(steps: Mapping[int, Floats]) -> Floats:
        stepped = [a + 1j * _H * steps.get(i, 0.0) for i, a in enumerate(operands)]
        return op.forward(tuple(stepped[: len(xs)]), tuple(stepped[len(xs) :])).imag / _H

    out = [
        _identity(dy, moved({i: delta}), cot, delta)
        for i, (cot, delta) in enumerate(zip(cotangents, deltas, strict=True))
    ]
    dxs, dps = deltas[: len(xs)], [*deltas[len(xs) :], *(None,) * (len(operands) - len(deltas))]
    with quiet():
        moves = (tuple(d if d is None else recorded(d, _P) for d in group) for group in (dxs, dps))
        t = tangent(op, held_xs, held_ps, *moves)
    return [*out, _identity(dy, moved(dict(enumerate(deltas))), t, dy)]


def certify_block(kind: str, instances: int = 25) -> Certificate:
    """Certify a block's whole chain: the input cotangent and every parameter node, on generated specs."""
    drawn: list[list[_Identity]] = []
    for case in sample(cases([kind], ["float64"]).filter(_conditioned), 3 * instances, key=1):
        if len(drawn) == instances:
            break
        tensors = {name: v.astype(np.float64) for name, v in case.tensors().items()}
        # Values of a benign family: the identity is about the wiring, and kinks have no derivative.
        bits = Bits(case.values.seed, "certify")
        constants = {t.name for t in case.block.constants()}
        tensors = {k: v if k in constants else np.asarray(bits.normal(v.shape)) for k, v in tensors.items()}
        chain = chain_of(case.block)
        expected = end_to_end(chain, tensors, _P)
        asked = {s: expected.cots[s] for s in (chain.input,) if s in expected.cots}
        cotangents = {**asked, **expected.grads}
        if not all(np.isfinite(c.err).all() for c in cotangents.values()):
            continue  # on a kink, as far as rounding can tell: there is no derivative
        deltas = {name: np.asarray(bits.normal(tensors[name].shape)) for name in cotangents}
        identities = []
        for name, cot in cotangents.items():
            delta = deltas[name]
            moved = np.asarray(_forward(chain, tensors, {name: delta}).imag) / _H
            identities.append(_identity(tensors["dy"], moved, cot, delta))
        drawn.append([*identities, _tangent_of_block(chain, tensors, deltas, identities)])
    if len(drawn) < instances:
        raise AssertionError(f"{kind}: only {len(drawn)} of {instances} instances have a derivative to certify")
    return _certificate(kind, drawn)


def _tangent_of_block(
    chain: Chain, tensors: dict[str, Floats], deltas: dict[str, Floats], others: Sequence[_Identity]
) -> _Identity:
    """The output's tangent for a delta of everything at once; ``others`` are the identities of each delta alone."""
    walked: dict[Key, Bounded] = {}
    TangentWalk(chain, tensors, deltas, _P).each(walked.__setitem__)
    moved = np.asarray(_forward(chain, tensors, deltas).imag) / _H
    identity = _identity(tensors["dy"], moved, walked["tangents", chain.output], tensors["dy"])
    # A net's worst-case bars, propagated, prove nothing. Its tangent is the sum of what the others certify.
    return identity._replace(bar=sum(i.bar for i in others)) if chain.deep else identity


def _conditioned(case: Case) -> bool:
    """Enough values per statistic for gradients that are not nearly 0 by cancellation."""
    fewest = case.block.fewest_statistics()
    return fewest is None or fewest >= 4


def _forward(chain: Chain, tensors: dict[str, Floats], step: dict[str, Floats]) -> NDArray[Any]:
    given = {k: v + 1j * _H * step.get(k, 0.0) for k, v in tensors.items()}
    sites = {chain.input: given[chain.input]}
    for link in chain.links:
        xs = tuple(sites[s] for s in link.reads)
        sites[link.writes] = link.op.forward(xs, tuple(given[p] for p in (*link.feeds, *link.constants)))
    return sites[chain.output]


class _Identity(NamedTuple):
    """One <dy, J.delta> = <VJP(dy), delta>: its mismatch, the bar of that, and the sum of absolute products."""

    mismatch: float
    bar: float
    magnitude: float

    @property
    def over_bar(self) -> float:
        if not np.isfinite(self.bar):
            return float("inf")  # an unbounded identity certifies nothing
        if self.bar > 0:
            return self.mismatch / self.bar
        return 0.0 if self.mismatch == 0 else float("inf")


def _identity(dy: Floats, moved: Floats, cot: Bounded, delta: Floats) -> _Identity:
    """<dy, moved> = <cot, delta>."""

    def dot(a: Floats, b: Floats) -> Floats:
        return np.atleast_1d(np.vdot(a, b))

    right = bilinear(dot, cot, recorded(delta, _P), delta.size)
    left = bilinear(dot, recorded(dy, _P), recorded(moved, _P), dy.size)
    magnitude = dot(np.abs(dy), np.abs(moved)) + dot(np.abs(cot.val), np.abs(delta))
    # The complex step rounds as the backward does: the backward's bar once more.
    bar = 2.0 * right.err[0] + left.err[0]
    return _Identity(abs(float(left.val[0] - right.val[0])), float(bar), float(magnitude[0]))


def _certificate(subject: str, instances: Sequence[Sequence[_Identity]]) -> Certificate:
    residual = over_bar = 0.0
    for identities in instances:
        # Python's max() may pass over NaN; NumPy's keeps it, and a NaN does not hold.
        worst, largest = (np.max([getattr(i, f) for i in identities]) for f in ("mismatch", "magnitude"))
        residual = float(np.maximum(residual, worst / largest if largest > 0 else worst))
        over_bar = float(np.max([over_bar, *(i.over_bar for i in identities)]))
    return Certificate(subject, sum(map(len, instances)), residual, over_bar)


def certify(
    ops: Sequence[str] = tuple(OPS), blocks: Sequence[str] = tuple(CHAINS)
) -> tuple[list[Certificate], list[Certificate]]:
    """Certify ops and blocks; returns the two lists of certificates."""
    return [certify_op(name) for name in ops], [certify_block(kind) for kind in blocks]
