"""What masks do to softmax rows and to their bars."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import Bounded, lift
from diffgrad.specs.ops import Mask, shown

Seen = NDArray[np.bool_]

ALL: Seen = np.array([[True]])
"""Nothing is hidden."""


@lru_cache(maxsize=32)
def seen(mask: Mask) -> Seen:
    """[rows, places] of a mask, which broadcasts against all that have those as their last two axes."""
    return np.array(shown(mask)) if mask else ALL


def highest(z: NDArray[np.float64], keep: Seen) -> NDArray[np.float64]:
    """The largest number of every row that is seen; 0 where none is."""
    top = np.where(keep, z, -np.inf).max(-1, keepdims=True)
    return np.where(np.isneginf(top), 0.0, top)


def behind(z: Bounded, keep: Seen) -> Bounded:
    """What is hidden, put where it cannot matter: at the largest number of its row that is seen.

    Libraries hide by adding -inf, which makes NaN of an overflowed score, or by a large negative number in its place,
    below which a whole row may lie: such rows are without a bound.
    """
    if keep.all():
        return z
    top = highest(z.val, keep)
    lost = ~np.isfinite(z.err).all(-1, keepdims=True) | (top < -z.p.largest / 2.0)
    return lift(np.where(keep, z.val, top), np.where(lost, np.inf, np.where(keep, z.err, 0.0)), z.p)


def blank(v: Bounded, keep: Seen) -> Bounded:
    """0 where hidden, unless nothing can be said there."""
    if keep.all():
        return v
    kept = keep | ~np.isfinite(v.err)
    reach = np.where(kept, v.reach, 0.0)
    return Bounded(np.where(kept, v.val, 0.0), np.where(kept, v.err, 0.0), v.p, reach)
