"""Whole cases, singly and in batches that share a block: shapes are dear to compile, values are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, get_args

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from diffgrad.case import Case, Dtype
from diffgrad.specs import BLOCKS, Spec
from diffgrad.strategies.blocks import SPECS
from diffgrad.values import FAMILIES, Values

T = TypeVar("T")

DTYPES: tuple[str, ...] = get_args(Dtype)

RATES = st.sampled_from((0.0, 0.0, 0.0, 0.1, 2.0**-7))
"""Learning rates of the SGD step; most cases have none."""

_USUAL = {"offset": (0, 10), "tiny": (0, 40), "huge": (0, 30), "wide": (0, 6), "repeated": (0, 30)}
"""Exponents drawn most of the time; the family's full range now and then."""


class Batch(NamedTuple):
    """Several value draws of one block, dtype and learning rate (0: no step)."""

    block: Spec
    dtype: Dtype
    draws: tuple[Values, ...]
    lr: float = 0.0

    def cases(self) -> tuple[Case, ...]:
        """One case per draw."""
        return tuple(
            Case(block=self.block, dtype=self.dtype, lr=self.lr, values=v)  # type: ignore[arg-type]
            for v in self.draws
        )


@st.composite
def values(draw: st.DrawFn) -> Values:
    """A family, a seed, and an exponent within the family's range."""
    family = draw(st.sampled_from(tuple(FAMILIES)))
    low, high = FAMILIES[family][1]
    if family in _USUAL and draw(st.integers(0, 7)):
        low, high = _USUAL[family]
    return Values(family, draw(st.integers(0, 2**32 - 1)), draw(st.integers(low, high)))


@st.composite
def batches(
    draw: st.DrawFn, blocks: Sequence[str] = tuple(BLOCKS), dtypes: Sequence[str] = DTYPES, most: int = 16
) -> Batch:
    """A block spec, a dtype, and up to ``most`` value draws."""
    block = draw(SPECS[draw(st.sampled_from(tuple(blocks)))]())
    dtype = draw(st.sampled_from(tuple(dtypes)))
    if getattr(block, "bf16", False) and dtype != "float32":
        block = replace(block, bf16=False)  # the flag rounds float32 operands
    draws = tuple(draw(st.lists(values(), min_size=1, max_size=most)))
    return Batch(block, dtype, draws, draw(RATES))  # type: ignore[arg-type]


def cases(blocks: Sequence[str] = tuple(BLOCKS), dtypes: Sequence[str] = DTYPES) -> st.SearchStrategy[Case]:
    """Single cases."""
    return batches(blocks, dtypes, most=1).map(lambda b: b.cases()[0])


def sample(strategy: st.SearchStrategy[T], count: int, key: int) -> list[T]:
    """``count`` draws of a strategy, the same ones for the same key."""
    drawn: list[T] = []

    @seed(key)
    @settings(quiet_settings(count), phases=[Phase.generate])
    @given(strategy)
    def collect(value: T) -> None:
        drawn.append(value)

    collect()
    return drawn


def quiet_settings(examples: int) -> settings:
    """Settings for our own use of Hypothesis as an engine: no database, no deadline, nothing printed."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
