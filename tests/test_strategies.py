"""What is drawn: valid cases only, every corner within a modest number of draws, the same ones for the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import Phase, find, given, settings

from diffgrad.adapters.registry import FRAMEWORKS, offers
from diffgrad.case import Case
from diffgrad.how import How
from diffgrad.specs import (
    BLOCKS,
    AttentionSpec,
    EncoderSpec,
    LossSpec,
    PatchEmbedSpec,
    Spec,
    TowerSpec,
    UibSpec,
    VitSpec,
)
from diffgrad.specs.base import MapSpec
from diffgrad.specs.ops import Act, ActivationOpSpec, ConvOpSpec
from diffgrad.strategies import Batch, batches, cases, sample
from diffgrad.strategies.blocks import SPECS
from diffgrad.strategies.cases import DRAWN, DTYPES, hows, quiet_settings, values
from diffgrad.strategies.ops import OPS
from tests.helpers import KINDS, extent, specs

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
    "odd": lambda s: extent(s)[0] % 2 == 1,
    "even": lambda s: extent(s)[0] % 2 == 0,
}

MAP_CORNERS: dict[str, Callable[[MapSpec], bool]] = {
    "square": lambda s: s.h == s.w,
    "not square": lambda s: s.h != s.w,
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(BLOCKS[kind], MapSpec)])
@pytest.mark.parametrize("corner", MAP_CORNERS)
def test_maps_are_drawn_square_and_not(kind: str, corner: str) -> None:
    assert any(MAP_CORNERS[corner](s) for s in specs(kind, MANY) if isinstance(s, MapSpec))


def smallest(drawn: Iterable[Spec]) -> tuple[int, ...]:
    return tuple(map(min, zip(*map(extent, drawn), strict=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_extent_of_every_block_is_drawn(kind: str) -> None:
    assert smallest(specs(kind, MANY)) in map(extent, specs(kind, MANY))


@pytest.mark.parametrize("corner", UIB_CORNERS)
def test_every_corner_of_the_uib_is_drawn(corner: str) -> None:
    assert any(UIB_CORNERS[corner](s) for s in specs("uib", MANY) if isinstance(s, UibSpec))


Tokens = AttentionSpec | EncoderSpec | TowerSpec
TOKEN_KINDS = ("attention", "encoder", "tower")
TOKEN_CORNERS: dict[str, Callable[[Tokens], bool]] = {
    "one token": lambda s: s.t == 1,
    "one head": lambda s: s.heads == 1 < s.head_dim,
    "several heads of width 1": lambda s: s.heads > 1 == s.head_dim,
    "as many tokens as a head is wide": lambda s: s.t == s.head_dim > 1,
    "composed": lambda s: s.core == "composed",
    "fused": lambda s: s.core == "fused",
    "fused_math": lambda s: s.core == "fused_math",
    "bf16": lambda s: s.bf16,
    "not bf16": lambda s: not s.bf16,
}


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("corner", TOKEN_CORNERS)
def test_every_corner_of_attention_is_drawn(kind: str, corner: str) -> None:
    assert any(TOKEN_CORNERS[corner](s) for s in specs(kind, MANY) if isinstance(s, Tokens))


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_as_many_examples_as_tokens_are_drawn_often(kind: str) -> None:
    alike = [s for s in specs(kind, MANY) if isinstance(s, Tokens) and s.n == s.t > 1]
    assert len(alike) > MANY / 10


ENCODER_CORNERS: dict[str, Callable[[EncoderSpec], bool]] = {
    "no drop site": lambda s: s.drop_a is None and s.drop_m is None,
    "the first site only": lambda s: s.drop_a is not None and s.drop_m is None,
    "the second site only": lambda s: s.drop_a is None and s.drop_m is not None,
    "two different masks": lambda s: bool(s.drop_a and s.drop_m and s.drop_a.kept != s.drop_m.kept),
    "a scalar norm": lambda s: s.norm == "scalar",
    "a vector norm": lambda s: s.norm == "vector",
    "wider inside": lambda s: s.mlp > s.d,
    "narrower inside": lambda s: s.mlp < s.d,
}


@pytest.mark.parametrize("corner", ENCODER_CORNERS)
def test_every_corner_of_the_encoder_is_drawn(corner: str) -> None:
    assert any(ENCODER_CORNERS[corner](s) for s in specs("encoder", MANY) if isinstance(s, EncoderSpec))


Towers = TowerSpec | VitSpec
TOWER_CORNERS: dict[str, Callable[[Towers], bool]] = {
    "one block": lambda s: s.depth == 1,
    "several blocks": lambda s: s.depth > 1,
    "no drop site": lambda s: not s.drops,
    "blocks with different masks": lambda s: len({site.a for site in s.drops}) > 1,
    "sites with different masks": lambda s: any(site.a.kept != site.m.kept for site in s.drops),
}


@pytest.mark.parametrize("kind", ["tower", "vit"])
@pytest.mark.parametrize("corner", TOWER_CORNERS)
def test_every_corner_of_a_tower_is_drawn(kind: str, corner: str) -> None:
    assert any(TOWER_CORNERS[corner](s) for s in specs(kind, MANY) if isinstance(s, Towers))


def test_both_flags_of_a_patch_embedding_are_drawn_together_and_alone() -> None:
    for kind in ("patch_embed", "vit"):
        drawn = {(s.bf16, s.bf16_conv) for s in specs(kind, MANY) if isinstance(s, PatchEmbedSpec | VitSpec)}
        assert len(drawn) == 4


def test_a_loss_is_drawn_with_any_smoothing_and_with_soft_targets() -> None:
    drawn = [s for s in specs("loss", MANY) if isinstance(s, LossSpec)]
    assert {s.soft for s in drawn} == {True, False}
    assert {0.0, 0.1, 1.0} <= {s.alpha for s in drawn if not s.soft}
    assert {2048} < {s.classes for s in drawn if s.classes > 256}


CONV_CORNERS: dict[str, Callable[[ConvOpSpec], bool]] = {
    "an empty batch": lambda s: s.n == 0,
    "three examples": lambda s: s.n == 3,
    "one channel": lambda s: s.ic == s.oc == 1,
    "depthwise": lambda s: s.depthwise and s.ic > 1,
    "a bias": lambda s: s.bias,
    "a stride beyond the kernel": lambda s: s.stride > s.k > 1,
    "an output one wide": lambda s: s.output_shape()[3] == 1 < s.w,
    "a kernel far larger than the map": lambda s: s.k > 2 * max(s.h, s.w),
    "1x1 with stride 2 and few channels": lambda s: s.k == 1 and s.stride == 2 and max(s.ic, s.oc) <= 4,
    "an odd XLA-SAME padding": lambda s: s.padding == "xla_same" and s.k % 2 == 0,
    "a padding beyond the kernel and another that crops": lambda s: max(s.pads) > s.k - 1 and min(s.pads) < 0,
    "a plain explicit padding": lambda s: s.padding == "explicit" and min(s.pads) >= 0,
}


@pytest.mark.parametrize("corner", CONV_CORNERS)
def test_every_corner_of_a_convolution_is_drawn_again_and_again(corner: str) -> None:
    drawn = [s for s in specs("op_conv", 2 * MANY) if isinstance(s, ConvOpSpec) and CONV_CORNERS[corner](s)]
    assert len(drawn) >= 5


OP_CORNERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "statistics of one": ("op_bn", lambda s: s.n * s.h * s.w == 1),
    "1x1 maps normed over the batch": ("op_bn", lambda s: s.h * s.w == 1 < s.n),
    "statistics of many": ("op_bn", lambda s: s.n * s.h * s.w == 4096),
    "257 tokens": ("op_ln", lambda s: s.n * s.t == 257),
    "4096 tokens": ("op_ln", lambda s: s.n * s.t == 4096),
    "one token": ("op_ln", lambda s: s.n * s.t == 1),
    "long tokens": ("op_ln", lambda s: s.d > 256),
    "257 rows": ("op_dense", lambda s: s.n == 257),
    "4096 rows": ("op_dense", lambda s: s.n == 4096),
    "one row": ("op_dense", lambda s: s.n == 1),
    "a long sum": ("op_dense", lambda s: s.i > 256),
    "a row of a large map": ("op_pool", lambda s: s.h == 1 and s.w > 256),
    "rows of 4096": ("op_softmax", lambda s: s.size == 4096),
    "rows of one": ("op_softmax", lambda s: s.size == 1),
    "a remainder of a vector": ("op_act", lambda s: s.size == 129),
    "no example kept": ("op_drop", lambda s: not any(s.drop.kept)),
    "element by element": ("op_scale", lambda s: s.scale == "element" and s.h != s.w),
    "causal": ("op_sdpa", lambda s: s.mask[-2:-1] == ("1" * (s.t - 1) + "0",) and s.mask[0] == "1" + "0" * (s.t - 1)),
    "a query that sees no key": ("op_sdpa", lambda s: "0" * s.t in s.mask and s.t > 1),
    "a key that no query sees": ("op_sdpa", lambda s: len(set(s.mask)) == 1 and "0" in s.mask[0] and "1" in s.mask[0]),
    "one number of a row seen": ("op_softmax", lambda s: s.size > 1 and any(r.count("1") == 1 for r in s.mask)),
    "several heads of width 1": ("op_sdpa", lambda s: s.heads > 1 == s.head_dim),
}


@pytest.mark.parametrize("corner", OP_CORNERS)
def test_every_corner_of_an_op_is_drawn(corner: str) -> None:
    kind, holds = OP_CORNERS[corner]
    assert any(map(holds, specs(kind, MANY)))


def test_every_activation_is_drawn() -> None:
    assert {s.act for s in specs("op_act", MANY) if isinstance(s, ActivationOpSpec)} == set(get_args(Act))


@pytest.mark.parametrize("kind", OPS)
def test_a_single_op_is_small(kind: str) -> None:
    elements = [sum(math.prod(t.shape) for t in s.tensors()) for s in specs(kind, MANY)]
    assert max(elements) < 20_000
    assert sorted(elements)[MANY // 2] < 2_000


def test_operands_are_rounded_in_float32_only() -> None:
    drawn = sample(batches(TOKEN_KINDS), MANY, key=1)
    assert {b.dtype for b in drawn if getattr(b.block, "bf16", False)} == {"float32"}


def test_every_block_family_and_dtype_is_drawn() -> None:
    drawn = sample(cases(dtypes=DTYPES), 4 * MANY, key=1)
    assert {c.block.kind for c in drawn} == set(KINDS)
    assert {c.values.family for c in drawn} == set(DRAWN)
    assert {c.dtype for c in drawn} == set(DTYPES)


def test_both_ends_of_an_exponent_range_are_drawn() -> None:
    drawn = [v.exponent for v in sample(values(), 6 * MANY, key=1) if v.family == "tiny"]
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
    # A patch of one pixel is a corner, and not what shrinking ends at.
    assert extent(least) == smallest(s for s in specs(kind, MANY) if getattr(s, "p", 0) == getattr(least, "p", 0))
    assert least.n <= 2  # where statistics are taken over the batch alone, one example is the corner
    if isinstance(least, UibSpec):
        assert least == UibSpec(n=1, h=1, w=1, c=1)


def test_a_case_shrinks_to_one_draw_of_normal_values_in_float32() -> None:
    least = find(batches(), lambda b: True, settings=SHRINKING)
    assert least.dtype == "float32"
    (only,) = least.draws
    assert (only.family, only.seed, only.exponent) == ("normal", 0, 0)


# Conditions.


@cache
def conditions() -> tuple[How, ...]:
    """Those of many batches. (On their own the plain ones would come once: Hypothesis repeats nothing.)"""
    loss = batches(["loss"], conditions=hows(), most=1)
    return tuple(b.how for key in range(4) for b in sample(loss, 3 * MANY, key))


def test_conditions_are_often_plain_and_always_offered_by_some_framework() -> None:
    drawn = conditions()
    assert sum(h == How() for h in drawn) > len(drawn) // 4
    assert all(any(offers(name, h) for name in FRAMEWORKS) for h in drawn)
    for h in set(drawn):
        h.check()


@pytest.mark.parametrize("field", [f for f in How.__struct_fields__ if f not in ("device", "tf32", "benchmark")])
def test_every_condition_is_drawn(field: str) -> None:
    seen = {getattr(h, field) for h in conditions()}
    assert len(seen) > 1
    if field == "mode":
        assert seen >= {"", "func", "checkpoint", "linearize", "function", "xla", "jvp"}


def test_a_framework_is_drawn_only_what_it_offers() -> None:
    assert all(offers("numpy", h) for h in sample(hows(("numpy",)), 200, key=1))
    assert {h.mode for h in sample(hows(("torch",), ("compile", "func")), 100, key=1)} == {"compile", "func"}
    assert {h.device for h in sample(hows(device="cuda"), 50, key=1)} == {"cuda"}


def test_conditions_shrink_to_plain_ones() -> None:
    assert find(hows(), lambda h: True, settings=SHRINKING) == How()
