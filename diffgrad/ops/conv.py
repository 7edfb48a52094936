"""conv2d and depthwise convolution: forward, input-VJP and parameter-VJPs (FORMULAS section 1).

All three maps are bilinear, so each is one function of two arrays and its bar is ``bars.bilinear`` of that function.
The input-VJP is written as the convolution of the spread-out cotangent with the flipped kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from diffgrad.bars import Array, Bounded, biased, bilinear, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.ops.fast import DIRECT, Algorithm, Axis, fast
from diffgrad.ops.products import EXACT, Products

Padding = Literal["symmetric", "xla_same", "valid"]
Pads = tuple[int, int, int, int]
"""Explicit padding: top, bottom, left, right. A negative one crops."""


def axis(size: int, k: int, stride: int, padding: Padding | tuple[int, int]) -> Axis:
    """Output size and low padding of one axis.

    ``symmetric``: lo = hi = (k-1)//2. ``xla_same``: out = ceil(size/stride), the total padding split low-first.
    ``valid``: none. Two numbers: lo and hi themselves.
    """
    if isinstance(padding, tuple):
        lo, hi = padding
        out = (size + lo + hi - k) // stride + 1
    elif padding == "xla_same":
        out = -(-size // stride)
        lo = max((out - 1) * stride + k - size, 0) // 2
    else:
        lo = (k - 1) // 2 if padding == "symmetric" else 0
        out = (size + 2 * lo - k) // stride + 1
    return Axis(size, out, k, stride, lo)


@dataclass(frozen=True)
class _Geometry:
    h: Axis
    w: Axis

    @property
    def pointwise(self) -> bool:
        return all(a.k == a.stride == 1 and a.lo == 0 and a.out == a.size for a in (self.h, self.w))

    @property
    def tiled(self) -> bool:
        """Patches side by side: every input position feeds one output position, or none at the far edges."""
        return all(a.lo == 0 and a.k == a.stride and a.reach <= a.size for a in (self.h, self.w))

    def untile(self, patches: Numbers) -> Numbers:
        """[N,H',W',C,kH,kW] -> [N,C,H,W], 0 where no patch lies."""
        n, rows, cols, c, kh, kw = patches.shape
        x = np.zeros((n, c, self.h.size, self.w.size), patches.dtype)
        x[:, :, : rows * kh, : cols * kw] = patches.transpose(0, 3, 1, 4, 2, 5).reshape(n, c, rows * kh, cols * kw)
        return x

    def windows(self, x: Numbers) -> Numbers:
        """What each output position reads: [N,C,H,W] -> [N,C,H',W',kH,kW], out-of-range reads 0."""
        padded = _pad(x, self.h, self.w)
        seen = sliding_window_view(padded, (self.h.k, self.w.k), axis=(2, 3))
        strided: Numbers = seen[:, :, :: self.h.stride, :: self.w.stride]
        return strided

    def back_windows(self, dy: Numbers) -> Numbers:
        """Which output positions each input position feeds: [N,O,H',W'] -> [N,O,H,W,kH,kW], kernel taps reversed.

        The cotangent is spread out by the stride; after that the input-VJP is a stride-1 convolution.
        """
        h, w = self.h.transposed(), self.w.transposed()
        spread = np.zeros((*dy.shape[:2], h.size, w.size), dy.dtype)
        spread[:, :, :: self.h.stride, :: self.w.stride] = dy
        return sliding_window_view(_pad(spread, h, w), (h.k, w.k), axis=(2, 3))


def _pad(x: Numbers, h: Axis, w: Axis) -> Numbers:
    """Zero-padded (or cropped, where a stride leaves a remainder or a padding is negative), so that every window is
    inside."""
    padded = np.zeros((*x.shape[:2], h.reach, w.reach), x.dtype)
    (rows, to_rows), (cols, to_cols) = _kept(h), _kept(w)
    padded[:, :, to_rows, to_cols] = x[:, :, rows, cols]
    return padded


def _kept(a: Axis) -> tuple[slice, slice]:
    """The part of an axis that some window may read, and where it lies in the padded axis."""
    first, last = max(-a.lo, 0), max(min(a.size, a.reach - a.lo), 0)
    first = min(first, last)
    return slice(first, last), slice(first + a.lo, last + a.lo) if last > first else slice(0, 0)


def _channels(w: Numbers, x: Numbers) -> Numbers:
    """[O,C], [N,C,H,W] -> [N,O,H,W]"""
    n, c, h, v = x.shape
    return np.asarray(np.matmul(w, x.reshape(n, c, h * v))).reshape(n, w.shape[0], h, v)


@dataclass(frozen=True)
class Conv2d(Op):
    """2-D convolution, groups 1. Parameters: W [O,C,kH,kW] and, when given, b [O]."""

    stride: int = 1
    padding: Padding | Pads = "symmetric"
    products: Products = EXACT
    algorithm: Algorithm = DIRECT

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        ops: dict[str, Op] = {}
        if y.p.name == "float32" and not self.products.bf16:
            algorithms = fast(ps[0].val.shape[2:], self.stride)
            ops = {name: replace(self, algorithm=algorithm) for name, algorithm in algorithms.items()}
        return ops | {name: replace(self, products=p) for name, p in self.products.looser(y).items()}

    def geometry(self, x: tuple[int, ...], w: tuple[int, ...]) -> _Geometry:
        """Axes for an input of shape ``x`` [N,C,H,W] and a kernel of shape ``w``."""
        rows: Padding | tuple[int, int]
        cols: Padding | tuple[int, int]
        if isinstance(self.padding, tuple):
            rows, cols = self.padding[:2], self.padding[2:]
        else:
            rows = cols = self.padding
        return _Geometry(axis(x[2], w[2], self.stride, rows), axis(x[3], w[3], self.stride, cols))

    # The three bilinear maps. A 1x1 kernel at stride 1 is a product over channels.
    def _apply(self, g: _Geometry, x: Numbers, w: Numbers) -> Numbers:
        if g.pointwise:
            return _channels(w[:, :, 0, 0], x)
        return np.moveaxis(np.tensordot(g.windows(x), w, axes=((1, 4, 5), (1, 2, 3))), 3, 1)

    def _apply_input(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        if g.pointwise:
            return _channels(w[:, :, 0, 0].T, dy)
        if g.tiled:
            return g.untile(np.tensordot(dy, w, axes=((1,), (0,))))
        flipped = w[:, :, ::-1, ::-1]
        return np.moveaxis(np.tensordot(g.back_windows(dy), flipped, axes=((1, 4, 5), (0, 2, 3))), 3, 1)

    def _apply_weight(self, g: _Geometry, x: Numbers, dy: Numbers) -> Numbers:
        return np.tensordot(dy, g.windows(x), axes=((0, 2, 3), (0, 2, 3)))

    def _fan(self, w: tuple[int, ...]) -> tuple[int, int]:
        """Most products in one output element, and in one input-cotangent element."""
        taps = w[2] * w[3]
        return w[1] * taps, w[0] * taps

    def _back(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        """The input map at stride 1 as a convolution of the cotangent, on its own (transposed) geometry."""
        return self._apply(g, dy, w.swapaxes(0, 1)[:, :, ::-1, ::-1])

    def _lost(
        self, h: Axis, w: Axis, op: Callable[[_Geometry, Array, Array], Array], a: Bounded, b: Bounded, k: int
    ) -> Array:
        """What the algorithm loses in one of the three maps."""
        return self.algorithm.error(h, w, lambda h, w, a, b: op(_Geometry(h, w), a, b), a.mag, b.mag, k, a.p)

    def stored(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> tuple[bool, bool]:
        """Sums are stored; a convolution of a single product is fused like any multiplication."""
        forward, backward = self._fan(ps[0].val.shape)
        return forward > 1, backward > 1

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x, w = xs[0], ps[0]
        y = self._apply(self.geometry(x.shape, w.shape), x, w)
        return y if len(ps) == 1 else y + ps[1][:, None, None]

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, w = self.products.operand(xs[0]), self.products.operand(ps[0])
        g = self.geometry(x.val.shape, w.val.shape)
        k = self._fan(w.val.shape)[0]
        y = bilinear(lambda a, b: self._apply(g, a, b), x, w, k)
        y = self.products.result(y.widen(self._lost(g.h, g.w, self._apply, x, w, k)))
        return y if len(ps) == 1 else biased(y, ps[1].reshape(-1, 1, 1), k)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, w, d = self.products.operand(xs[0]), self.products.operand(ps[0]), self.products.upstream(dy)
        g = self.geometry(x.val.shape, w.val.shape)
        n, _, h, v = dy.val.shape
        fan, outputs = self._fan(w.val.shape)[1], n * h * v
        dx = bilinear(lambda a, b: self._apply_input(g, a, b), d, w, fan)
        dx = self.products.result(dx.widen(self._lost(g.h.transposed(), g.w.transposed(), self._back, d, w, fan)))
        dw = bilinear(lambda a, b: self._apply_weight(g, a, b), x, d, outputs)
        dw = self.products.result(dw.widen(self._lost(g.h, g.w, self._apply_weight, x, d, outputs)))
        if len(ps) == 1:
            return Vjp((dx,), (dw,))
        return Vjp((dx,), (dw, total(dy, (0, 2, 3)).reshape(-1)))


@dataclass(frozen=True)
class Depthwise(Conv2d):
    """One kernel per channel, no sum over channels. Parameters: W [C,1,kH,kW] and, when given, b [C]."""

    def _apply(self, g: _Geometry, x: Numbers, w: Numbers) -> Numbers:
        y: Numbers = np.einsum("nchwab,cab->nchw", g.windows(x), w[:, 0])
        return y

    def _apply_input(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        dx: Numbers = np.einsum("nchwab,cab->nchw", g.back_windows(dy), w[:, 0, ::-1, ::-1])
        return dx

    def _apply_weight(self, g: _Geometry, x: Numbers, dy: Numbers) -> Numbers:
        dw: Numbers = np.einsum("nchwab,nchw->cab", g.windows(x), dy)
        return dw[:, None]

    def _back(self, g: _Geometry, dy: Numbers, w: Numbers) -> Numbers:
        return self._apply(g, dy, w[:, :, ::-1, ::-1])

    def _fan(self, w: tuple[int, ...]) -> tuple[int, int]:
        return w[2] * w[3], w[2] * w[3]
