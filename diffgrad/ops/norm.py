"""Normalisations: training-mode batch norm, three-term backward with live statistics (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from diffgrad.bars import Array, Bounded, Moments, add, bilinear, gamma, moments, neg, scale, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.specs import EPS

_MAP = (0, 2, 3)


@dataclass(frozen=True)
class BatchNorm(Op):
    """BN over (N, H, W) per channel, biased variance, two passes. Parameters: gamma [C], beta [C].

    ``inv_std`` replaces the statistic by one that a run is known to have used, for a named looser model.
    """

    eps: float = EPS
    inv_std: Bounded | None = field(default=None, compare=False)

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """One-pass variance, E[x^2] - E[x]^2: the run's own 1/std, fitted to its output, if that model explains it."""
        x, g, b = xs[0], ps[0].reshape(1, -1, 1, 1), ps[1].reshape(1, -1, 1, 1)
        m = moments(x, _MAP, self.eps)
        c = m.centred.val
        slope = g.val * (c * c).sum(_MAP, keepdims=True)
        fitted = (c * (y.val - b.val)).sum(_MAP, keepdims=True) / slope
        fitted = np.where(np.isfinite(fitted), fitted, m.inv_std.val)
        allowed = moments(x, _MAP, self.eps, one_pass=True).inv_std.err
        if not (np.abs(fitted - m.inv_std.val) <= allowed).all():
            return {}
        exactly = replace(self, inv_std=Bounded(fitted, np.zeros_like(fitted), x.p))
        doubt = (np.abs(c) * exactly.bound(xs, ps).err).sum(_MAP, keepdims=True) / np.abs(slope)
        return {"one_pass_variance": replace(self, inv_std=Bounded(fitted, np.where(slope == 0, 0.0, doubt), x.p))}

    def _moments(self, x: Bounded) -> Moments:
        m = moments(x, _MAP, self.eps)
        if self.inv_std is None:
            return m
        return replace(m, inv_std=self.inv_std, normalised=m.centred * self.inv_std)

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x, (g, b) = xs[0], ps
        c = x - x.mean(_MAP, keepdims=True)
        inv_std = ((c * c).mean(_MAP, keepdims=True) + self.eps) ** -0.5
        y: Numbers = g[:, None, None] * (c * inv_std) + b[:, None, None]
        return y

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, g, b = xs[0], ps[0].reshape(1, -1, 1, 1), ps[1].reshape(1, -1, 1, 1)
        m = self._moments(x)
        y = g * m.normalised + b
        # Libraries also fold the affine map: alpha = gamma*s, y = x*alpha + (beta - mean*alpha). That adds the
        # roundings of the two uncentred products and of the shift.
        alpha = g.mag * m.inv_std.mag
        parts = x.mag * alpha + m.mean.mag * alpha + b.mag
        return y.widen(gamma(2, x.p) * parts + np.minimum(parts, 4.0 * x.p.tiny))

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, g = xs[0], ps[0].reshape(1, -1, 1, 1)
        m = self._moments(x)
        beta = total(dy, _MAP)
        gain = _project(x, m, dy)
        d = g * dy
        # dx = (s/n) * (n*d - sum(d) - xhat * sum(xhat*d))
        mean_d = scale(g * beta, 1.0 / m.n)
        along = m.normalised * scale(g * gain, 1.0 / m.n)
        dx = m.inv_std * add(d, neg(mean_d), neg(along))
        present = m.inv_std.mag * (d.mag + mean_d.mag + along.mag)
        return Vjp((dx.widen(_flushes(m, g, present) + _cube_flush(m, d)),), (gain.reshape(-1), beta.reshape(-1)))


def _flushes(m: Moments, g: Bounded, present: Array) -> Array:
    """What flushed intermediates of the three terms may lose, in whatever order their factors are multiplied.

    A flush loses at most ``tiny`` times the factors still to come: gamma and s in the first two terms; gamma, three s
    and the centred value in the third. It never loses more than is there. The terms may overflow before they cancel.
    """
    s = np.maximum(1.0, m.inv_std.mag)
    lost = 4.0 * g.p.tiny * np.maximum(1.0, g.mag) * (s + m.centred.mag * s**3)
    return np.where(present <= g.p.largest, np.minimum(present, lost), np.inf)


def _cube_flush(m: Moments, d: Bounded) -> Array:
    """Autodiff of (v + eps)**-1/2 forms s**3/2 (over n), which a very large variance flushes to zero.

    The sum it is multiplied with may overflow, too.
    """
    along = (d.mag * m.centred.mag).sum(_MAP, keepdims=True)
    cube = m.inv_std.mag**3
    lost = np.where(cube < 2 * m.n * d.p.tiny, cube, 0.0) * along * m.centred.mag / m.n
    return np.where(along <= d.p.largest, lost, np.inf)


def _project(x: Bounded, m: Moments, dy: Bounded) -> Bounded:
    """dgamma = sum(dy * xhat), also covering its folded form s * (sum(dy*x) - mean*sum(dy))."""
    c = x.val.shape[1]
    gain = bilinear(lambda a, b: np.einsum("nchw,nchw->c", a, b), dy, m.normalised, m.n)
    uncentred = ((x.mag + m.mean.mag) * dy.mag).sum(_MAP, keepdims=True)
    lost = gamma(m.n + 3, x.p) * uncentred + np.minimum(uncentred, 2 * m.n * x.p.tiny)
    return gain.reshape(1, c, 1, 1).widen(m.inv_std.mag * np.where(uncentred <= x.p.largest, lost, np.inf))
