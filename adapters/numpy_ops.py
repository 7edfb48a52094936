"""The primitives of the NumPy reference: each a value, its parents, and the pull-back in the same precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import erf

from diffgrad.adapters.numpy_tape import Floats, Var
from diffgrad.specs import EPS
from diffgrad.specs.ops import Mask, shown
from diffgrad.specs.vit import TokenNorm

Padding = str | tuple[int, int, int, int]
"""By name, or the numbers of rows above and below and of columns left and right; a negative one crops."""


class Primitives:
    """Each primitive is a method, so that a planted fault can replace it."""

    def copy(self, x: Var) -> Var:
        return Var(x.value, (x,), lambda dy: (dy,))

    def add(self, a: Var, b: Var) -> Var:
        return Var(a.value + b.value, (a, b), lambda dy: (dy, dy))

    def scale(self, x: Var, a: Floats) -> Var:
        """One factor per example."""
        s = a.reshape(-1, *(1,) * (x.value.ndim - 1))
        return Var(x.value * s, (x,), lambda dy: (dy * s,))

    def relu(self, x: Var) -> Var:
        mask = x.value > 0
        return Var(np.where(mask, x.value, x.value.dtype.type(0)), (x,), lambda dy: (dy * mask,))

    def relu6(self, x: Var) -> Var:
        mask = (x.value > 0) & (x.value < 6)
        return Var(np.clip(x.value, 0, 6), (x,), lambda dy: (dy * mask,))

    def swish(self, x: Var) -> Var:
        s = 1 / (1 + np.exp(-x.value))
        return Var(x.value * s, (x,), lambda dy: (dy * (s * (1 + x.value * (1 - s))),))

    def gap(self, x: Var) -> Var:
        """Mean over the map, dimensions kept."""
        shape, size = x.value.shape, x.value.dtype.type(x.value.shape[2] * x.value.shape[3])
        mean = x.value.mean((2, 3), keepdims=True)
        return Var(mean, (x,), lambda dy: (np.broadcast_to(dy / size, shape),))

    def flatten(self, x: Var) -> Var:
        return Var(x.value.reshape(len(x.value), -1), (x,), lambda dy: (dy.reshape(x.value.shape),))

    def dense(self, x: Var, w: Var, b: Var, bf16: bool = False) -> Var:
        """Over the last axis; with the flag, every product takes rounded operands."""
        low, kernel = self.operand(x.value, bf16), self.operand(w.value, bf16)

        def pull(dy: Floats) -> tuple[Floats, Floats, Floats]:
            d = self.operand(dy, bf16)
            dw = low.reshape(-1, low.shape[-1]).T @ d.reshape(-1, d.shape[-1])
            return d @ kernel.T, self.weight_sum(dw, len(dy)), dy.reshape(-1, dy.shape[-1]).sum(0)

        return Var(low @ kernel + b.value, (x, w, b), pull)

    def operand(self, v: Floats, bf16: bool) -> Floats:
        """What a product reads: rounded to bfloat16 with the flag, else as it is."""
        return v.astype(ml_dtypes.bfloat16).astype(v.dtype) if bf16 else v

    def scores(self, q: Var, k: Var, heads: int, bf16: bool = False) -> Var:
        """Q*K^T/sqrt(d) of each head."""
        a, b = (self.slabs(self.operand(v.value, bf16), heads) for v in (q, k))
        factor = q.value.dtype.type(1 / np.sqrt(self.scaled_by(a)))

        def pull(ds: Floats) -> tuple[Floats, Floats]:
            d = self.operand(ds, bf16)
            return self.join_heads(d @ b) * factor, self.join_heads(d.swapaxes(2, 3) @ a) * factor

        return Var(a @ b.swapaxes(2, 3) * factor, (q, k), pull)

    def scaled_by(self, slabs: Floats) -> int:
        """The head's width, whose root divides the scores."""
        return int(slabs.shape[-1])

    def softmax(self, z: Var, axis: int = -1, mask: Mask = ()) -> Var:
        """Softmax of every row, of what the mask shows; 0 where it shows nothing."""
        value = np.where(self.shown(mask), z.value, -np.inf) if mask else z.value
        top = value.max(axis, keepdims=True)
        powers = np.exp(value - np.where(np.isneginf(top), 0, top))
        norm = self.softmax_norm(powers, axis)
        p = powers / np.where(norm == 0, 1, norm)
        return Var(p, (z,), lambda dp: (self.softmax_back(p, dp, axis),))

    def softmax_norm(self, powers: Floats, axis: int) -> Floats:
        return np.asarray(powers.sum(axis, keepdims=True))

    def shown(self, mask: Mask) -> NDArray[np.bool_]:
        """What a mask leaves."""
        return np.array(shown(mask))

    def softmax_back(self, p: Floats, dp: Floats, axis: int) -> Floats:
        return np.asarray(p * (dp - (p * dp).sum(axis, keepdims=True)))

    def weighted(self, p: Var, v: Var, heads: int, bf16: bool = False) -> Var:
        """P*V of each head, heads side by side."""
        a, b = self.operand(p.value, bf16), self.slabs(self.operand(v.value, bf16), heads)

        def pull(do: Floats) -> tuple[Floats, Floats]:
            d = self.heads(self.operand(do, bf16), heads)
            return d @ b.swapaxes(2, 3), self.join_heads(a.swapaxes(2, 3) @ d)

        return Var(self.join_heads(a @ b), (p, v), pull)

    def slabs(self, v: Floats, heads: int) -> Floats:
        """The slab of each head, [N,T,D] -> [N,heads,T,d], of what a core reads."""
        return self.heads(v, heads)

    def heads(self, v: Floats, heads: int) -> Floats:
        n, t, width = v.shape
        return v.reshape(n, t, heads, width // heads).swapaxes(1, 2)

    def join_heads(self, v: Floats) -> Floats:
        """[N,heads,T,d] -> [N,T,D]"""
        n, heads, t, d = v.shape
        return v.swapaxes(1, 2).reshape(n, t, heads * d)

    def token_norm(self, x: Var, g: Var, b: Var, norm: TokenNorm) -> Var:
        """Layer norm of each token."""
        return self.norm(x, g, b, (2,), (0, 1) if norm == "vector" else (0, 1, 2))

    def prepend(self, x: Var, cls: Var) -> Var:
        """Patches in a row behind the cls token."""
        n, d = x.value.shape[:2]
        patches = x.value.reshape(n, d, -1).swapaxes(1, 2)
        tokens = np.concatenate((np.broadcast_to(cls.value, (n, 1, d)), patches), axis=1)
        return Var(tokens, (x, cls), lambda dy: (dy[:, 1:].swapaxes(1, 2).reshape(x.value.shape), self.cls_node(dy)))

    def cls_node(self, dy: Floats) -> Floats:
        return np.asarray(dy[:, 0].sum(0))

    def position(self, x: Var, pos: Var) -> Var:
        """A position for every token."""
        return Var(x.value + pos.value, (x, pos), lambda dy: (dy, dy.sum(0)))

    def cls_slice(self, x: Var) -> Var:
        """Token 0; backward, the patch rows get nothing."""

        def pull(dy: Floats) -> tuple[Floats]:
            dx = np.zeros_like(x.value)
            dx[:, 0] = dy
            return (dx,)

        return Var(x.value[:, 0], (x,), pull)

    def cross_entropy(self, z: Var, t: Floats) -> Var:
        """Smoothed cross entropy, averaged over the batch."""
        shifted = z.value - z.value.max(-1, keepdims=True)
        powers = np.exp(shifted)
        norm = powers.sum(-1, keepdims=True)
        loss = -(t * (shifted - np.log(norm))).sum() / z.value.dtype.type(len(t))
        return Var(np.asarray(loss), (z,), lambda dy: (self.loss_back(powers / norm, t) * dy,))

    def loss_back(self, p: Floats, t: Floats) -> Floats:
        """Cotangent at the logits."""
        return np.asarray((p - t) / p.dtype.type(len(t)))

    def conv(self, x: Var, w: Var, stride: int = 1, padding: Padding = "symmetric", bf16: bool = False) -> Var:
        """By gathered patches [N,C,H',W',kH,kW]; ``x`` is zero-padded first."""
        window = self.window(x.value.shape, w.value.shape, stride, padding)
        patches, kernel = window.patches(self.operand(x.value, bf16)), self.operand(w.value, bf16)

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            d = self.operand(dy, bf16)
            dx = self.way_back(window).scatter(np.einsum("nohw,ocab->nchwab", d, kernel))
            return dx, self.weight_sum(np.einsum("nchwab,nohw->ocab", patches, d, optimize=True), len(dy))

        return Var(np.einsum("nchwab,ocab->nohw", patches, kernel, optimize=True), (x, w), pull)

    def depthwise(self, x: Var, w: Var, stride: int = 1, padding: Padding = "symmetric") -> Var:
        """One kernel per channel."""
        window = self.window(x.value.shape, w.value.shape, stride, padding)
        patches, kernel = window.patches(x.value), w.value[:, 0]

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            dx = self.way_back(window).scatter(np.einsum("nchw,cab->nchwab", dy, kernel))
            return dx, self.weight_sum(np.einsum("nchwab,nchw->cab", patches, dy)[:, None], len(dy))

        return Var(np.einsum("nchwab,cab->nchw", patches, kernel), (x, w), pull)

    def window(self, x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: Padding) -> Window:
        """Where the taps lie."""
        return Window(x, w, stride, padding)

    def way_back(self, window: Window) -> Window:
        """Where the input's cotangent is put: where the input was read."""
        return window

    def weight_sum(self, dw: Floats, batch: int) -> Floats:
        """A kernel's gradient is the *sum* over the batch."""
        return dw

    def bias(self, x: Var, b: Var) -> Var:
        """One number per channel."""
        return Var(x.value + b.value[:, None, None], (x, b), lambda dy: (dy, dy.sum((0, 2, 3))))

    def layer_scale(self, x: Var, g: Var) -> Var:
        """gamma per channel or per element of the map."""
        shared = (0, 2, 3) if g.value.ndim == 1 else (0,)
        scale = g.value[:, None, None] if g.value.ndim == 1 else g.value
        return Var(x.value * scale, (x, g), lambda dy: (self.scale_back(dy, scale), (dy * x.value).sum(shared)))

    def scale_back(self, dy: Floats, scale: Floats) -> Floats:
        return np.asarray(dy * scale)

    def gelu(self, x: Var, form: str) -> Var:
        """The tanh or the erf form."""
        v = x.value
        real = v.dtype.type
        if form == "gelu_tanh":
            k, a = real(np.sqrt(2 / np.pi)), real(0.044715)
            t = np.tanh(k * (v + a * v * v * v))
            rest = 1 - t * t  # 0 where tanh is saturated, and there v*v may have overflowed
            slope = (1 + t) / 2 + np.where(rest == 0, real(0), v / 2 * rest * k * (1 + 3 * a * v * v))
        else:
            t = erf(v / real(np.sqrt(2)))
            slope = (1 + t) / 2 + v * np.exp(-v * v / 2) / real(np.sqrt(2 * np.pi))
        return Var(v / 2 * (1 + t), (x,), lambda dy: (dy * slope,))

    def bn(self, x: Var, g: Var, b: Var) -> Var:
        """Batch norm with live statistics: over everything but the channel."""
        return self.norm(x, g, b, (0, 2, 3), (0, 2, 3))

    def ln(self, x: Var, g: Var, b: Var, kind: str) -> Var:
        """Layer norm of one example: over the channels, or over the whole map with one gamma and beta."""
        if kind == "channel":
            return self.norm(x, g, b, (1,), (0, 2, 3))
        return self.norm(x, g, b, (1, 2, 3), (0, 1, 2, 3))

    def norm(self, x: Var, g: Var, b: Var, axes: tuple[int, ...], shared: tuple[int, ...]) -> Var:
        """Mean, then the mean square of the centred values, over ``axes``; gamma is the same along ``shared``."""
        centred = x.value - x.value.mean(axes, keepdims=True)
        inv_std = self.inverse_root(self.variance(centred, axes))
        normed = centred * inv_std
        spread = (-1, 1, 1) if x.value.ndim == 4 else (-1,)
        gain, shift = g.value.reshape(spread), b.value.reshape(spread)

        def pull(dy: Floats) -> tuple[Floats, Floats, Floats]:
            dx = self.bn_back(gain * dy, normed, inv_std, axes)
            gamma, beta = self.bn_nodes(dy, dx, normed, shared)
            return dx, gamma.reshape(g.value.shape), beta.reshape(b.value.shape)

        return Var(gain * normed + shift, (x, g, b), pull)

    def variance(self, centred: Floats, axes: tuple[int, ...]) -> Floats:
        return np.asarray(np.mean(centred * centred, axes, keepdims=True))

    def inverse_root(self, variance: Floats) -> Floats:
        return np.asarray(1 / np.sqrt(variance + variance.dtype.type(EPS)))

    def bn_back(self, d: Floats, normed: Floats, inv_std: Floats, axes: tuple[int, ...]) -> Floats:
        """Cotangent at the norm's input, for d = gamma * dy."""
        along = (normed * d).mean(axes, keepdims=True)
        return np.asarray(inv_std * (d - d.mean(axes, keepdims=True) - normed * along))

    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats, shared: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Gradients of gamma and beta, from the cotangent at the norm's *output*."""
        return (dy * normed).sum(shared), dy.sum(shared)


class Window:
    """Where a convolution's taps lie: low padding, output size, and the way there and back."""

    def __init__(self, x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: Padding) -> None:
        self.shape, self.kernel, self.stride = x, w[2:], stride
        self.low, self.out = [], []
        for axis, (size, k) in enumerate(zip(x[2:], self.kernel, strict=True)):
            if padding == "xla_same":
                out = -(-size // stride)
                low = max((out - 1) * stride + k - size, 0) // 2
            else:
                low, high = self._pads(padding, axis, k)
                out = (size + low + high - k) // stride + 1
            self.low.append(low)
            self.out.append(out)

    def _pads(self, padding: Padding, axis: int, k: int) -> tuple[int, int]:
        if isinstance(padding, tuple):
            return padding[2 * axis], padding[2 * axis + 1]
        return (k // 2, k // 2) if padding == "symmetric" else (0, 0)

    def _first(self) -> list[int]:
        """Where in the padded map the first window begins: a negative padding skips what it crops."""
        return [max(-low, 0) for low in self.low]

    def _padded_shape(self) -> tuple[int, int]:
        high, wide = (
            max(size + max(low, 0), first + (out - 1) * self.stride + k)
            for size, low, first, out, k in zip(
                self.shape[2:], self.low, self._first(), self.out, self.kernel, strict=True
            )
        )
        return high, wide

    def _inside(self) -> tuple[slice, ...]:
        keep = (slice(max(low, 0), max(low, 0) + size) for low, size in zip(self.low, self.shape[2:], strict=True))
        return (slice(None), slice(None), *keep)

    def patches(self, x: Floats) -> Floats:
        """[N,C,H,W] -> [N,C,H',W',kH,kW]"""
        padded = np.zeros((*self.shape[:2], *self._padded_shape()), x.dtype)
        padded[self._inside()] = x
        s, (top, left) = self.stride, self._first()
        seen = sliding_window_view(padded, self.kernel, axis=(2, 3))[:, :, top::s, left::s]
        return np.asarray(seen[:, :, : self.out[0], : self.out[1]])

    def scatter(self, patches: Floats) -> Floats:
        """The transpose of patches: every tap's share added where it was read."""
        padded = np.zeros((*self.shape[:2], *self._padded_shape()), patches.dtype)
        s, (top, left), (rows, cols) = self.stride, self._first(), self.out
        for a in range(self.kernel[0]):
            for b in range(self.kernel[1]):
                read = padded[:, :, top + a :: s, left + b :: s]
                read[:, :, :rows, :cols] += patches[..., a, b]
        return np.asarray(padded[self._inside()])
