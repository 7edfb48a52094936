"""Tokens: patches in a row behind the cls token, positions, and the cls slice (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffgrad.bars import Bounded, add, total
from diffgrad.ops.base import Numbers, Op, Vjp


@dataclass(frozen=True)
class PrependCls(Op):
    """Patches [N,D,H,W], row-major, behind the cls token [D]: [N,1+H*W,D]. A rearrangement, exact."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return _prepend(xs[0], ps[0])

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, cls = xs[0], ps[0]
        return Bounded(_prepend(x.val, cls.val), _prepend(x.err, cls.err), x.p)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        shape = xs[0].val.shape
        patches = dy.moved(lambda v: v[:, 1:].swapaxes(1, 2).reshape(shape))
        return Vjp((patches,), (total(dy.moved(lambda v: v[:, 0]), (0,)).reshape(-1),))


def _prepend(x: Numbers, cls: Numbers) -> Numbers:
    n, d = x.shape[:2]
    patches = x.reshape(n, d, -1).swapaxes(1, 2)
    return np.concatenate((np.broadcast_to(cls, (n, 1, d)), patches), axis=1)


@dataclass(frozen=True)
class AddPosition(Op):
    """x + pos for x [N,T,D] and pos [T,D]."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return np.asarray(xs[0] + ps[0])

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return add(xs[0], ps[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((dy,), (total(dy, (0,)).reshape(*ps[0].val.shape),))


@dataclass(frozen=True)
class ClsSlice(Op):
    """Token 0 of [N,T,D]. The backward scatters to row 0; the patch rows get 0."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return xs[0][:, 0]

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return xs[0].moved(lambda v: v[:, 0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        shape = xs[0].val.shape
        return Vjp((dy.moved(lambda v: _scatter(v, shape)),), ())


def _scatter(v: Numbers, shape: tuple[int, ...]) -> Numbers:
    out = np.zeros(shape, v.dtype)
    out[:, 0] = v
    return out
