"""Specs: the tensors that a row implies, and that the tables agree about which blocks there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from diffgrad.chains import CHAINS
from diffgrad.mutants import MUTANTS
from diffgrad.specs import BLOCKS, CaseError, Drop, Spec, UibSpec
from diffgrad.strategies.blocks import SPECS
from tests.helpers import KINDS, specs


@pytest.mark.parametrize("table", [CHAINS, SPECS], ids=["CHAINS", "SPECS"])
def test_every_table_has_a_row_for_every_block(table: Mapping[str, Any]) -> None:
    assert set(table) == set(BLOCKS)


def test_every_block_has_a_planted_fault() -> None:
    assert {block for mutant in MUTANTS for block in mutant.blocks} == set(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_names_each_tensor_once_and_none_is_empty(kind: str) -> None:
    assert BLOCKS[kind].__struct_config__.tag == kind
    for spec in specs(kind):
        assert spec.kind == kind
        names = [t.name for t in spec.tensors()]
        assert len(names) == len(set(names))
        assert names[0] == spec.input().name
        assert names[-1] == "dy"
        assert all(size > 0 for t in spec.tensors() for size in t.shape)
        assert spec.kernels() <= {t.name for t in spec.parameters() if len(t.shape) == 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_frozen_and_hashable(kind: str) -> None:
    spec = specs(kind)[0]
    assert len({spec, type(spec)(**{f: getattr(spec, f) for f in spec.__struct_fields__})}) == 1
    with pytest.raises(AttributeError):
        spec.n = 3  # type: ignore[misc]


@pytest.mark.parametrize(("pre_k", "post_k", "nodes"), [(3, 5, 12), (0, 3, 9), (7, 0, 9), (0, 0, 6)])
def test_the_four_families_of_a_uib_have_the_documents_counts_of_nodes(pre_k: int, post_k: int, nodes: int) -> None:
    spec = UibSpec(n=1, h=2, w=2, c=3, expand=2, pre_k=pre_k, post_k=post_k)
    assert len(spec.parameters()) == nodes
    shapes = {t.name: t.shape for t in spec.parameters()}
    assert shapes.get("qW") == ((3, 1, pre_k, pre_k) if pre_k else None)
    assert shapes.get("dW") == ((6, 1, post_k, post_k) if post_k else None)
    assert (shapes["eW"], shapes["pW"]) == ((6, 3, 1, 1), (3, 6, 1, 1))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (UibSpec(n=1, h=1, w=0, c=1), "uib.w = 0: must be at least 1"),
        (UibSpec(n=1, h=1, w=1, c=1, pre_k=2), "uib.pre_k = 2: must be 0 (no depthwise) or odd"),
        (UibSpec(n=1, h=1, w=1, c=1, drop=Drop(0.0, (True,))), "uib.drop.keep = 0.0: must be above 0 and at most 1"),
        (UibSpec(n=2, h=1, w=1, c=1, drop=Drop(0.5, ())), "uib.drop.kept has 0 flags: must have one per example"),
    ],
    ids=str,
)
def test_impossible_sizes_are_named(spec: Spec, sentence: str) -> None:
    with pytest.raises(CaseError, match="^" + re.escape(sentence)):
        spec.check()


def test_a_drop_site_scales_by_the_reciprocal_of_keep() -> None:
    assert Drop(0.8, (True, False)).scales() == (1.25, 0.0)
