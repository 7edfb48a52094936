"""Normalisations with live statistics: three-term backward over any axes (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from diffgrad.bars import Array, Axes, Bounded, Moments, add, composed, gamma, moments, neg, scale, summation, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.specs import EPS

Kind = Literal["channel", "scalar", "token", "token_scalar"]


@dataclass(frozen=True)
class Norm(Op):
    """y = gamma * (x - mean)/sqrt(v + eps) + beta, biased variance, two passes.

    ``inv_std`` replaces the statistic by one that a run is known to have used, for a named looser model.
    """

    uses = 4  # in the values, in their mean, and in the variance in both ways again

    eps: float = EPS
    inv_std: Bounded | None = field(default=None, compare=False)

    def axes(self, ndim: int) -> Axes:
        """The axes that the statistics are taken over."""
        raise NotImplementedError

    def spread(self, ndim: int) -> tuple[int, ...]:
        """The shape in which gamma and beta multiply an input of ``ndim`` axes; they vary along the one of -1."""
        raise NotImplementedError

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x = xs[0]
        axes = self.axes(x.ndim)
        g, b = (p.reshape(self.spread(x.ndim)) for p in ps)
        c = x - x.mean(axes, keepdims=True)
        inv_std = ((c * c).mean(axes, keepdims=True) + self.eps) ** -0.5
        return np.asarray(g * (c * inv_std) + b)

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x = xs[0]
        g, b = (p.reshape(*self.spread(x.val.ndim)) for p in ps)
        m = self._moments(x)
        y = g * m.normalised + b
        # Libraries also fold the affine map: alpha = gamma*s, y = x*alpha + (beta - mean*alpha). That adds the
        # roundings of the two uncentred products and of the shift.
        alpha = g.mag * m.inv_std.mag
        parts = x.mag * alpha + m.mean.mag * alpha + b.mag
        factors = 4.0 + x.mag + m.mean.mag if x.p.gradual else 4.0  # a subnormal alpha is rounded before it multiplies
        folded = gamma(2, x.p) * parts + np.minimum(parts, factors * x.p.lost)
        return y.widen(np.where(parts <= x.p.largest, folded, np.inf))

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x = xs[0]
        axes, spread = self.axes(x.val.ndim), self.spread(x.val.ndim)
        g = ps[0].reshape(*spread)
        m = self._moments(x)
        shared = tuple(i for i, size in enumerate(spread) if size == 1)
        d = g * dy
        # dx = (s/n) * (n*d - sum(d) - xhat * sum(xhat*d))
        mean_d = scale(total(d, axes), 1.0 / m.n)
        mean_xd = scale(_project(x, m, d, axes), 1.0 / m.n)
        along = m.normalised * mean_xd
        dx = m.inv_std * add(d, neg(mean_d), neg(along))
        # Also evaluated as dy*alpha + b*x + c, with b and c from the sums: the roundings of the uncentred products.
        uncentred = gamma(4, x.p) * m.inv_std.mag**2 * mean_xd.mag * (x.mag + m.mean.mag)
        present = m.inv_std.mag * (d.mag + mean_d.mag + along.mag)
        # Autodiff goes through centred, its square, their mean, the power and its products, and the two means.
        stored = composed(8, x.p) * present
        dx = dx.widen(uncentred + stored + _flushes(m, g, present) + _cube_flush(x, m, d, axes))
        nodes = (_project(x, m, dy, shared), total(dy, shared))
        return Vjp((dx,), tuple(node.reshape(*p.val.shape) for node, p in zip(nodes, ps, strict=True)))

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """One-pass variance, E[x^2] - E[x]^2: the run's own 1/std, fitted to its output, if that model explains it."""
        x = xs[0]
        axes = self.axes(x.val.ndim)
        g, b = (p.reshape(*self.spread(x.val.ndim)) for p in ps)
        m = moments(x, axes, self.eps)
        slope = g.val * m.centred.val
        power = (slope * slope).sum(axes, keepdims=True)
        fitted = (slope * (y.val - b.val)).sum(axes, keepdims=True) / power
        fitted = np.where(np.isfinite(fitted), fitted, m.inv_std.val)
        allowed = moments(x, axes, self.eps, one_pass=True).inv_std.err
        if not (np.abs(fitted - m.inv_std.val) <= allowed).all():
            return {}
        exactly = replace(self, inv_std=Bounded(fitted, np.zeros_like(fitted), x.p))
        doubt = (np.abs(slope) * exactly.bound(xs, ps).err).sum(axes, keepdims=True) / power
        return {"one_pass_variance": replace(self, inv_std=Bounded(fitted, np.where(power == 0, 0.0, doubt), x.p))}

    def _moments(self, x: Bounded) -> Moments:
        m = moments(x, self.axes(x.val.ndim), self.eps)
        if self.inv_std is None:
            return m
        return replace(m, inv_std=self.inv_std, normalised=m.centred * self.inv_std)


@dataclass(frozen=True)
class BatchNorm(Norm):
    """Statistics over (N, H, W) of each channel; gamma, beta [C]."""

    def axes(self, ndim: int) -> Axes:
        return (0, 2, 3)

    def spread(self, ndim: int) -> tuple[int, ...]:
        return (1, -1, 1, 1)


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Statistics within one example.

    ``channel``: over C at each position of [N,C,H,W], gamma and beta [C]. ``scalar``: over the whole C*H*W map, gamma
    and beta [1]. ``token``: over the last axis of [N,T,D] (or [N,D]), gamma and beta [D]; ``token_scalar``: [1].
    """

    kind: Kind = "channel"

    def axes(self, ndim: int) -> Axes:
        if self.kind in ("token", "token_scalar"):
            return (ndim - 1,)
        return (1,) if self.kind == "channel" else tuple(range(1, ndim))

    def spread(self, ndim: int) -> tuple[int, ...]:
        if self.kind in ("scalar", "token_scalar"):
            return (1,) * ndim
        at = 1 if self.kind == "channel" else ndim - 1
        return tuple(-1 if i == at else 1 for i in range(ndim))


def _project(x: Bounded, m: Moments, dy: Bounded, axes: Axes) -> Bounded:
    """sum(dy * xhat) over ``axes``, also covering its folded form: sum(s * (dy*x - dy*mean))."""
    k = int(np.prod([x.val.shape[i] for i in axes]))
    gain = total(dy * m.normalised, axes)
    parts = (x.mag + m.mean.mag) * dy.mag
    uncentred = parts.sum(axes, keepdims=True)
    weighted = (parts * m.inv_std.mag).sum(axes, keepdims=True)
    flushed = 2.0 * x.p.lost * (np.ones_like(parts) * m.inv_std.mag).sum(axes, keepdims=True)
    lost = summation(k + 3, x.p, 5) * weighted + np.minimum(weighted, flushed)
    return gain.widen(np.where(uncentred <= x.p.largest, lost, np.inf))


def _flushes(m: Moments, g: Bounded, present: Array) -> Array:
    """What flushed intermediates of the three terms may lose, in whatever order their factors are multiplied.

    A flush loses at most ``lost`` times the factors still to come: gamma and s in the first two terms; gamma, three s
    and the centred value in the third. It never loses more than is there. The terms may overflow before they cancel;
    in a fused kernel they are n times as large.
    """
    s = np.maximum(1.0, m.inv_std.mag)
    lost = 4.0 * g.p.lost * np.maximum(1.0, g.mag) * (s + m.centred.mag * s**3)
    # So may the cube of s, in float16.
    fits = (present <= g.p.largest) & (s**3 <= g.p.largest)
    fits &= m.n * present * np.maximum(1.0, 1.0 / m.inv_std.mag) <= g.p.largest_in_kernels
    return np.where(fits, np.minimum(present, lost), np.inf)


def _cube_flush(x: Bounded, m: Moments, d: Bounded, axes: Axes) -> Array:
    """Autodiff of (v + eps)**-1/2 forms s**3/2 (over n), which a very large variance flushes to zero.

    The sum it is multiplied with may overflow, and so may the product, but none of float16 within a kernel. Fused
    kernels multiply it with a sum of uncentred products.
    """
    along = (d.mag * m.centred.mag).sum(axes, keepdims=True)
    uncentred = (d.mag * (x.mag + m.mean.mag)).sum(axes, keepdims=True)
    cube = m.inv_std.mag**3
    gone = np.where(cube < 2 * m.n * d.p.tiny, np.minimum(cube, 2 * m.n * d.p.lost), 0.0)
    lost = gone * along * m.centred.mag / m.n
    fits = (along <= d.p.largest) & (uncentred * np.maximum(1.0, cube) <= d.p.largest_in_kernels)
    return np.where(fits, lost, np.inf)
