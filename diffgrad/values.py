"""Tensors from a seed: a counter-based bit generator's raw integers, and transforms of our own.

NumPy keeps the raw streams of its bit generators stable but not its distributions, and libm's log and cos differ
between platforms. So values here use only integer operations and correctly rounded arithmetic: the same case gives
the same bits everywhere, for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.specs import CaseError, Role, Spec, Tensor

Floats = NDArray[np.float64]


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a case's tensors are drawn.

    ``family`` names a row of FAMILIES, ``seed`` picks the draw, and ``exponent`` is the family's magnitude as a power
    of two, for the families that have one (offset, tiny, huge, wide, repeated, integers, limits).
    """

    family: str = "normal"
    seed: int = 0
    exponent: int = 0


class Bits:
    """The raw stream of one tensor: keyed by the case's seed and the tensor's name, so tensors are independent."""

    def __init__(self, seed: int, name: str) -> None:
        key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
        words = np.array([int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")], dtype=np.uint64)
        self._raw = np.random.Philox(key=words)

    def raw(self, count: int) -> NDArray[np.uint64]:
        """``count`` 64-bit integers."""
        return np.asarray(self._raw.random_raw(count), dtype=np.uint64)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Floats:
        """Whole numbers in low..high, as float64."""
        span = np.uint64(high - low + 1)
        return ((self.raw(_size(shape)) % span).astype(np.float64) + low).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """Nearly normal, unit variance, |value| < 3.47: the scaled sum of four 16-bit uniforms."""
        raw = self.raw(_size(shape))
        mask = np.uint64(0xFFFF)
        parts = np.zeros(len(raw))
        for shift in (0, 16, 32, 48):
            parts += ((raw >> np.uint64(shift)) & mask).astype(np.float64)
        return ((parts - 131070.0) * (1.7320508075688772 / 65536.0)).reshape(shape)

    def chance(self, numerator: int, denominator: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """True with probability numerator/denominator."""
        return self.integers(0, denominator - 1, shape) < numerator


Draw = Callable[[Tensor, Bits, int], Floats]


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _per_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axis 1 of an activation kept, all else 1."""
    return (1, shape[1], *(1,) * (len(shape) - 2))


def _normal(t: Tensor, bits: Bits, exponent: int) -> Floats:
    v = bits.normal(t.shape)
    if t.role == "kernel":
        return v / math.sqrt(_size(t.shape[1:]))
    if t.role == "matrix":
        return v / math.sqrt(t.shape[0])
    if t.role == "gamma":
        return 1.0 + 0.5 * v
    return 0.5 * v if t.role == "beta" else v


def _dyadic(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Small multiples of 1/8: products and sums are exact in every precision that is checked."""
    reach, unit = {"kernel": (4, 0.25), "matrix": (4, 0.25), "gamma": (4, 0.5)}.get(t.role, (8, 0.125))
    return bits.integers(-reach, reach, t.shape) * unit


def _offset(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Inputs whose mean is far from zero, and shifts that push activations far from their kinks."""
    v = _normal(t, bits, exponent)
    if t.role == "input":
        return v + 2.0**exponent
    return 8.0 * v if t.role == "beta" else v


def _scaled(sign: int) -> Draw:
    def draw(t: Tensor, bits: Bits, exponent: int) -> Floats:
        v = _normal(t, bits, exponent)
        return v * 2.0 ** (sign * exponent) if t.role in ("input", "cotangent") else v

    return draw


def _wide(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Large weights and shifts: pre-activations and logits far out, where activations and softmax saturate."""
    v = _normal(t, bits, exponent)
    return v * 2.0**exponent if t.role in ("kernel", "matrix", "beta") else v


def _zeros(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Half of everything is exactly 0, so that pre-activations land on the kink or a hair to either side of it."""
    v = _normal(t, bits, exponent)
    if t.role == "beta":
        v = bits.integers(-1, 1, t.shape) * 2.0**-20
    return np.where(bits.chance(1, 2, t.shape), 0.0, v)


def _constant(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Channels without variance: constant inputs, and output channels whose kernel is 0."""
    v = _normal(t, bits, exponent)
    if t.role == "input" and len(t.shape) > 1:
        level = bits.normal(_per_channel(t.shape))
        return np.where(bits.chance(1, 2, _per_channel(t.shape)), level, v)
    if t.role == "beta":
        return np.where(bits.chance(1, 2, (1,)), v[:1], v)  # equal shifts: no variance across the channels either
    if t.role == "kernel":
        rows = (t.shape[0], *(1,) * (len(t.shape) - 1))
        return np.where(bits.chance(1, 4, rows), 0.0, v)
    return v


def _one_hot(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """A single upstream element, so that every gradient shows one path."""
    v = _normal(t, bits, exponent)
    if t.role != "cotangent" or not v.size:
        return v
    hot = int(bits.integers(0, v.size - 1, (1,))[0])
    return np.where(np.arange(v.size) == hot, 1.0 + np.abs(v.ravel()), 0.0).reshape(t.shape)


def _repeated(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Inputs that are the same along axis 1 but for a share of 2**-exponent: equal channels, equal tokens."""
    v = _normal(t, bits, exponent)
    return v[:, :1] + v * 2.0**-exponent if t.role == "input" else v


# Where activations have their kinks, and a hair to either side in each precision (or the kink itself in a coarser one).
_KINKS = (0.0, -0.0, 6.0)
_HAIRS = (0.0, 2.0**-126, 2.0**-21, 2.0**-8, 2.0**-5)


def _kinks(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Most of the input exactly at 0 and 6, or a hair beside them."""
    v = _normal(t, bits, exponent)
    if t.role != "input":
        return v
    kink = np.array(_KINKS)[_choice(len(_KINKS), bits, t.shape)]
    hair = np.array(_HAIRS)[_choice(len(_HAIRS), bits, t.shape)]
    side = bits.integers(-1, 1, t.shape)
    near = np.where(side * hair == 0.0, kink, kink + side * hair)  # -0.0 + 0.0 would lose the sign
    return np.where(bits.chance(3, 4, t.shape), near, v)


def _choice(count: int, bits: Bits, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return bits.integers(0, count - 1, shape).astype(np.int64)


def _integers(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Small whole numbers, and equal cotangents: sums whose right value is plain to see, and exact even in 16 bit."""
    if t.role == "cotangent":
        return np.full(t.shape, 2.0**exponent)
    reach = {"input": (-6, 6), "kernel": (-1, 1), "matrix": (-1, 1), "gamma": (1, 2)}.get(t.role, (-2, 2))
    return bits.integers(*reach, t.shape)


def _limits(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """A quarter of the input and of the cotangent at 1 to 1.75 times 2**exponent, which is to be near a limit of the
    dtype: what overflows when it is squared, cubed, exponentiated, or added to its like."""
    v = _normal(t, bits, exponent)
    if t.role not in ("input", "cotangent"):
        return v
    far = (1.0 + bits.integers(0, 3, t.shape) / 4.0) * np.where(v < 0, -1.0, 1.0) * 2.0**exponent
    return np.where(bits.chance(1, 4, t.shape), far, v)


def _blank(t: Tensor, bits: Bits, exponent: int) -> Floats:
    """Nothing but 0, for cases whose overrides spell out every number."""
    return np.zeros(t.shape)


LIMITS: dict[str, tuple[int, ...]] = {
    # Around log(max), cbrt(max), sqrt(max), max.
    "float32": (6, 42, 43, 44, 63, 64, 127),
    "float64": (9, 10, 127),
    "bfloat16": (6, 42, 43, 44, 63, 64, 127),
    "float16": (3, 5, 6, 7, 8, 15),
}
"""Exponents of the family limits that tell in each dtype."""


def _targets(spec: Spec, t: Tensor, bits: Bits) -> Floats:
    """Rows that sum to 1: (1 - alpha)*onehot + alpha/K with a random label each, or soft ones of any shares."""
    alpha, soft = spec.targets()
    batch, classes = t.shape
    if soft:
        shares = bits.integers(0, 15, t.shape) + np.eye(1, classes)
        return np.asarray(shares / shares.sum(1, keepdims=True))
    labels = bits.integers(0, classes - 1, (batch,))
    hot = labels[:, None] == np.arange(classes)
    return np.where(hot, 1.0 - alpha, 0.0) + alpha / classes


FAMILIES: dict[str, tuple[Draw, tuple[int, int]]] = {
    # name: (draw, range of the exponent)
    "normal": (_normal, (0, 0)),
    "dyadic": (_dyadic, (0, 0)),
    "offset": (_offset, (0, 14)),
    "tiny": (_scaled(-1), (0, 140)),
    "huge": (_scaled(+1), (0, 100)),
    "wide": (_wide, (0, 100)),
    "zeros": (_zeros, (0, 0)),
    "constant": (_constant, (0, 0)),
    "one_hot": (_one_hot, (0, 0)),
    "repeated": (_repeated, (0, 60)),
    "kinks": (_kinks, (0, 0)),
    "integers": (_integers, (-3, 3)),
    "limits": (_limits, (0, 127)),
    "blank": (_blank, (0, 0)),
}


def check_values(values: Values) -> None:
    """Raise CaseError for an unknown family, or an exponent outside the family's range."""
    if values.family not in FAMILIES:
        raise CaseError(f"values.family = {values.family!r}: must be one of {', '.join(FAMILIES)}")
    low, high = FAMILIES[values.family][1]
    if not low <= values.exponent <= high:
        raise CaseError(f"values.exponent = {values.exponent}: family {values.family} takes {low} to {high}")
    if not 0 <= values.seed < 2**64:
        raise CaseError(f"values.seed = {values.seed}: must be at least 0 and below 2**64")


def draw_tensor(spec: Spec, tensor: Tensor, values: Values) -> Floats:
    """One tensor of a case in float64, before rounding to the case's dtype."""
    if tensor.role == "drop":
        return np.array(spec.scales(tensor.name))
    if tensor.role == "target":
        return _targets(spec, tensor, Bits(values.seed, tensor.name))
    draw, _ = FAMILIES[values.family]
    return draw(tensor, Bits(values.seed, tensor.name), values.exponent)


__all__ = ["FAMILIES", "LIMITS", "Bits", "Role", "Values", "check_values", "draw_tensor"]
