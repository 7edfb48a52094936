"""Attention: scores, softmax rows, the weighted sum, and the three as one fused core (FORMULAS section 1).

Head h owns the column slab [h*d, (h+1)*d) of Q, K, V [N,T,D] and of the output; S and P are [N,heads,T,T].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffgrad.bars import (
    APPROXIMATE,
    PRECISIONS,
    U_BF16,
    Array,
    Bounded,
    add,
    bilinear,
    exp,
    gamma,
    lift,
    neg,
    reciprocal,
    recorded,
    scale,
    summation,
    total,
)
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.ops.mask import ALL, Seen, behind, blank, highest, seen
from diffgrad.ops.products import EXACT, Products
from diffgrad.specs.ops import Mask


def split(v: Numbers, heads: int) -> Numbers:
    """[N,T,D] -> [N,heads,T,d]"""
    n, t, d = v.shape
    return v.reshape(n, t, heads, d // heads).swapaxes(1, 2)


def merge(v: Numbers) -> Numbers:
    """[N,heads,T,d] -> [N,T,D]"""
    n, heads, t, d = v.shape
    return v.swapaxes(1, 2).reshape(n, t, heads * d)


def _turned(v: Numbers) -> Numbers:
    return v.swapaxes(-1, -2)


@dataclass(frozen=True)
class Scores(Op):
    """S = Q*K^T/sqrt(d) for each head."""

    heads: int = 1
    products: Products = EXACT

    def stored(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> tuple[bool, bool]:
        _, t, d = xs[0].val.shape
        return d > self.heads, t > 1

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        return {name: replace(self, products=p) for name, p in self.products.looser(y).items()}

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        q, k = (split(x, self.heads) for x in xs)
        return np.asarray(q @ _turned(k) / math.sqrt(q.shape[-1]))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        q, k = (self.products.operand(x) for x in xs)
        d = q.val.shape[2] // self.heads
        y = bilinear(lambda a, b: split(a, self.heads) @ _turned(split(b, self.heads)), q, k, d)
        return self._scaled(y, q, k, d, d)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        q, k = (self.products.operand(x) for x in xs)
        _, t, width = q.val.shape
        d = width // self.heads
        ds = self._either_side(self.products.upstream(dy), d)
        dq = bilinear(lambda a, b: merge(a @ split(b, self.heads)), ds, k, t)
        dk = bilinear(lambda a, b: merge(_turned(a) @ split(b, self.heads)), ds, q, t)
        return Vjp((self._scaled(dq, ds, k, d, t), self._scaled(dk, ds, q, d, t)), ())

    def _scaled(self, y: Bounded, a: Bounded, b: Bounded, d: int, terms: int) -> Bounded:
        """A product times 1/sqrt(d): libraries also scale one operand first, or each by the root of the factor."""
        y = self.products.result(y)
        factor = 1.0 / math.sqrt(d)
        if d == 1:
            return y
        mag = factor * y.reach
        p = y.p
        flushed = np.minimum(mag, 2.0 * terms * p.lost * (np.max(a.mag) + np.max(b.mag) + 1.0))
        return scale(y, factor, roundings=2.0).widen(gamma(4, p) * mag + flushed)

    def _either_side(self, ds: Bounded, d: int) -> Bounded:
        """Rounding to bfloat16 and scaling commute only for a power of two; either may come first."""
        if not self.products.bf16 or self.products.f32_cotangent or math.frexp(math.sqrt(d))[0] == 0.5:
            return ds
        return ds.widen(2.0**-7 * ds.mag)


@dataclass(frozen=True)
class SoftmaxRows(Op):
    """p = softmax(z) over the last axis; dz = p*(dp - sum(p*dp)).

    ``approximation`` is the relative error of a cheaper exponential. What ``mask`` hides has a share of 0; where it
    hides a whole row, the row is 0, or with ``uniform_empty`` all of it has the same share.
    """

    approximation: float = 0.0
    mask: Mask = ()
    uniform_empty: bool = False

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        if y.p.name != "float32" or not self.loses(xs, ps, y):
            return {}
        return {"approximate_exp": replace(self, approximation=APPROXIMATE)}

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        z = np.where(self.seen, xs[0], highest(xs[0].real, self.seen))
        powers = np.exp(z - z.real.max(-1, keepdims=True)) * self.shared
        norm = powers.sum(-1, keepdims=True)
        return np.asarray(powers / np.where(self.shared.any(-1, keepdims=True), norm, 1.0))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return softmax(behind(xs[0], self.seen), self.approximation, self.shared)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((blank(softmax_back(self.bound(xs, ps), dy), self.seen),), ())

    @property
    def seen(self) -> Seen:
        """What the mask shows."""
        return seen(self.mask)

    @property
    def shared(self) -> Seen:
        """What has a share."""
        return self.seen | (self.uniform_empty & ~self.seen.any(-1, keepdims=True))


def softmax_parts(z: Bounded, approximation: float = 0.0, shared: Seen = ALL) -> tuple[Bounded, Bounded, Bounded]:
    """z - max, the exponentials of what is ``shared`` and their sum over the last axis."""
    top = recorded(z.val.max(-1, keepdims=True), z.p)
    shifted = add(z, neg(top))
    powers = blank(exp(shifted, approximation), shared)
    return shifted, powers, total(powers, (z.val.ndim - 1,))


def softmax(z: Bounded, approximation: float = 0.0, shared: Seen = ALL) -> Bounded:
    """softmax over the last axis of what is ``shared``; a row of nothing is 0."""
    _, powers, norm = softmax_parts(z, approximation, shared)
    full = shared.any(-1, keepdims=True)
    if not full.all():
        norm = lift(np.where(full, norm.val, 1.0), norm.err, norm.p)
    return powers * reciprocal(norm)


def softmax_back(p: Bounded, dp: Bounded, dot: Bounded | None = None) -> Bounded:
    """p*(dp - dot), for dot = sum(p*dp) over the last axis; the two products may also be rounded on their own."""
    if dot is None:
        dot = bilinear(_row_sum, p, dp, p.val.shape[-1], stored=2)
    dz = p * add(dp, neg(dot))
    parts = p.mag * (dp.mag + dot.mag)
    return dz.widen(gamma(3, p.p) * parts + np.minimum(parts, 2.0 * p.p.lost))


def _row_sum(a: Any, b: Any) -> Any:
    return (a * b).sum(-1, keepdims=True)


@dataclass(frozen=True)
class Weighted(Op):
    """O = P*V for each head, heads side by side: [N,T,D]."""

    heads: int = 1
    products: Products = EXACT

    def stored(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> tuple[bool, bool]:
        _, t, d = xs[1].val.shape
        return t > 1, t > 1 and d > self.heads

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        return {name: replace(self, products=p) for name, p in self.products.looser(y).items()}

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return merge(xs[0] @ split(xs[1], self.heads))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        p, v = (self.products.operand(x) for x in xs)
        y = bilinear(lambda a, b: merge(a @ split(b, self.heads)), p, v, p.val.shape[-1])
        return self.products.result(y)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        p, v = (self.products.operand(x) for x in xs)
        do = self.products.upstream(dy)
        t, d = v.val.shape[1], v.val.shape[2] // self.heads
        dp = bilinear(lambda a, b: split(a, self.heads) @ _turned(split(b, self.heads)), do, v, d)
        dv = bilinear(lambda a, b: merge(_turned(a) @ split(b, self.heads)), p, do, t)
        return Vjp((self.products.result(dp), self.products.result(dv)), ())


# Keys that a fused kernel takes at once, at the least; after every group it rescales what it has summed.
_GROUP = 16


@dataclass(frozen=True)
class Attention(Op):
    """The core as one link: O = softmax(Q*K^T/sqrt(d))*V for each head, for any fused kernel.

    Such a kernel may subtract the logarithm of the sum instead of dividing by the sum, rescale partial results as the
    running maximum grows, and take sum(dO*O) for sum(P*dP) in the backward. Each has roundings of its own.
    ``inner`` is the unit roundoff of a kernel that holds S, P and their cotangents in less than the run's precision.
    ``mask`` and ``uniform_empty`` are those of the softmax, the mask the same for every example and head.
    """

    heads: int = 1
    products: Products = EXACT
    inner: float = 0.0
    mask: Mask = ()
    uniform_empty: bool = False

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        if self.products.bf16:
            return {"bf16_core": replace(self, products=Products(True, bf16_result=True), inner=U_BF16)}
        models: dict[str, Op] = {}
        if y.p.name == "float64":
            models["f32_softmax"] = replace(self, inner=PRECISIONS["float32"].u)
        if not self.softmax.shared.any(-1).all():
            models["uniform_empty_row"] = uniform = replace(self, uniform_empty=True)
            models |= {f"uniform_empty_row+{name}": op for name, op in uniform.looser(xs, ps, y).items()}
        return models

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        q, k, v = xs
        p = self.softmax.forward((Scores(self.heads).forward((q, k), ()),), ())
        return Weighted(self.heads).forward((p, v), ())

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        q, k, v = xs
        return self._weighted.bound((self._shares(q, k), v), ())

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        q, k, v = xs
        p = self._shares(q, k)
        dp, dv = self._weighted.vjp((p, v), (), dy).inputs
        dot = bilinear(_row_sum, p, dp, p.val.shape[-1], stored=2)
        o = self._weighted.bound((p, v), ())
        other = bilinear(lambda a, b: (split(a, self.heads) * split(b, self.heads)).sum(-1, keepdims=True), dy, o, k=1)
        dot = dot.widen(other.err + summation(o.val.shape[2] // self.heads, dy.p, 2) * other.reach)
        ds = softmax_back(p, dp, dot).widen(4.0 * self.inner * p.mag * (dp.mag + dot.mag) + 4.0 * self._inner_tiny)
        dq, dk = self._scores.vjp((q, k), (), blank(ds, self.softmax.seen)).inputs
        return Vjp((dq, dk, dv), ())

    @property
    def softmax(self) -> SoftmaxRows:
        """The softmax within."""
        return SoftmaxRows(mask=self.mask, uniform_empty=self.uniform_empty)

    @property
    def _scores(self) -> Scores:
        return Scores(self.heads, self.products)

    @property
    def _weighted(self) -> Weighted:
        return Weighted(self.heads, self.products)

    def _shares(self, q: Bounded, k: Bounded) -> Bounded:
        s = behind(self._scores.bound((q, k), ()), self.softmax.seen)
        p = softmax(s.widen(2.0 * self.inner * s.mag), shared=self.softmax.shared)
        p = p.widen(p.mag * np.expm1(self._slack(s)) + self._inner_tiny)
        return blank(p, self.softmax.shared)

    @property
    def _inner_tiny(self) -> float:
        """What a kernel with a softmax in float32 (or bfloat16, of the same range) flushes."""
        return PRECISIONS["float32"].tiny if self.inner else 0.0

    def _slack(self, s: Bounded) -> Array:
        """The further relative error of a share: z - (max + log sum), and one exponential a group of keys."""
        t = s.val.shape[-1]
        top = np.abs(s.val).max(-1, keepdims=True)
        groups = 1 + t // _GROUP
        spread: Array = s.val.max(-1, keepdims=True) - s.val.min(-1, keepdims=True)
        own = summation(8 * groups, s.p, 0) + s.p.acc * (2.0 * top + s.mag + math.log(t) + groups * spread)
        return np.asarray(own + self.inner * (8.0 + t))


@dataclass(frozen=True)
class AttentionCore(Op):
    """The core alone, on an input q and the parameters k and v, each [N,T,D]."""

    core: Attention = Attention()

    @property
    def name(self) -> str:
        return self.core.name

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        return {
            name: AttentionCore(op)
            for name, op in self.core.looser((*xs, *ps), (), y).items()
            if isinstance(op, Attention)
        }

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return self.core.forward((*xs, *ps), ())

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return self.core.bound((*xs, *ps), ())

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        dq, dk, dv = self.core.vjp((*xs, *ps), (), dy).inputs
        return Vjp((dq,), (dk, dv))
