"""GELU in its two forms (FORMULAS section 1), with bars that saturate as the function does.

A kernel may form x**3, which overflows long before GELU or its slope does. That excuses nothing: the slope tends to 1
and 0, so where tanh and erf have saturated the bars are those of the saturated function, and a NaN is a fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfc

from diffgrad.bars import APPROXIMATE, ERF_ROUNDINGS, PRECISIONS, Array, Bounded, Precision, kernel, lift
from diffgrad.ops.base import Numbers, Op, Vjp

_K = math.sqrt(2.0 / math.pi)
_A = 0.044715

# From here on tanh(q) and erf(q) are 1 in every precision, and 1 - tanh(q)**2 is 0.
_SATURATED = 20.0
# Beyond this the tail e**2q (or erfc) is 0 in float64, too.
_UNDERFLOW = 350.0
# Bounds of |f'| (at most 1.13) and |f''| (at most 0.8, at 0), for an uncertain input.
_SLOPE = 1.2
_BEND = 1.0
# Roundings of q = K*(x + A*x**3), and of the products around the slope.
_INNER = 8.0
# The rational erf of Abramowitz and Stegun, 7.1.26, in float32.
_CHEAP_ERF = 1.5e-7 + ERF_ROUNDINGS * PRECISIONS["float32"].u


@dataclass(frozen=True)
class _Gelu(Op):
    """f = x/2 * (1 + t(x)) with t the tanh or the erf form.

    ``approximation`` is the error of a cheaper t: relative for tanh, absolute for erf.
    """

    approximation: float = 0.0

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x = xs[0]
        return np.asarray(0.5 * x * self.opening(x))

    def opening(self, x: Numbers) -> Numbers:
        """1 + t(x), from 0 to 2, without cancellation; analytic."""
        raise NotImplementedError

    def gate_error(self, x: Array, t: Array, p: Precision) -> Array:
        """Rounding error of t at an exact x."""
        raise NotImplementedError

    def slope(self, x: Array, t: Array, t_err: Array, p: Precision) -> tuple[Array, Array]:
        """x/2 * t'(x), and its rounding error at an exact x."""
        raise NotImplementedError

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x = xs[0]
        u = x.p.u
        opening = self.opening(x.val)
        val = 0.5 * x.val * opening
        err = 0.5 * np.abs(x.val) * (self.gate_error(x.val, opening - 1.0, x.p) + 4.0 * u * opening) + _SLOPE * x.err
        # Where 1 + t has rounded to 0, a kernel may also keep the tail.
        tail = np.where(opening <= 2.0 * u, 1.5 * np.abs(val), 0.0)
        return lift(val, err + np.maximum(tail, np.minimum(np.abs(val), 2.0 * x.p.lost)), x.p)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x = xs[0]
        u = x.p.u
        opening = self.opening(x.val)
        t = opening - 1.0
        t_err = self.gate_error(x.val, t, x.p)
        tail, tail_err = self.slope(x.val, t, t_err, x.p)
        val = 0.5 * opening + tail
        err = 0.5 * t_err + 2.0 * u * opening + tail_err + 4.0 * u * np.abs(tail) + _BEND * x.err + 4.0 * x.p.lost
        present = 0.5 * opening + np.abs(tail)
        err = err + np.where(opening <= 2.0 * u, 1.5 * present, 0.0)
        # Autodiff multiplies dy through one factor at a time, and any partial product may be flushed.
        near = 1.0 + np.minimum(np.abs(x.val), _SATURATED)
        flushed = np.minimum(present * dy.mag, 8.0 * x.p.lost * near**3)
        return Vjp(((dy * lift(val, err, x.p)).widen(flushed),), ())


@dataclass(frozen=True)
class GeluTanh(_Gelu):
    """t = tanh(q), q = sqrt(2/pi)*(x + 0.044715*x**3): the documents' GELU."""

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """An approximate tanh. The erf form is as close to this one, and is another function."""
        if y.p.name != "float32" or not self.loses(xs, ps, y) or not GeluErf(_CHEAP_ERF).loses(xs, ps, y):
            return {}
        return {"approximate_tanh": GeluTanh(APPROXIMATE)}

    def opening(self, x: Numbers) -> Numbers:
        q = _K * (x + _A * x**3)
        near = q.real > -_UNDERFLOW
        return np.where(near, 2.0 / (1.0 + np.exp(-2.0 * np.where(near, q, 0.0))), 0.0)

    def gate_error(self, x: Array, t: Array, p: Precision) -> Array:
        q = _K * (np.abs(x) + _A * np.abs(x) ** 3)
        moved = _INNER * p.u * q
        err = (
            (1.0 - t * t) * moved
            + 0.4 * moved * moved
            + (kernel(ERF_ROUNDINGS, p) * p.u + self.approximation) * np.abs(t)
        )
        return np.where(q < _SATURATED, err, 0.0)

    def slope(self, x: Array, t: Array, t_err: Array, p: Precision) -> tuple[Array, Array]:
        opening = self.opening(x)
        flat = _K * (x + _A * x**3) >= _SATURATED
        near = np.where(flat | (opening == 0.0), 0.0, x)
        weight = 0.5 * near * _K * (1.0 + 3.0 * _A * near * near)
        rest = opening * (2.0 - opening)  # 1 - t*t would cancel to 0 far below 0, where the tail is 100 times the rest
        rest_err = 2.0 * np.abs(t) * t_err + t_err * t_err + 2.0 * p.u * t * t + p.u * rest
        tail = weight * rest
        return tail, np.abs(weight) * rest_err + _INNER * p.u * np.abs(tail)


@dataclass(frozen=True)
class GeluErf(_Gelu):
    """t = erf(x/sqrt(2)): the exact GELU, x*Phi(x)."""

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """The rational erf of Abramowitz and Stegun 7.1.26 (error at most 1.5e-7), which float32 kernels use."""
        if y.p.name != "float32":
            return {}
        return {"approximate_erf": GeluErf(_CHEAP_ERF)}

    def opening(self, x: Numbers) -> Numbers:
        near = x.real > -_UNDERFLOW
        return np.where(near, erfc(-np.where(near, x, 0.0) / math.sqrt(2.0)), 0.0)

    def gate_error(self, x: Array, t: Array, p: Precision) -> Array:
        density = np.exp(-0.5 * x * x) * _K
        err = density * 2.0 * p.u * np.abs(x) + kernel(ERF_ROUNDINGS, p) * p.u * np.abs(t) + self.approximation
        return np.where(np.abs(x) < _SATURATED, err, 0.0)

    def slope(self, x: Array, t: Array, t_err: Array, p: Precision) -> tuple[Array, Array]:
        tail = x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        tail = np.where(np.isfinite(tail), tail, 0.0)
        # The exponent -x*x/2 is rounded, which the exponential turns into a relative error of its size.
        square = np.minimum(x * x, 4.0 * _SATURATED**2)
        return tail, np.abs(tail) * p.u * (_INNER + 2.0 * square)
