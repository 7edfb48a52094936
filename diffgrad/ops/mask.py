"""Masks of softmax rows: "1" where a place is seen, "0" where it is hidden, a string a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import Bounded, lift

Seen = NDArray[np.bool_]

ALL: Seen = np.array([[True]])
"""Nothing is hidden."""


def seen(mask: tuple[str, ...]) -> Seen:
    """[rows, places] of a mask, which broadcasts against all that have those as their last two axes."""
    return np.array([[place == "1" for place in row] for row in mask]) if mask else ALL


def highest(z: NDArray[np.float64], shown: Seen) -> NDArray[np.float64]:
    """The largest number of every row that is seen; 0 where none is."""
    top = np.where(shown, z, -np.inf).max(-1, keepdims=True)
    return np.where(np.isneginf(top), 0.0, top)


def behind(z: Bounded, shown: Seen) -> Bounded:
    """What is hidden, put where it cannot matter: at the largest number of its row that is seen.

    Libraries hide by adding -inf, which makes NaN of an overflowed score, or by a large negative number in its place,
    below which a whole row may lie: such rows are without a bound.
    """
    if shown.all():
        return z
    top = highest(z.val, shown)
    lost = ~np.isfinite(z.err).all(-1, keepdims=True) | (top < -z.p.largest / 2.0)
    return lift(np.where(shown, z.val, top), np.where(lost, np.inf, np.where(shown, z.err, 0.0)), z.p)


def blank(v: Bounded, shown: Seen) -> Bounded:
    """0 where hidden, unless nothing can be said there."""
    if shown.all():
        return v
    kept = shown | ~np.isfinite(v.err)
    reach = np.where(kept, v.reach, 0.0)
    return Bounded(np.where(kept, v.val, 0.0), np.where(kept, v.err, 0.0), v.p, reach)
