"""Sizes that several blocks draw: from 1 upwards with the corners weighted."""

from __future__ import annotations

from hypothesis import strategies as st

from diffgrad.specs import Drop
from diffgrad.specs.vit import TokenNorm

# The first entries are what shrinking ends at. Vectorised kernels change path around multiples of 8 and 16.
CHANNELS = st.one_of(st.integers(1, 6), st.sampled_from((8, 15, 16, 17, 32)))
SIDES = st.one_of(st.integers(1, 8), st.sampled_from((9, 14, 16)))
BATCHES = st.integers(1, 4)
TOKENS = st.one_of(st.integers(1, 6), st.sampled_from((8, 15, 16, 17, 33)))
HEAD_DIMS = st.one_of(st.integers(1, 5), st.sampled_from((8, 16)))
TOKEN_NORMS: st.SearchStrategy[TokenNorm] = st.sampled_from(("vector", "scalar"))
KEEPS = st.sampled_from((0.5, 0.8, 0.9, 1.0))
SELDOM = st.sampled_from((False, False, True))
RARELY = st.sampled_from((False,) * 7 + (True,))

# Elements in a case's widest map: small cases run and shrink faster and show as much.
WIDEST = 4096


@st.composite
def masks(draw: st.DrawFn, n: int) -> Drop:
    """A drop site."""
    return Drop(draw(KEEPS), tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n))))


@st.composite
def drops(draw: st.DrawFn, n: int) -> Drop | None:
    """No site, or a mask with one flag per example."""
    return draw(masks(n)) if draw(st.booleans()) else None


def channels(draw: st.DrawFn, elements: int) -> int:
    """A number of channels that keeps the widest map small; ``elements`` is what one channel holds."""
    return fitting(draw, CHANNELS, WIDEST, elements)


def fitting(draw: st.DrawFn, sizes: st.SearchStrategy[int], most: int, elements: int) -> int:
    """A size of which ``elements`` times as many elements are no more than ``most``."""
    return min(draw(sizes), max(1, most // elements))
