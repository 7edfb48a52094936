"""What is drawn: valid cases only, every corner within a modest number of draws, the same ones for the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, find, given, settings

from diffgrad.case import Case
from diffgrad.specs import Spec, UibSpec
from diffgrad.strategies import Batch, batches, cases, sample
from diffgrad.strategies.blocks import SPECS
from diffgrad.strategies.cases import DTYPES, quiet_settings, values
from diffgrad.values import FAMILIES
from tests.helpers import KINDS, specs

MANY = 300
# As a campaign shrinks. (The explaining phase would go on drawing, and stop at the shortest of what it happens to see.)
SHRINKING = settings(quiet_settings(100), phases=[Phase.generate, Phase.shrink])


@given(batches())
def test_every_case_of_a_batch_is_valid_and_shares_its_block_and_dtype(batch: Batch) -> None:
    assert len(batch.cases()) == len(batch.draws) >= 1
    for case in batch.cases():
        assert (case.check().block, case.dtype) == (batch.block, batch.dtype)


@given(cases())
def test_every_case_can_be_drawn_as_tensors(case: Case) -> None:
    assert set(case.tensors()) == {t.name for t in case.block.tensors()}


CORNERS: dict[str, Callable[[Spec], bool]] = {
    "one example": lambda s: s.n == 1,
    "several examples": lambda s: s.n > 1,
    "square": lambda s: s.h == s.w,
    "not square": lambda s: s.h != s.w,
    "odd": lambda s: s.h % 2 == 1,
    "even": lambda s: s.h % 2 == 0,
}

UIB_CORNERS: dict[str, Callable[[UibSpec], bool]] = {
    "ExtraDW": lambda s: s.pre_k > 0 < s.post_k,
    "IB": lambda s: s.pre_k == 0 < s.post_k,
    "ConvNeXt-like": lambda s: s.pre_k > 0 == s.post_k,
    "FFN": lambda s: s.pre_k == 0 == s.post_k,
    "kernel larger than the map": lambda s: max(s.pre_k, s.post_k) > max(s.h, s.w),
    "no drop site": lambda s: s.drop is None,
    "an example dropped": lambda s: s.drop is not None and not all(s.drop.kept),
    "keep = 1": lambda s: s.drop is not None and s.drop.keep == 1,
    "one channel": lambda s: s.c == 1,
    "a vector's width and more": lambda s: s.mid > 16,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("corner", CORNERS)
def test_every_block_is_drawn_in_every_corner(kind: str, corner: str) -> None:
    assert any(map(CORNERS[corner], specs(kind, MANY)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_map_of_every_block_is_drawn(kind: str) -> None:
    drawn = {(s.h, s.w) for s in specs(kind, MANY)}
    assert (min(h for h, _ in drawn), min(w for _, w in drawn)) in drawn


@pytest.mark.parametrize("corner", UIB_CORNERS)
def test_every_corner_of_the_uib_is_drawn(corner: str) -> None:
    assert any(UIB_CORNERS[corner](s) for s in specs("uib", MANY) if isinstance(s, UibSpec))


def test_every_block_family_and_dtype_is_drawn() -> None:
    drawn = sample(cases(), MANY, key=1)
    assert {c.block.kind for c in drawn} == set(KINDS)
    assert {c.values.family for c in drawn} == set(FAMILIES)
    assert {c.dtype for c in drawn} == set(DTYPES)


def test_both_ends_of_an_exponent_range_are_drawn() -> None:
    drawn = [v.exponent for v in sample(values(), 2 * MANY, key=1) if v.family == "tiny"]
    assert min(drawn) < 20 < 60 < max(drawn)


def test_only_what_was_asked_for_is_drawn() -> None:
    for batch in sample(batches(["uib"], ["float64"], most=2), 20, key=1):
        assert (batch.block.kind, batch.dtype) == ("uib", "float64")
        assert len(batch.draws) <= 2


def test_a_key_gives_the_same_draws_again_and_another_key_others() -> None:
    assert sample(cases(), 20, key=5) == sample(cases(), 20, key=5) != sample(cases(), 20, key=6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_shrinks_to_the_smallest_sizes(kind: str) -> None:
    least = find(SPECS[kind](), lambda s: True, settings=SHRINKING)
    drawn = specs(kind, MANY)
    assert (least.h, least.w) == (min(s.h for s in drawn), min(s.w for s in drawn))
    assert least.n <= 2  # where statistics are taken over the batch alone, one example is the corner
    if isinstance(least, UibSpec):
        assert least == UibSpec(n=1, h=1, w=1, c=1)


def test_a_case_shrinks_to_one_draw_of_normal_values_in_float32() -> None:
    least = find(batches(), lambda b: True, settings=SHRINKING)
    assert least.dtype == "float32"
    (only,) = least.draws
    assert (only.family, only.seed, only.exponent) == ("normal", 0, 0)
