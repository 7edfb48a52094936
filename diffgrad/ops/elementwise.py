"""copy, add, layer scale and the drop-path site: the wiring of residual blocks (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffgrad.bars import Bounded, add, bilinear
from diffgrad.ops.base import Numbers, Op, Vjp


@dataclass(frozen=True)
class Copy(Op):
    """The identity: names a branch where an activation forks, so that the branch has a cotangent of its own."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return xs[0]

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return xs[0]

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((dy,), ())


@dataclass(frozen=True)
class Add(Op):
    """branch + skip; both read the cotangent unchanged."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return xs[0] + xs[1]

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return add(xs[0], xs[1])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((dy, dy), ())


@dataclass(frozen=True)
class LayerScale(Op):
    """y = gamma * x on maps [N,C,H,W]; gamma is per channel [C] or per element [C,H,W]."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return np.asarray(xs[0] * ps[0].reshape(self._spread(ps[0].shape)))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return self._times(xs[0], ps[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        shape = ps[0].val.shape
        axes = (0, 2, 3) if len(shape) == 1 else (0,)
        terms = int(np.prod([dy.val.shape[i] for i in axes]))
        gain = bilinear(lambda a, b: np.asarray((a * b).sum(axes)), xs[0], dy, terms, stored=2)
        return Vjp((self._times(dy, ps[0]),), (gain,))

    def _times(self, v: Bounded, g: Bounded) -> Bounded:
        return bilinear(lambda a, b: np.asarray(a * b), v, g.reshape(*self._spread(g.val.shape)), 1)

    def _spread(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1, -1, 1, 1) if len(shape) == 1 else (1, *shape)


@dataclass(frozen=True)
class DropPath(Op):
    """A stochastic-depth site: y_n = a_n * x_n. The constant a [N] (0 or 1/keep) is given, not differentiated."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return xs[0] * _per_example(ps[0], xs[0].ndim)

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return self._scale(xs[0], ps[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((self._scale(dy, ps[0]),), ())

    def _scale(self, v: Bounded, a: Bounded) -> Bounded:
        y = v * a.reshape(-1, *(1,) * (v.val.ndim - 1))
        # Scaling by a power of two is exact, barring overflow and underflow, and by 0 it is 0.
        mantissa = np.abs(np.frexp(_per_example(a.val, v.val.ndim))[0])
        unchanged = ((mantissa == 0.5) | (mantissa == 0)) & (v.err == 0) & ((y.val == 0) | (np.abs(y.val) >= v.p.tiny))
        return Bounded(y.val, np.where(unchanged & np.isfinite(y.err), 0.0, y.err), v.p)


def _per_example(a: Numbers, ndim: int) -> Numbers:
    """[N] -> [N,1,...,1]"""
    return a.reshape(-1, *(1,) * (ndim - 1))
