"""Activations: elementwise, dx = dy * f'(x) at the saved pre-activation (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import APPROXIMATE, Bounded, lift, one_minus, plus_one, sigmoid
from diffgrad.ops.base import Numbers, Op, Vjp


def masked(dy: Bounded, z: Bounded, inside: NDArray[np.bool_], kinks: tuple[float, ...]) -> Bounded:
    """dy where ``inside``, else 0; exact where the mask is certain.

    The side of a kink is certain where z is farther from it than its bound, or exact. Where it is not, the bar widens
    by the whole contribution.
    """
    val = np.where(inside, dy.val, 0.0)
    uncertain = np.zeros(z.val.shape, np.bool_)
    if not z.exact:
        for kink in kinks:
            uncertain |= (np.abs(z.val - kink) <= z.err) & (z.err > 0)
    # A kernel that multiplies by the mask turns an infinite dy into NaN even where the mask is 0.
    return lift(val, np.where(uncertain, dy.mag, np.where(inside | np.isinf(dy.err), dy.err, 0.0)), dy.p)


@dataclass(frozen=True)
class Relu(Op):
    """max(x, 0), one-sided: the derivative at exactly 0 is 0."""

    kinks = (0.0,)

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return np.where(xs[0].real > 0, xs[0], 0.0)

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        z = xs[0]
        # 1-Lipschitz; an element that is negative by more than its bound stays at 0.
        return lift(np.maximum(z.val, 0.0), np.where(z.val + z.err <= 0, 0.0, z.err), z.p)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        z = xs[0]
        return Vjp((masked(dy, z, z.val > 0, self.kinks),), ())


@dataclass(frozen=True)
class Relu6(Op):
    """min(max(x, 0), 6): the derivative is 1 strictly between 0 and 6. Another net than relu's."""

    kinks = (0.0, 6.0)

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x = xs[0]
        return np.where(x.real >= 6, 6.0, np.where(x.real > 0, x, 0.0))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        z = xs[0]
        flat = (z.val + z.err <= 0) | (z.val - z.err >= 6)
        return lift(np.clip(z.val, 0.0, 6.0), np.where(flat, 0.0, z.err), z.p)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        z = xs[0]
        return Vjp((masked(dy, z, (z.val > 0) & (z.val < 6), self.kinks),), ())


@dataclass(frozen=True)
class Swish(Op):
    """f = x*s(x) with the logistic s; f' = s*(1 + x*(1 - s)).

    ``relative`` and ``absolute`` are the errors of a cheaper s.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """An approximate exponential, or s = (1 + tanh(x/2))/2 with an approximate tanh."""
        if y.p.name != "float32" or not self.loses(xs, ps, y):
            return {}
        return {"approximate_exp": Swish(relative=APPROXIMATE), "approximate_tanh": Swish(absolute=APPROXIMATE / 2)}

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        x = xs[0]
        return np.asarray(x / (1.0 + np.exp(-x)))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return xs[0] * self._gate(xs[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x = xs[0]
        s = self._gate(x)
        slope = s * plus_one(x * one_minus(s))
        # Autodiff adds the two terms s and x*s*(1 - s) after they are rounded (and scaled by dy) on their own.
        spread = 4.0 * x.p.u * (s.mag + (x * s * one_minus(s)).mag)
        return Vjp((dy * slope.widen(spread),), ())

    def _gate(self, x: Bounded) -> Bounded:
        return sigmoid(x, self.relative, self.absolute)
