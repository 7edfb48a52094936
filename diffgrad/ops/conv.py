"""conv2d and depthwise convolution: forward, input-VJP and parameter-VJPs (FORMULAS section 1).

All three maps are bilinear, so each is one function of two arrays and its bar is ``bars.bilinear`` of that function.
The input-VJP is written as the convolution of the spread-out cotangent with the flipped kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from diffgrad.bars import Bounded, biased, bilinear, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.ops.products import EXACT, Products

Padding = Literal["symmetric", "xla_same", "valid"]


class Axis(NamedTuple):
    """One spatial axis of a convolution: sizes, kernel extent, stride and low padding."""

    size: int
    out: int
    k: int
    stride: int
    lo: int

    @property
    def reach(self) -> int:
        """Padded extent that the windows cover."""
        return (self.out - 1) * self.stride + self.k

    def transposed(self) -> Axis:
        """The stride-1 axis that leads from the spread-out cotangent back to the input."""
        return Axis((self.out - 1) * self.stride + 1, self.size, self.k, 1, self.k - 1 - self.lo)


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


@dataclass(frozen=True)
class _Geometry:
    h: Axis
    w: Axis

    @property
    def pointwise(self) -> bool:
        return self.h.k == self.w.k == self.h.stride == self.w.stride == 1

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
    """Zero-padded (or cropped, where a stride leaves a remainder) so that every window is inside."""
    padded = np.zeros((*x.shape[:2], h.reach, w.reach), x.dtype)
    rows, cols = min(h.size, h.reach - h.lo), min(w.size, w.reach - w.lo)
    padded[:, :, h.lo : h.lo + rows, w.lo : w.lo + cols] = x[:, :, :rows, :cols]
    return padded


def _channels(w: Numbers, x: Numbers) -> Numbers:
    """[O,C], [N,C,H,W] -> [N,O,H,W]"""
    n, c, h, v = x.shape
    return np.asarray(np.matmul(w, x.reshape(n, c, h * v))).reshape(n, w.shape[0], h, v)


@dataclass(frozen=True)
class Conv2d(Op):
    """2-D convolution, groups 1. Parameters: W [O,C,kH,kW] and, when given, b [O]."""

    stride: int = 1
    padding: Padding = "symmetric"
    products: Products = EXACT

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        return {name: replace(self, products=p) for name, p in self.products.looser().items()}

    def geometry(self, x: tuple[int, ...], w: tuple[int, ...]) -> _Geometry:
        """Axes for an input of shape ``x`` [N,C,H,W] and a kernel of shape ``w``."""
        return _Geometry(
            axis(x[2], w[2], self.stride, self.padding),
            axis(x[3], w[3], self.stride, self.padding),
        )

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
        y = self.products.result(bilinear(lambda a, b: self._apply(g, a, b), x, w, self._fan(w.val.shape)[0]))
        return y if len(ps) == 1 else biased(y, ps[1].reshape(-1, 1, 1), self._fan(w.val.shape)[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, w, d = self.products.operand(xs[0]), self.products.operand(ps[0]), self.products.upstream(dy)
        g = self.geometry(x.val.shape, w.val.shape)
        n, _, h, v = dy.val.shape
        dx = self.products.result(bilinear(lambda a, b: self._apply_input(g, a, b), d, w, self._fan(w.val.shape)[1]))
        dw = self.products.result(bilinear(lambda a, b: self._apply_weight(g, a, b), x, d, n * h * v))
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

    def _fan(self, w: tuple[int, ...]) -> tuple[int, int]:
        return w[2] * w[3], w[2] * w[3]
