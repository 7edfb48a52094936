"""Normalisations: training-mode batch norm, three-term backward with live statistics (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diffgrad.bars import Array, Bounded, Moments, bilinear, gamma, moments, scale, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.specs import EPS

_MAP = (0, 2, 3)


@dataclass(frozen=True)
class BatchNorm(Op):
    """BN over (N, H, W) per channel, biased variance, two passes. Parameters: gamma [C], beta [C]."""

    eps: float = EPS
    one_pass: bool = False
    """Bars for the variance as E[x^2] - E[x]^2, which cancels when the mean is large."""

    def looser(self) -> dict[str, Op]:
        return {"one_pass_variance": replace(self, one_pass=True)}

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x, (g, b) = xs[0], ps
        c = x - x.mean(_MAP, keepdims=True)
        inv_std = ((c * c).mean(_MAP, keepdims=True) + self.eps) ** -0.5
        y: Numbers = g[:, None, None] * (c * inv_std) + b[:, None, None]
        return y

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, g, b = xs[0], ps[0].reshape(1, -1, 1, 1), ps[1].reshape(1, -1, 1, 1)
        m = moments(x, _MAP, self.eps, self.one_pass)
        y = g * m.normalised + b
        # Libraries also fold the affine map: alpha = gamma*s, y = x*alpha + (beta - mean*alpha). That adds the
        # roundings of the two uncentred products and of the shift.
        alpha = g.mag * m.inv_std.mag
        return y.widen(gamma(2, x.p) * (x.mag * alpha + m.mean.mag * alpha + b.mag))

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, g = xs[0], ps[0].reshape(1, -1, 1, 1)
        m = moments(x, _MAP, self.eps, self.one_pass)
        beta = total(dy, _MAP)
        gain = _project(x, m, dy)
        d = g * dy
        # dx = (s/n) * (n*d - sum(d) - xhat * sum(xhat*d))
        mean_d = scale(g * beta, 1.0 / m.n)
        mean_xd = scale(g * gain, 1.0 / m.n)
        dx = m.inv_std * (d - mean_d - m.normalised * mean_xd)
        return Vjp((dx.widen(_cube_flush(m, d)),), (gain.reshape(-1), beta.reshape(-1)))


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
