"""Batch separability, in every framework: it holds for ConvNeXt and fails for a batch norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from diffgrad.adapters.numpy import Floats, NumpyAdapter, Var
from diffgrad.adapters.registry import ADAPTERS
from diffgrad.case import Case
from diffgrad.mutants import MUTANTS
from diffgrad.separable import coupled, ordered, single_examples
from diffgrad.specs import AttentionSpec, ConvNeXtSpec, Drop, EncoderSpec, Sites, TowerSpec, UibSpec
from diffgrad.strategies import cases, sample
from diffgrad.values import Values
from diffgrad.worker import InProcess, Runner

SEPARABLE = (
    "convnext",
    "convnext_stem",
    "convnext_down",
    "convnext_head",
    "attention",
    "encoder",
    "tower",
    "patch_embed",
    "vit_head",
)


def plural(case: Case) -> bool:
    """More than one example, of values whose end-to-end bars are narrow, and nothing coarser than float64."""
    fused = getattr(case.block, "core", "composed") != "composed"
    return case.block.n > 1 and not fused and case.values.family in ("normal", "dyadic", "one_hot")


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("block", SEPARABLE)
def test_a_batch_is_its_examples(name: str, block: str, workers: Callable[[str], Runner]) -> None:
    for case in sample(cases([block], ["float64"]).filter(plural), 6, key=3):
        assert coupled(case, workers(name), name) == []


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("block", ["encoder", "tower"])
def test_the_order_of_the_examples_does_not_matter(name: str, block: str, workers: Callable[[str], Runner]) -> None:
    for case in sample(cases([block], ["float64"]).filter(plural), 6, key=4):
        assert ordered(case, workers(name), name) == []


def test_attention_among_the_examples_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(m.adapter for m in MUTANTS if m.name == "batch_as_tokens")
    monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: mutant())
    case = Case(block=AttentionSpec(n=3, t=3, heads=2, head_dim=2), dtype="float64", values=Values(seed=1))
    with InProcess(["numpy"]) as runner:
        assert "input cotangent of example 0" in coupled(case, runner, "numpy")


def test_order_matters_where_a_mask_is_read_for_another_example(monkeypatch: pytest.MonkeyPatch) -> None:
    class FirstMask(NumpyAdapter):
        def scale(self, x: Var, a: Floats) -> Var:
            return super().scale(x, np.full_like(a, a[0]))

    monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: FirstMask())
    drop = Drop(0.5, (True, False))
    spec = EncoderSpec(n=2, t=2, heads=1, head_dim=3, mlp=2, drop_a=drop)
    with InProcess(["numpy"]) as runner:
        assert ordered(Case(block=spec, dtype="float64"), runner, "numpy") == ["output", "input cotangent"]


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


def test_each_example_keeps_its_flags_in_every_block() -> None:
    sites = tuple(Sites(Drop(0.5, (True, False)), Drop(0.8, (False, k))) for k in (True, False))
    spec = TowerSpec(n=2, t=1, mlp=1, depth=2, drops=sites)
    _, second = single_examples(Case(block=spec))
    assert isinstance(second.block, TowerSpec)
    assert [(s.a.kept, s.m.kept) for s in second.block.drops] == [((False,), (True,)), ((False,), (False,))]
