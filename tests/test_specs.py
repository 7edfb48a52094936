"""Specs: the tensors that a row implies, and that the tables agree about which blocks there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from diffgrad.chains import CHAINS
from diffgrad.mutants import MUTANTS
from diffgrad.specs import (
    BLOCKS,
    AttentionSpec,
    CaseError,
    Drop,
    EncoderSpec,
    PatchEmbedSpec,
    Sites,
    Spec,
    TowerSpec,
    UibSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.base import MapSpec
from diffgrad.specs.ops import (
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    ConvOpSpec,
    DenseOpSpec,
    DropPathOpSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    OpPadding,
    PoolOpSpec,
    SoftmaxOpSpec,
)
from diffgrad.strategies.blocks import SPECS
from tests.helpers import KINDS, specs


@pytest.mark.parametrize("table", [CHAINS, SPECS], ids=["CHAINS", "SPECS"])
def test_every_table_has_a_row_for_every_block(table: Mapping[str, Any]) -> None:
    assert set(table) == set(BLOCKS)


def test_every_block_has_a_planted_fault() -> None:
    assert {block for mutant in MUTANTS for block in mutant.blocks} == set(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_names_each_tensor_once_and_none_is_empty_but_for_an_empty_batch(kind: str) -> None:
    assert BLOCKS[kind].__struct_config__.tag == kind
    for spec in specs(kind):
        assert spec.kind == kind
        names = [t.name for t in spec.tensors()]
        assert len(names) == len(set(names))
        assert names[0] == spec.input().name
        assert names[-1] == "dy"
        assert spec.n > 0 or kind == "op_conv"
        assert all(size > 0 for t in spec.tensors() for size in (t.shape if spec.n else t.shape[1:]))
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


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in spec.parameters()}


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        (AttentionSpec(n=1, t=2), 8),
        (EncoderSpec(n=1, t=2, mlp=2), 16),
        (TowerSpec(n=1, t=2, mlp=2, depth=3), 48),
        (PatchEmbedSpec(n=1, h=4, w=4, d=2, p=2), 4),
        (VitHeadSpec(n=1, t=2, d=2), 4),
        (VitSpec(n=1, h=224, w=224), 200),
    ],
    ids=lambda v: str(v)[:12],
)
def test_a_vit_s_blocks_have_the_documents_counts_of_nodes(spec: Spec, nodes: int) -> None:
    assert len(spec.parameters()) == nodes


def test_the_parameters_of_an_encoder() -> None:
    spec = EncoderSpec(n=5, t=7, heads=2, head_dim=3, mlp=4)
    square = {f"W{s}": (6, 6) for s in "qkvo"} | {f"b{s}": (6,) for s in "qkvo"}
    dense = {"Wfc1": (6, 4), "bfc1": (4,), "Wfc2": (4, 6), "bfc2": (6,)}
    assert shapes(spec) == square | dense | {name: (6,) for name in ("ln1g", "ln1bt", "ln2g", "ln2bt")}
    scalar = EncoderSpec(n=5, t=7, heads=2, head_dim=3, mlp=4, norm="scalar")
    assert shapes(scalar) == square | dense | {name: (1,) for name in ("ln1g", "ln1bt", "ln2g", "ln2bt")}


@pytest.mark.parametrize(("h", "w", "p", "t"), [(224, 224, 16, 197), (4, 6, 2, 7), (5, 7, 2, 7), (3, 3, 3, 2)])
def test_an_image_has_a_token_for_every_whole_patch_and_one_more(h: int, w: int, p: int, t: int) -> None:
    embed = PatchEmbedSpec(n=2, h=h, w=w, d=3, p=p)
    assert (embed.output_shape(), shapes(embed)["pos"]) == ((2, t, 3), (t, 3))
    assert shapes(VitSpec(n=2, h=h, w=w, p=p))["pos"] == (t, 192)


def test_the_sites_of_a_tower_go_to_its_blocks_in_order() -> None:
    drops = tuple(Sites(Drop(keep, (True,)), Drop(keep / 2, (False,))) for keep in (0.5, 0.8))
    blocks = TowerSpec(n=1, t=2, mlp=2, depth=2, drops=drops).blocks()
    assert [(name, b.drop_a, b.drop_m) for name, b in blocks if isinstance(b, EncoderSpec)] == [
        ("b1", drops[0].a, drops[0].m),
        ("b2", drops[1].a, drops[1].m),
    ]
    with pytest.raises(KeyError):
        TowerSpec(n=1, t=2, mlp=2, depth=2, drops=drops).scales("b3drop_a")


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_map_has_a_height_and_a_width(kind: str) -> None:
    assert issubclass(BLOCKS[kind], MapSpec) is (len(specs(kind)[0].input().shape) == 4)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (UibSpec(n=1, h=1, w=0, c=1), "uib.w = 0: must be at least 1"),
        (UibSpec(n=1, h=1, w=1, c=1, pre_k=2), "uib.pre_k = 2: must be 0 (no depthwise) or odd"),
        (UibSpec(n=1, h=1, w=1, c=1, drop=Drop(0.0, (True,))), "uib.drop.keep = 0.0: must be above 0 and at most 1"),
        (UibSpec(n=2, h=1, w=1, c=1, drop=Drop(0.5, ())), "uib.drop.kept has 0 flags: must have one per example"),
        (
            DropPathOpSpec(n=2, size=1, drop=Drop(0.5, (True,))),
            "op_drop.drop.kept has 1 flags: must have one per example, and n = 2",
        ),
        (BatchNormOpSpec(n=0, h=1, w=1, c=1), "op_bn.n = 0: must be at least 1"),
        (ConvOpSpec(n=-1, h=1, w=1, ic=1, oc=1, k=1), "op_conv.n = -1: must be at least 0"),
        (
            ConvOpSpec(n=1, h=5, w=5, ic=2, oc=1, k=1, depthwise=True),
            "op_conv.oc = 1: a depthwise convolution has as many as ic = 2",
        ),
        (ConvOpSpec(n=1, h=5, w=5, ic=1, oc=1, k=2, padding="symmetric"), "op_conv.k = 2: must be odd"),
        (ConvOpSpec(n=1, h=2, w=5, ic=1, oc=1, k=3), "op_conv.k = 3: larger than the padded map"),
        (
            ConvOpSpec(n=1, h=3, w=3, ic=1, oc=1, k=2, padding="explicit", pads=(0, 0, -1, -1)),
            "op_conv.k = 2: larger than the padded map",
        ),
        (
            ConvOpSpec(n=1, h=3, w=3, ic=1, oc=1, k=1, pads=(0, 0, 1, 0)),
            "op_conv.pads = (0, 0, 1, 0): only padding explicit takes them",
        ),
        (AttentionCoreOpSpec(n=1, t=2, mask=("11",)), "op_sdpa.mask = ['11']: wants 2 strings of 2 characters"),
        (AttentionCoreOpSpec(n=1, t=2, mask=("11", "1")), "op_sdpa.mask = ['11', '1']: wants 2 strings of 2"),
        (SoftmaxOpSpec(n=1, size=2, mask=("1x",)), "op_softmax.mask = ['1x']: wants 1 strings of 2 characters, each 0"),
        (SoftmaxOpSpec(n=2, size=2, mask=("11", "00")), "op_softmax.mask = ['11', '00']: hides a whole row"),
    ],
    ids=str,
)
def test_impossible_sizes_are_named(spec: Spec, sentence: str) -> None:
    with pytest.raises(CaseError, match="^" + re.escape(sentence)):
        spec.check()


def test_a_drop_site_scales_by_the_reciprocal_of_keep() -> None:
    assert Drop(0.8, (True, False)).scales() == (1.25, 0.0)


@pytest.mark.parametrize(
    ("padding", "pads", "k", "stride", "out"),
    [
        ("valid", (0, 0, 0, 0), 3, 1, (5, 3)),
        ("valid", (0, 0, 0, 0), 3, 4, (2, 1)),
        ("symmetric", (0, 0, 0, 0), 3, 2, (4, 3)),
        ("symmetric", (0, 0, 0, 0), 11, 1, (7, 5)),
        ("xla_same", (0, 0, 0, 0), 2, 2, (4, 3)),
        ("xla_same", (0, 0, 0, 0), 1, 3, (3, 2)),
        ("explicit", (3, -2, 0, 1), 3, 1, (6, 4)),
        ("explicit", (-1, -1, -2, 4), 2, 2, (2, 3)),
    ],
)
def test_the_map_of_a_convolution(
    padding: OpPadding, pads: tuple[int, ...], k: int, stride: int, out: tuple[int, int]
) -> None:
    top, bottom, left, right = pads
    spec = ConvOpSpec(n=2, h=7, w=5, ic=3, oc=4, k=k, stride=stride, padding=padding, pads=(top, bottom, left, right))
    spec.check()
    assert spec.output_shape() == (2, 4, *out)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (ConvOpSpec(n=0, h=7, w=5, ic=3, oc=4, k=2), {"W": (4, 3, 2, 2)}),
        (ConvOpSpec(n=1, h=7, w=5, ic=3, oc=3, k=2, depthwise=True, bias=True), {"W": (3, 1, 2, 2), "b": (3,)}),
        (LayerNormOpSpec(n=2, t=3, d=4), {"g": (4,), "bt": (4,)}),
        (LayerNormOpSpec(n=2, t=3, d=4, norm="scalar"), {"g": (1,), "bt": (1,)}),
        (DenseOpSpec(n=2, i=3, o=4), {"W": (3, 4), "b": (4,)}),
        (LayerScaleOpSpec(n=2, h=3, w=4, c=5), {"g": (5,)}),
        (LayerScaleOpSpec(n=2, h=3, w=4, c=5, scale="element"), {"g": (5, 3, 4)}),
        (PoolOpSpec(n=2, h=3, w=4, c=5), {}),
        (AttentionCoreOpSpec(n=2, t=3, heads=4, head_dim=5), {"k": (2, 3, 20), "v": (2, 3, 20)}),
    ],
    ids=lambda v: str(v)[:24],
)
def test_the_parameters_of_an_op(spec: Spec, parameters: dict[str, tuple[int, ...]]) -> None:
    spec.check()
    assert shapes(spec) == parameters
