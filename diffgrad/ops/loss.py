"""The smoothed cross entropy at the top of every net (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diffgrad.bars import Bounded, add, bilinear, log, neg, scale
from diffgrad.ops.attention import softmax, softmax_parts
from diffgrad.ops.base import Numbers, Op, Vjp


@dataclass(frozen=True)
class SmoothedCrossEntropy(Op):
    """L = -(1/B) * sum of t*log softmax(z) over examples and classes, for logits z [B,K].

    The constant t [B,K] holds the targets; each row sums to 1 up to the rounding of its entries. The cotangent at the
    logits is (softmax(z) - t)/B.
    """

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        z, t = xs[0], ps[0]
        shifted = z - z.real.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return np.asarray(-(t * log_p).sum() / z.shape[0])

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        z, t = xs[0], ps[0]
        shifted, _, norm = softmax_parts(z)
        top = np.abs(z.val).max(-1, keepdims=True)
        # log p is (z - max) - log(sum), or z - (max + log(sum)): the latter rounds at the size of the logits.
        log_p = add(shifted, neg(log(norm))).widen(2.0 * z.p.u * (top + z.mag))
        loss = bilinear(lambda a, b: np.asarray(np.vdot(a, b)), t, neg(log_p), t.val.size)
        return scale(loss, 1.0 / z.val.shape[0], roundings=2.0)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        z, t = xs[0], ps[0]
        # With targets whose row does not quite sum to 1 the derivative is softmax*sum(t) - t; libraries leave the
        # sum out or keep it, so both are within the bar.
        p = softmax(z)
        slack = np.abs(t.val.sum(-1, keepdims=True) - 1.0)
        d = add(p, neg(t)).widen(p.mag * slack)
        return Vjp((scale(d * dy, 1.0 / z.val.shape[0], roundings=2.0),), ())
