"""conv2d and depthwise convolution: forward, input-VJP and parameter-VJPs (FORMULAS section 1).

All three maps are bilinear, so each is one function of two arrays and its bar is ``bars.bilinear`` of that function.
A kernel of kH x kW is applied tap by tap: one channel product per kernel position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from diffgrad.bars import Bounded, bilinear, total
from diffgrad.ops.base import Numbers, Op, Vjp

Padding = Literal["symmetric", "xla_same", "valid"]


class Axis(NamedTuple):
    """One spatial axis of a convolution: sizes, kernel extent, stride and low padding."""

    size: int
    out: int
    k: int
    stride: int
    lo: int


def axis(size: int, k: int, stride: int, padding: Padding) -> Axis:
    """Output size and low padding of one axis.

    ``symmetric``: lo = hi = (k-1)//2. ``xla_same``: out = ceil(size/stride), the total padding split low-first.
    ``valid``: none.
    """
    if padding == "xla_same":
        out = -(-size // stride)
        lo = max((out - 1) * stride + k - size, 0) // 2
    else:
        lo = (k - 1) // 2 if padding == "symmetric" else 0
        out = (size + 2 * lo - k) // stride + 1
    return Axis(size, out, k, stride, lo)


def _reach(ax: Axis, tap: int) -> tuple[slice, slice]:
    """Output positions whose tap lies inside the input, and the input positions they read."""
    first = max(0, -((tap - ax.lo) // ax.stride))
    last = min(ax.out - 1, (ax.size - 1 + ax.lo - tap) // ax.stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    start = first * ax.stride + tap - ax.lo
    return slice(first, last + 1), slice(start, start + (last - first) * ax.stride + 1, ax.stride)


@dataclass(frozen=True)
class _Geometry:
    h: Axis
    w: Axis

    def taps(self) -> list[tuple[int, int, tuple[slice, ...], tuple[slice, ...]]]:
        """(a, b, output slice, input slice) for each kernel position, out-of-range reads left out."""
        everything = slice(None)
        rows = [(a, *_reach(self.h, a)) for a in range(self.h.k)]
        cols = [(b, *_reach(self.w, b)) for b in range(self.w.k)]
        return [
            (a, b, (everything, everything, oh, ow), (everything, everything, ih, iw))
            for a, oh, ih in rows
            for b, ow, iw in cols
        ]


Mix = Callable[[Numbers, Numbers], Numbers]


def _mix_forward(w: Numbers, x: Numbers) -> Numbers:
    """[O,C], [N,C,h,w] -> [N,O,h,w]"""
    n, c, h, v = x.shape
    return np.matmul(w, x.reshape(n, c, h * v)).reshape(n, w.shape[0], h, v)


def _mix_weight(x: Numbers, dy: Numbers) -> Numbers:
    """[N,C,h,w], [N,O,h,w] -> [O,C]"""
    return np.tensordot(dy, x, axes=((0, 2, 3), (0, 2, 3)))


@dataclass(frozen=True)
class Conv2d(Op):
    """2-D convolution, groups 1. Parameters: W [O,C,kH,kW] and, when given, b [O]."""

    stride: int = 1
    padding: Padding = "symmetric"
    materialised = True

    def geometry(self, x: tuple[int, ...], w: tuple[int, ...]) -> _Geometry:
        """Axes for an input of shape ``x`` [N,C,H,W] and a kernel of shape ``w``."""
        return _Geometry(
            axis(x[2], w[2], self.stride, self.padding),
            axis(x[3], w[3], self.stride, self.padding),
        )

    # The three bilinear maps.
    def _apply(self, g: _Geometry, x: Numbers, w: Numbers) -> Numbers:
        y = np.zeros((x.shape[0], w.shape[0], g.h.out, g.w.out), np.result_type(x, w))
        for a, b, o, i in g.taps():
            y[o] += _mix_forward(w[:, :, a, b], x[i])
        return y

    def _apply_input(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        dx = np.zeros((dy.shape[0], w.shape[1], g.h.size, g.w.size))
        for a, b, o, i in g.taps():
            dx[i] += _mix_forward(w[:, :, a, b].T, dy[o])
        return dx

    def _apply_weight(self, g: _Geometry, x: Numbers, dy: Numbers) -> Numbers:
        dw = np.zeros((dy.shape[1], x.shape[1], g.h.k, g.w.k))
        for a, b, o, i in g.taps():
            dw[:, :, a, b] = _mix_weight(x[i], dy[o])
        return dw

    def _fan(self, w: tuple[int, ...]) -> tuple[int, int]:
        """Most products in one output element, and in one input-cotangent element."""
        taps = w[2] * w[3]
        return w[1] * taps, w[0] * taps

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x, w = xs[0], ps[0]
        y = self._apply(self.geometry(x.shape, w.shape), x, w)
        return y if len(ps) == 1 else y + ps[1][:, None, None]

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, w = xs[0], ps[0]
        g = self.geometry(x.val.shape, w.val.shape)
        y = bilinear(lambda a, b: self._apply(g, a, b), x, w, self._fan(w.val.shape)[0])
        return y if len(ps) == 1 else y + ps[1].reshape(-1, 1, 1)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, w = xs[0], ps[0]
        g = self.geometry(x.val.shape, w.val.shape)
        n, _, h, v = dy.val.shape
        dx = bilinear(lambda a, b: self._apply_input(g, a, b), dy, w, self._fan(w.val.shape)[1])
        dw = bilinear(lambda a, b: self._apply_weight(g, a, b), x, dy, n * h * v)
        if len(ps) == 1:
            return Vjp((dx,), (dw,))
        return Vjp((dx,), (dw, total(dy, (0, 2, 3)).reshape(-1)))


@dataclass(frozen=True)
class Depthwise(Conv2d):
    """One kernel per channel, no sum over channels. Parameters: W [C,1,kH,kW] and, when given, b [C]."""

    def _apply(self, g: _Geometry, x: Numbers, w: Numbers) -> Numbers:
        y = np.zeros((x.shape[0], x.shape[1], g.h.out, g.w.out), np.result_type(x, w))
        for a, b, o, i in g.taps():
            y[o] += x[i] * w[:, 0, a, b, None, None]
        return y

    def _apply_input(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        dx = np.zeros((*dy.shape[:2], g.h.size, g.w.size))
        for a, b, o, i in g.taps():
            dx[i] += dy[o] * w[:, 0, a, b, None, None]
        return dx

    def _apply_weight(self, g: _Geometry, x: Numbers, dy: Numbers) -> Numbers:
        dw = np.zeros((x.shape[1], 1, g.h.k, g.w.k))
        for a, b, o, i in g.taps():
            dw[:, 0, a, b] = np.einsum("nchw,nchw->c", x[i], dy[o])
        return dw

    def _fan(self, w: tuple[int, ...]) -> tuple[int, int]:
        return w[2] * w[3], w[2] * w[3]
