"""Block specs: sizes from 1 upwards with the corners weighted, every k dispatch, drop masks."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from diffgrad.specs import Drop, Spec, UibSpec

# The first entries are what shrinking ends at. Vectorised kernels change path around multiples of 8 and 16.
CHANNELS = st.one_of(st.integers(1, 6), st.sampled_from((8, 15, 16, 17, 32)))
SIDES = st.one_of(st.integers(1, 8), st.sampled_from((9, 14, 16)))
BATCHES = st.integers(1, 4)
DEPTHWISE_K = st.sampled_from((0, 3, 5, 7))
KEEPS = st.sampled_from((0.5, 0.8, 0.9, 1.0))


# Elements in a case's widest map: small cases run and shrink faster and show as much.
WIDEST = 4096


@st.composite
def drops(draw: st.DrawFn, n: int) -> Drop | None:
    """No site, or a mask with one flag per example."""
    if not draw(st.booleans()):
        return None
    return Drop(draw(KEEPS), tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n))))


@st.composite
def uib(draw: st.DrawFn) -> UibSpec:
    """Stride-1 UIB in all four families."""
    n, h, w, expand = draw(BATCHES), draw(SIDES), draw(SIDES), draw(st.integers(1, 4))
    return UibSpec(
        n=n,
        c=min(draw(CHANNELS), max(1, WIDEST // (n * h * w * expand))),
        h=h,
        w=w,
        expand=expand,
        pre_k=draw(DEPTHWISE_K),
        post_k=draw(DEPTHWISE_K),
        drop=draw(drops(n)),
    )


SPECS: dict[str, Callable[[], st.SearchStrategy[Spec]]] = {
    "uib": uib,
}
"""Block name -> strategy for its spec."""
