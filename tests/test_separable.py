"""Batch separability, in every framework: it holds for ConvNeXt and fails for a batch norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diffgrad.adapters.registry import ADAPTERS
from diffgrad.case import Case
from diffgrad.separable import coupled, single_examples
from diffgrad.specs import ConvNeXtSpec, Drop, UibSpec
from diffgrad.strategies import cases, sample
from diffgrad.values import Values
from diffgrad.worker import Runner

SEPARABLE = ("convnext", "convnext_stem", "convnext_down", "convnext_head")


def plural(case: Case) -> bool:
    """More than one example, of values whose end-to-end bars are narrow."""
    return case.block.n > 1 and case.values.family in ("normal", "dyadic", "one_hot")


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("block", SEPARABLE)
def test_a_batch_is_its_examples(name: str, block: str, workers: Callable[[str], Runner]) -> None:
    for case in sample(cases([block], ["float64"]).filter(plural), 6, key=3):
        assert coupled(case, workers(name), name) == []


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_batch_norm_couples_its_examples(name: str, workers: Callable[[str], Runner]) -> None:
    case = Case(block=UibSpec(n=3, h=4, w=3, c=2), dtype="float64", values=Values(seed=1))
    different = coupled(case, workers(name), name)
    assert "input cotangent of example 0" in different
    assert "gradient eW" in different


def test_each_example_keeps_its_own_drop_flag() -> None:
    spec = ConvNeXtSpec(n=2, h=2, w=2, c=1, drop=Drop(0.5, (True, False)))
    case = Case(block=spec, dtype="float64")
    first, second = single_examples(case)
    assert isinstance(first.block, ConvNeXtSpec)
    assert isinstance(second.block, ConvNeXtSpec)
    assert (first.block.drop, second.block.drop) == (Drop(0.5, (True,)), Drop(0.5, (False,)))
    assert (first.tensors()["x"] == case.tensors()["x"][:1]).all()
    assert (second.tensors()["dy"] == case.tensors()["dy"][1:]).all()
    assert (first.tensors()["prW"] == case.tensors()["prW"]).all()
