"""The floating-point model: how far a correct run in a given precision may lie from the real value.

Every bar of the checker is built here, by running error analysis: a ``Bounded`` array is a float64 value with an
elementwise bound on the distance between that value and what *any* evaluation order in the run's precision may hold
in its place. The rules are the standard ones (N. Higham, *Accuracy and Stability of Numerical Algorithms*, ch. 2-4):
one rounding costs u, a sum of k products in any order costs gamma_k = k*u/(1 - k*u) of the sum of absolute products,
and results below the smallest normal number may be flushed to zero. In the 16-bit formats kernels sum in float32 and
round the sum once; an evaluation op by op rounds every intermediate tensor, a fused one only its result.

There are no tunable tolerances: a bar is a function of the operands, the operation and the precision.

Overflow is part of the model (infinite bounds, and 0 * inf on the way to them), so callers that walk a whole chain do
so under ``quiet()``, once, rather than every operation silencing NumPy for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Axes = tuple[int, ...]


def quiet() -> np.errstate:
    """NumPy's floating-point warnings off: the model tracks overflow itself."""
    return np.errstate(all="ignore")


@dataclass(frozen=True)
class Precision:
    """A binary floating-point format, as far as error bars need it.

    Attributes:
        name: the NumPy dtype name.
        u: unit roundoff charged for one operation.
        tiny: smallest normal number.
        largest: largest finite number.
        digits: significand bits; integers up to 2**digits are exact.
        acc: unit roundoff of the accumulation inside one sum; kernels of the 16-bit formats sum in float32.
        lost: the most that an operation whose result lies below ``tiny`` may lose: ``tiny`` where it may be flushed
            to zero, half the spacing of the subnormal numbers where they are kept.
    """

    name: str
    u: float
    tiny: float
    largest: float
    digits: int
    acc: float
    lost: float

    @property
    def narrow(self) -> bool:
        """Whether sums are taken in more precision than their operands and result have."""
        return self.acc < self.u

    @property
    def largest_in_kernels(self) -> float:
        """Largest finite number within a fused kernel, which computes in float32 at the least."""
        return max(self.largest, PRECISIONS["float32"].largest)

    @property
    def gradual(self) -> bool:
        """Whether subnormal numbers are kept."""
        return self.lost < self.tiny


_U32, _TINY32 = 2.0**-24, 2.0**-126

PRECISIONS: dict[str, Precision] = {
    "float32": Precision("float32", _U32, _TINY32, float(np.finfo(np.float32).max), 24, _U32, _TINY32),
    # The oracle computes in float64 too, so in a float64 run its own rounding counts as well: twice 2**-53.
    "float64": Precision("float64", 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max), 53, 2.0**-52, 2.0**-1022),
    "bfloat16": Precision("bfloat16", 2.0**-8, _TINY32, (2.0 - 2.0**-7) * 2.0**127, 8, _U32, _TINY32),
    "float16": Precision("float16", 2.0**-11, 2.0**-14, 65504.0, 11, _U32, 2.0**-25),
}

LOOSER_PRECISIONS: dict[str, Callable[[Precision], Precision | None]] = {
    "low_accumulation": lambda p: replace(p, acc=p.u) if p.narrow else None,
    "flush_to_zero": lambda p: replace(p, lost=p.tiny) if p.gradual else None,
}
"""Cheaper arithmetic by name, the least loose first: the precision that it amounts to, None where it is no cheaper.

``flush_to_zero``: subnormal results become 0, in float16 too. ``low_accumulation``: sums in the 16-bit format itself.
"""

APPROXIMATE = 2.0**-11
"""Relative error of the hardware approximations of tanh (and of what is built on it) that GPU kernels may take."""

# Correctly rounded division and square root cost one u each; library rsqrt kernels document up to 2 ulp (4 u).
RSQRT_ROUNDINGS = 4
# exp and log kernels document up to 2 ulp (4 u).
EXP_ROUNDINGS = 4
# tanh and erf kernels are rational approximations of up to 4 ulp.
ERF_ROUNDINGS = 8
# So are those of the power within a sigmoid; an addition and a division follow. (Eigen's sigmoid errs by up to 8.3 u.)
LOGISTIC_ROUNDINGS = ERF_ROUNDINGS


def gamma(k: int, p: Precision) -> float:
    """gamma_k = k*u / (1 - k*u); infinite once k*u reaches 1 (nothing is promised for such long sums)."""
    return _gamma(k, p.u)


def _gamma(k: int, u: float) -> float:
    ku = k * u
    return ku / (1.0 - ku) if ku < 1.0 else float("inf")


def summation(k: int, p: Precision, stored: int = 1) -> float:
    """The relative error of a sum with k roundings, of which ``stored`` are of tensors that a composed evaluation keeps
    in the format itself (terms, a sum, what is made of it); the others are the accumulation's.

    Accumulation in a 16-bit format is a looser model. Once its bar reaches half the sum, it explains nothing any more.
    A running sum that has stalled is outside of it long before: it errs to one side at every step.
    """
    if k == 0:
        return 0.0
    if p.narrow:
        return (1.0 + _gamma(k, p.acc)) * (1.0 + gamma(stored, p)) - 1.0
    if p.acc == PRECISIONS[p.name].acc:
        return gamma(k, p)
    if independent(k, p) >= 0.5:
        return summation(k, PRECISIONS[p.name], stored)
    return max(independent(k, p), summation(k, PRECISIONS[p.name], stored))


def independent(k: int, p: Precision) -> float:
    """What k roundings amount to in a looser model, which is not for the worst case but for real runs.

    Roundings are as good as independent (Higham and Mary, *A New Approach to Probabilistic Rounding Error Analysis*,
    2019): each is at most u/sqrt(3) in the mean square, and four standard deviations of their sum are allowed for.
    """
    return min(gamma(k, p), 4.0 * math.sqrt(k / 3.0) * p.u)


def composed(k: int, p: Precision) -> float:
    """The roundings of k further intermediate tensors, which count in the 16-bit formats only: in the others the sums
    that they are made from have room for them."""
    return gamma(k, p) if p.u > _U32 else 0.0


def kernel(ulps: float, p: Precision) -> float:
    """Roundings of a library function that is ``ulps`` u off in float32: a 16-bit one rounds the float32 result."""
    return ulps if p.u <= _U32 else 1.0 + ulps * _U32 / p.u


@dataclass(frozen=True)
class Bounded:
    """A float64 value and the error bound of a run in precision ``p``: |run - val| <= err, elementwise.

    ``err`` is non-negative, may be infinite (overflow is legitimate there), and has the shape of ``val``.
    ``cancelled`` is the sum of magnitudes that went into ``val``, where it is a sum: what an error bar has to be small
    against for a check to prove something, even where the terms cancel to exactly 0.
    """

    val: Array
    err: Array
    p: Precision
    cancelled: Array | None = None
    memo: dict[Hashable, Moments] = field(default_factory=dict, compare=False, repr=False)
    """Statistics already taken of this array: a norm's forward and backward read the same ones."""

    @cached_property
    def mag(self) -> Array:
        """Largest magnitude the run may hold."""
        return np.abs(self.val) + self.err

    @property
    def reach(self) -> Array:
        """Magnitude that the bound is to be compared with: of the terms of a sum, else of the value."""
        return np.abs(self.val) if self.cancelled is None else self.cancelled

    @cached_property
    def exact(self) -> bool:
        """True when the run holds exactly ``val`` everywhere."""
        return not self.err.any()

    def __add__(self, other: Bounded) -> Bounded:
        return add(self, other)

    def __sub__(self, other: Bounded) -> Bounded:
        return add(self, neg(other))

    def __mul__(self, other: Bounded) -> Bounded:
        return mul(self, other)

    def widen(self, extra: Array) -> Bounded:
        """The same value with a larger bound (an alternative evaluation the library may use)."""
        return settle(self.val, self.err + extra, self.p, self.cancelled)

    def moved(self, move: Callable[[Array], Array]) -> Bounded:
        """The same numbers in other places (a reshape, a transpose, a slice): exact."""
        cancelled = None if self.cancelled is None else move(self.cancelled)
        return Bounded(move(self.val), move(self.err), self.p, cancelled)

    def reshape(self, *shape: int) -> Bounded:
        """Reshape, exact."""
        return self.moved(lambda v: v.reshape(shape))


def recorded(val: Array, p: Precision, carried: Array | None = None) -> Bounded:
    """A tensor that the run really held: exact, except that kernels may read subnormal numbers as zero.

    An element that is NaN or infinite binds nothing downstream (its own link answers for it): its bound is infinite.

    Args:
        val: float64 array, any shape.
        p: precision of the run.
        carried: extra error of same shape, for compilers that recompute a producer instead of reading it back.
    """
    finite = np.isfinite(val)
    val = np.where(finite, val, 0.0)
    mag = np.abs(val)
    err = np.where(finite, np.where(mag < p.tiny, np.minimum(mag, p.lost), 0.0), np.inf)
    return Bounded(val, err if carried is None else err + carried, p)


U_BF16 = 2.0**-8
"""Unit roundoff of bfloat16: 8 significand bits."""


def to_bfloat16(a: Bounded) -> Bounded:
    """``a`` rounded to bfloat16 (nearest, ties to even). Exact where ``a`` is; rounding is monotone, so the ends of
    an uncertain operand's interval bound what it may round to."""
    val = _bfloat16(a.val)
    if a.exact:
        return Bounded(val, np.where(np.isfinite(val), 0.0, np.inf), a.p)
    return settle(val, np.maximum(_bfloat16(a.val + a.err) - val, val - _bfloat16(a.val - a.err)), a.p)


def is_bfloat16(a: Bounded) -> bool:
    """Whether a result in more precision than that holds bfloat16 numbers only."""
    return a.p.u < U_BF16 and bool((_bfloat16(a.val) == a.val).all())


_TF32_BITS = 11


def cut_to_tf32(a: Bounded) -> Bounded:
    """``a`` as TF32, rounded to nearest or cut off: what cutting takes is the most that either moves it by."""
    power = np.exp2(_TF32_BITS - np.frexp(a.val)[1].astype(np.float64))
    lost = np.abs(a.val) - np.floor(np.abs(a.val) * power) / power
    return a.widen(lost if a.exact else np.where(a.err > 0, 2.0 ** (1 - _TF32_BITS) * a.mag, lost))


def _bfloat16(v: Array) -> Array:
    with quiet():
        return v.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def settle(val: Array, err: Array, p: Precision, cancelled: Array | None = None) -> Bounded:
    """Close an operation: where the run may have overflowed, or nothing can be said, the bound is infinite."""
    lost = ~(np.abs(val) + err <= p.largest)
    return Bounded(val, np.where(lost, np.inf, err), p, cancelled)


def rounded(val: Array, err: Array, p: Precision, roundings: float = 1.0, cancelled: Array | None = None) -> Bounded:
    """The result of one elementwise operation: ``err`` from its operands, plus its rounding and possible flush."""
    mag = np.abs(val) + err
    lost = p.lost * max(1.0, roundings) if p.gradual else p.lost  # what is flushed, is flushed once
    flush = np.where(np.abs(val) - err < p.tiny, np.minimum(mag, lost), 0.0)
    return settle(val, err + roundings * p.u / (1.0 - p.u) * mag + flush, p, cancelled)


def lift(val: Array, err: Array, p: Precision) -> Bounded:
    """A value with a given bound and no rounding of its own (selections, reshapes)."""
    return settle(np.asarray(val), np.asarray(err), p)


def add(*terms: Bounded) -> Bounded:
    """Sum of a few terms in any order: k - 1 roundings of the sum of magnitudes (one of the result, for two terms)."""
    p = terms[0].p
    val = sum((t.val for t in terms[1:]), terms[0].val)
    err = sum((t.err for t in terms[1:]), terms[0].err)
    mag = sum((t.mag for t in terms[1:]), terms[0].mag)
    if len(terms) == 2:
        return rounded(val, err, p, cancelled=mag)
    k = len(terms)
    return _settle_sum(val, err + gamma(k - 1, p) * mag + np.minimum(mag, k * p.lost), p, mag)


def biased(product: Bounded, bias: Bounded, k: int) -> Bounded:
    """A sum of k products plus a bias, which may be the first term or the last: it takes part in every rounding."""
    return add(product, bias).widen(summation(k, bias.p, 0) * bias.mag)


def _settle_sum(val: Array, err: Array, p: Precision, mag: Array) -> Bounded:
    """Close a sum: its partial sums may overflow where the sum of magnitudes does, although the total does not."""
    return settle(val, np.where(mag + err <= p.largest, err, np.inf), p, mag)


def neg(a: Bounded) -> Bounded:
    """-a, exact."""
    return Bounded(-a.val, a.err, a.p, a.cancelled)


def mul(a: Bounded, b: Bounded, roundings: float = 1.0) -> Bounded:
    """Elementwise (broadcasting) product."""
    val = a.val * b.val
    err = np.abs(a.val) * b.err + a.err * b.mag
    cancelled = None if a.cancelled is None and b.cancelled is None else a.reach * b.reach
    return rounded(val, err, a.p, roundings, cancelled)


def scale(a: Bounded, c: float, roundings: float = 1.0) -> Bounded:
    """Product with a real constant, such as 1/n: division or multiplication by its rounded reciprocal."""
    cancelled = None if a.cancelled is None else a.cancelled * abs(c)
    return rounded(a.val * c, a.err * abs(c), a.p, roundings, cancelled)


def plus_one(a: Bounded) -> Bounded:
    """1 + a."""
    return rounded(1.0 + a.val, a.err, a.p)


def one_minus(a: Bounded) -> Bounded:
    """1 - a."""
    return plus_one(neg(a))


def reciprocal(a: Bounded) -> Bounded:
    """1/a; unbounded where a may be 0."""
    low = np.abs(a.val) - a.err
    err = np.where(low > 0, a.err / (np.abs(a.val) * low), np.inf)
    return rounded(1.0 / a.val, np.where(a.err > 0, err, 0.0), a.p)


def exp(a: Bounded, approximation: float = 0.0) -> Bounded:
    """e**a, as library kernels document it; some build 2**k from its exponent bits and lose the lowest binade.

    ``approximation`` is the relative error of a cheaper kernel.
    """
    val = np.exp(a.val)
    err = val * np.expm1(a.err)
    lowest = np.where(val - err < 2.0 * a.p.tiny, np.minimum(val, 2.0 * a.p.lost), 0.0)
    return rounded(val, err + lowest + approximation * val, a.p, kernel(EXP_ROUNDINGS, a.p))


def log(a: Bounded) -> Bounded:
    """Natural logarithm of a positive number; near 1 the result is tiny, so the ulps are of 1."""
    val = np.log(a.val)
    low = np.maximum(a.val - a.err, 0.0)
    return rounded(val, np.log(a.val / low), a.p, kernel(EXP_ROUNDINGS, a.p))


def sigmoid(a: Bounded, relative: float = 0.0, absolute: float = 0.0) -> Bounded:
    """1/(1 + e**-a). Its second derivative is below 0.1, which bounds what the first-order term leaves out.

    ``relative`` and ``absolute`` are the errors of cheaper kernels.
    """
    power = np.exp(-np.abs(a.val))
    val = np.where(a.val >= 0, 1.0, power) / (1.0 + power)
    slope = val * (1.0 - val)
    err = a.err * slope + 0.05 * a.err**2 + relative * val + absolute
    # Where e**-a overflows long before its reciprocal is subnormal, as in float16, 1/(1 + inf) is 0.
    err = err + np.where(a.p.gradual & (a.val - a.err < -np.log(a.p.largest)), val, 0.0)
    return rounded(val, err, a.p, kernel(LOGISTIC_ROUNDINGS, a.p) + 2.0)


def total(a: Bounded, axes: Axes) -> Bounded:
    """Sum over ``axes`` in any order (dimensions kept). Exact when every partial sum is exactly representable."""
    k = int(np.prod([a.val.shape[i] for i in axes]))
    adds = max(k - 1, 0)
    val = a.val.sum(axes, keepdims=True)
    mag = a.mag.sum(axes, keepdims=True)
    err = a.err.sum(axes, keepdims=True) + summation(adds, a.p, 0) * mag + _flushes(mag, adds, a.p)
    err = _stored(val, err, a.p)
    grid = grid_exponent(a)
    return _settle_sum(val, err if grid is None else _exact_where(mag, grid, err, a.p), a.p, mag)


def bilinear(op: Callable[[Array, Array], Array], a: Bounded, b: Bounded, k: int, stored: int = 1) -> Bounded:
    """A sum of at most ``k`` products per output element (convolution, matrix product), in any order.

    Args:
        op: the bilinear map on float64 arrays; it must be monotone on non-negative operands.
        a, b: its operands.
        k: the most products that enter one output element.
        stored: 2 where a composed evaluation keeps the products before it sums them, else 1.
    """
    p = a.p
    val = op(a.val, b.val)
    mag = op(a.mag, b.mag)
    err = np.zeros_like(val)
    if not a.exact:
        err = err + op(a.err, b.mag)
    if not b.exact:
        err = err + op(np.abs(a.val), b.err)
    err = _stored(val, err + summation(k, p, stored - 1) * mag + _flushes(mag, 2 * k, p, stored), p)
    ga, gb = grid_exponent(a), grid_exponent(b)
    if ga is not None and gb is not None:
        err = _exact_where(mag, ga + gb, err, p)
    # An infinite bound times a 0, as of padding, is NaN here and an infinite bound below: so it is in a kernel.
    return _settle_sum(val, err, p, mag)


def _stored(val: Array, err: Array, p: Precision) -> Array:
    """The error of a sum once it is rounded to a format narrower than that of its accumulation."""
    return err + p.u / (1.0 - p.u) * (np.abs(val) + err) if p.narrow else err


def _flushes(mag: Array, k: int, p: Precision, stored: int = 1) -> Array:
    """Loss when each of k intermediate results below ``tiny`` is flushed: never more than what is there.

    A sum in float32 loses nothing at the size where float16 does, only what is ``stored``: all terms, or the result.
    """
    k = min(k, 1) if p.narrow and p.tiny > _TINY32 and stored == 1 else k
    return np.minimum(mag, k * p.lost)


# Finest grid looked for: multiples of 2**-12. Coarser than any accidental grid of ordinary float data.
_GRID = 12


def grid_exponent(a: Bounded) -> int | None:
    """Smallest g in 0..12 for which every (exact) element is a multiple of 2**-g, else None.

    Sums of products of such numbers are integers in units of 2**-g, hence exact in any order while they fit the
    significand; that is why small dyadic cases are held to a bar of zero.
    """
    scaled = a.val * 2.0**_GRID
    few = scaled.reshape(-1)[:4]  # Ordinary data is off the grid at once.
    if not a.exact or (few != np.rint(few)).any() or (scaled != np.rint(scaled)).any():
        return None
    g = _GRID
    while g > 0:
        scaled = scaled / 2.0
        if not (scaled == np.rint(scaled)).all():
            break
        g -= 1
    return g


def _exact_where(mag: Array, grid: int, err: Array, p: Precision) -> Array:
    """Zero error where a sum of grid numbers cannot leave the exactly representable integers."""
    return np.where(mag * 2.0**grid <= 2.0**p.digits, 0.0, err)


@dataclass(frozen=True)
class Moments:
    """Mean, biased variance and normalised values of ``x`` over ``axes``, bounded for any two-pass algorithm."""

    mean: Bounded
    inv_std: Bounded
    centred: Bounded
    normalised: Bounded
    n: int


# Arrays from which statistics are dearer to keep than to take again.
_LARGE = 2**16


def moments(x: Bounded, axes: Axes, eps: float, one_pass: bool = False) -> Moments:
    """Two-pass statistics: mean, then the mean square of the centred values, then (v + eps)**-1/2.

    An error d in the mean moves the variance only by d**2, because the centred values sum to zero; and an error e in
    an element moves it by 2|x - mean|e/n. A one-pass E[x^2] - E[x]^2 is *not* covered unless ``one_pass`` asks for
    that looser algorithm: it adds the rounding of two uncentred mean squares, and may turn v + eps negative.
    """
    key = (axes, eps, one_pass)
    if x.val.size > _LARGE:
        return _moments(x, axes, eps, one_pass)
    if key not in x.memo:
        x.memo[key] = _moments(x, axes, eps, one_pass)
    return x.memo[key]


def _mean(x: Bounded, axes: Axes, n: int) -> Bounded:
    """The mean in any order, a running mean included: that divides at every step, so no sum is exact."""
    val = x.val.sum(axes, keepdims=True) / n
    if n == 1:
        return Bounded(val, x.err.sum(axes, keepdims=True), x.p)
    mag = x.mag.sum(axes, keepdims=True)
    err = x.err.sum(axes, keepdims=True) / n + summation(n + 2, x.p, 4) * mag / n + _flushes(mag / n, 2 * n, x.p)
    return settle(val, np.where(mag <= x.p.largest, err, np.inf), x.p)


def _moments(x: Bounded, axes: Axes, eps: float, one_pass: bool) -> Moments:
    p = x.p
    n = int(np.prod([x.val.shape[i] for i in axes]))
    mean = _mean(x, axes, n)
    # Error of the computed mean against the exact mean of the values the run really held.
    slip = mean.err - x.err.sum(axes, keepdims=True) / n
    slip = np.where(np.isfinite(slip), np.maximum(slip, 0.0), np.inf)
    c = x.val - mean.val
    reach = np.abs(c) + x.err + x.err.sum(axes, keepdims=True) / n
    centred = rounded(c, x.err + mean.err, p)
    v = (c * c).sum(axes, keepdims=True) / n
    v_in = ((2.0 * np.abs(c) + x.err) * x.err).sum(axes, keepdims=True) / n
    square = ((reach + slip) ** 2).sum(axes, keepdims=True) / n
    # Composed: the centred values and their squares, the sum, and its division (by a rounded reciprocal).
    v_err = v_in + slip**2 + summation(n + 4, p, 6) * square + np.minimum(square, 2 * p.lost)
    if one_pass:
        v_err = v_err + summation(n + 4, p, 6) * ((x.mag**2).sum(axes, keepdims=True) / n + mean.mag**2)
    # Fused kernels merge the means of parts by the square of their distance.
    widest = x.val.max(axes, keepdims=True) - x.val.min(axes, keepdims=True)
    fits = (square * n <= p.largest) & (widest**2 <= p.largest_in_kernels)
    variance = Bounded(v, np.where(fits, v_err, np.inf), p)
    # eps itself is rounded to the precision.
    root = rounded(variance.val + eps, variance.err + (eps * p.u if eps >= p.tiny else p.lost), p)
    # A sum of squares is never negative, so v + eps stays at least eps (rounded once).
    least = eps * (1.0 - 2.0 * p.u) if eps >= p.tiny else max(eps - p.lost, 0.0)
    low = np.maximum(root.val - root.err, 0.0 if one_pass else least)
    inv = 1.0 / np.sqrt(root.val)
    off = np.maximum(1.0 / np.sqrt(low) - inv, inv - 1.0 / np.sqrt(root.val + root.err))
    inv_std = rounded(inv, off, p, roundings=RSQRT_ROUNDINGS)
    # An overflowed variance gives rsqrt(inf) = 0 in the run: finite, and wrong by all of it.
    inv_std = Bounded(inv_std.val, np.where(np.isfinite(variance.err), inv_std.err, np.inf), p)
    return Moments(mean, inv_std, centred, mul(centred, inv_std), n)
