"""Convolution algorithms that lose more than a sum of products does, as named looser models: bars that are normwise.

Both are for stride 1. Each is the error that it adds to the three maps of a convolution: forward, input, weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from scipy.ndimage import maximum_filter

from diffgrad.bars import Array, Precision, independent


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

    def around(self, margin: int) -> Axis:
        """The same windows on an axis that is longer by a margin on either side."""
        return self._replace(size=self.size + 2 * margin, lo=self.lo - margin)


Map = Callable[[Axis, Axis, Array, Array], Array]
"""A bilinear map of a convolution, monotone on magnitudes, for the two axes of its first operand."""


class Algorithm(Protocol):
    """How a convolution is evaluated."""

    def error(self, h: Axis, w: Axis, op: Map, a: Array, b: Array, k: int, p: Precision) -> Array:
        """What the algorithm adds to the error of ``op`` on operands of magnitudes ``a`` (a map) and ``b``."""
        ...


@dataclass(frozen=True)
class Direct:
    """A sum of products: nothing to add."""

    def error(self, h: Axis, w: Axis, op: Map, a: Array, b: Array, k: int, p: Precision) -> Array:
        return np.zeros(())


@dataclass(frozen=True)
class Winograd:
    """Winograd's F(m x m, 3 x 3): y = A'[(G g G') * (B' d B)]A on tiles d of m + 2 by m + 2.

    In first order the error is u times A'[(|G||g||G'|) * (|B'||d||B|)]A with all signs dropped, for every rounding.
    Row i of |B'| takes at most its sum b_i times the largest |d| of the tile, along either axis; what is left is
    sum(|g|) times at most the square of the largest entry of |A'| diag(b) |G|. The tile's origin is not known, so the
    largest |d| is that within m + 1 of what a tap reads. The other two maps are the adjoints, with the same factors.
    """

    m: int

    def error(self, h: Axis, w: Axis, op: Map, a: Array, b: Array, k: int, p: Precision) -> Array:
        margin = self.m + 1
        room = ((0, 0), (0, 0), (margin, margin), (margin, margin))
        near = maximum_filter(np.pad(a, room), (1, 1, 2 * margin + 1, 2 * margin + 1), mode="constant")
        # Three transforms, each of two products with a matrix of at most m + 2 terms a row.
        amplified = independent(k + 6 * (self.m + 2), p) * self.amplification
        return np.asarray(amplified * op(h.around(margin), w.around(margin), near, b))

    @property
    def amplification(self) -> float:
        out, kernel, data = (np.abs(np.array(rows)) for rows in _TRANSFORMS[self.m])
        return float(((out * data.sum(1)) @ kernel).max() ** 2)


_TRANSFORMS: dict[int, tuple[list[list[float]], ...]] = {
    2: (
        [[1, 1, 1, 0], [0, 1, -1, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    ),
    4: (
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
    ),
}
"""m -> A', G and B', for the interpolation points 0, 1, -1 (and 2, -2) and infinity."""


@dataclass(frozen=True)
class Fourier:
    """By the transforms of whole planes.

    A transform of size s has a relative error of log2(s)*(u + gamma_4*(sqrt(2) + u)) in the 2-norm (Higham, theorem
    24.2), so of 7*log2(s) roundings. Three of them, and the complex products' sum, make an error of every element of
    at most the product of its operands' 2-norms.
    """

    def error(self, h: Axis, w: Axis, op: Map, a: Array, b: Array, k: int, p: Precision) -> Array:
        # A plane is padded for the windows, and then to a size that transforms well: at most twice as long.
        steps = math.ceil(math.log2(4 * max(h.size, h.reach) * max(w.size, w.reach)))
        point = Axis(1, 1, 1, 1, 0)
        return np.asarray(independent(21 * steps + 3 + k, p) * op(point, point, _norm(a), _norm(b)))


def _norm(v: Array) -> Array:
    return np.asarray(np.sqrt((v * v).sum((2, 3), keepdims=True)))


DIRECT = Direct()


def fast(k: tuple[int, ...], stride: int) -> dict[str, Algorithm]:
    """The fast algorithms for a kernel of extent ``k``, by name, the least loose first.

    Real runs of the large tile hardly ever need its bar: that of the small one explains them.
    """
    if stride != 1 or max(k) == 1:
        return {}
    tiles: dict[str, Algorithm] = {"winograd": Winograd(2), "winograd4x4": Winograd(4)}
    return {**(tiles if k == (3, 3) else {}), "fft": Fourier()}
