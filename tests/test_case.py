"""Cases: JSON in and out, identity, and one sentence for every input that makes no sense."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffgrad.case import SCHEMA, Case, case_from_json, case_from_object
from diffgrad.specs import CaseError, Drop, UibSpec
from diffgrad.strategies import cases
from diffgrad.values import Values
from tests.helpers import KINDS, SMALLEST, UIB, ordinary

BASE: dict[str, Any] = {
    "schema": 1,
    "block": {"kind": "uib", "n": 2, "h": 3, "w": 3, "c": 2, "drop": {"keep": 0.5, "kept": [True, False]}},
    "values": {"family": "offset", "seed": 1, "exponent": 3},
}

BAD: tuple[tuple[str, Any, str], ...] = (
    # field to replace, value, what the sentence says
    ("schema", "1", "schema = '1': must be a whole number from 1 to 1"),
    ("schema", 0, "schema = 0: must be a whole number from 1 to 1"),
    ("schema", 1.5, "schema = 1.5: must be a whole number from 1 to 1"),
    ("schema", SCHEMA + 1, "schema = 2: written by a newer diffgrad; this one reads up to 1, so upgrade it"),
    ("dtype", "float8", "dtype = 'float8': Invalid enum value 'float8'"),
    ("overides", {}, "Object contains unknown field `overides`"),
    ("block", 3, "block = 3: Expected `object`, got `int`"),
    ("block.kind", "uibx", "block.kind = 'uibx': no such block; known are uib"),
    ("block.kind", None, "block.kind = None: no such block; known are uib"),
    ("block.stride", 2, "block: Object contains unknown field `stride`"),
    ("block.n", "2", "block.n = '2': Expected `int`, got `str`"),
    ("block.n", 0, "uib.n = 0: must be at least 1"),
    ("block.h", -1, "uib.h = -1: must be at least 1"),
    ("block.c", 0, "uib.c = 0: must be at least 1"),
    ("block.expand", 0, "uib.expand = 0: must be at least 1"),
    ("block.pre_k", 4, "uib.pre_k = 4: must be 0 (no depthwise) or odd"),
    ("block.post_k", -3, "uib.post_k = -3: must be 0 (no depthwise) or odd"),
    ("block.h", 2**40, "uib: its tensors hold 26388279066642 elements, more than 268435456"),
    ("block.drop.keep", 0, "uib.drop.keep = 0.0: must be above 0 and at most 1"),
    ("block.drop.keep", 1.5, "uib.drop.keep = 1.5: must be above 0 and at most 1"),
    ("block.drop.kept", [True], "uib.drop.kept has 1 flags: must have one per example, and n = 2"),
    ("block.drop.kept", [True, 1], "block.drop.kept[1] = 1: Expected `bool`, got `int`"),
    ("values.family", "norml", "values.family = 'norml': must be one of normal, dyadic, offset"),
    ("values.exponent", 15, "values.exponent = 15: family offset takes 0 to 14"),
    ("values.exponent", -1, "values.exponent = -1: family offset takes 0 to 14"),
    ("values.seed", -1, "values.seed = -1: must be at least 0 and below 2**64"),
    ("values.seed", 2**64, "values.seed = 18446744073709551616: must be at least 0 and below 2**64"),
    ("overrides", {"y": {"0": 1}}, "overrides.y: uib has no such tensor; it has x, eW, eg, ebt, pW, pg, pbt, drop, dy"),
    ("overrides", {"x": {"36": 1}}, "overrides.x[36]: must be a flat index from 0 to 35"),
    ("overrides", {"x": {"-1": 1}}, "overrides.x[-1]: must be a flat index from 0 to 35"),
    ("overrides", {"x": {"0": "a"}}, "Expected `float`, got `str`"),
    ("how", {"mode": "warp"}, "how.mode = 'warp': Invalid enum value 'warp'"),
    ("how", {"layot": "channels_last"}, "how: Object contains unknown field `layot`"),
    ("how", {"mode": "jvp", "bare": True}, "how.bare with how.mode jvp: forward mode has nothing to expose"),
    ("how", {"tf32": True}, "how.tf32 and how.benchmark: they are settings of a CUDA device, and how.device is cpu"),
    ("how", {"threads": 3}, "how.threads = 3: Invalid enum value 3"),
)


def test_forward_mode_takes_no_step() -> None:
    with pytest.raises(CaseError, match=r"lr = 0.1 with how.mode jvp: forward mode has no gradients to step along"):
        case_from_object(BASE | {"lr": 0.1, "how": {"mode": "jvp"}})


def test_a_dtype_that_was_typed_gives_the_same_id_as_the_default() -> None:
    typed = "".join(["float", "32"])
    assert msgspec.structs.replace(SMALLEST, dtype=typed).id == SMALLEST.id


def test_plain_conditions_leave_no_trace_in_the_file() -> None:
    assert b"how" not in case_from_object(BASE).to_json()
    assert case_from_object(BASE | {"how": {}}).id == case_from_object(BASE).id
    how = {"mode": "func", "layout": "channels_last", "x": "step", "threads": 2}
    case = case_from_object(BASE | {"how": how})
    assert case_from_json(case.to_json()) == case
    assert case.how.label() == "layout=channels_last,x=step,threads=2"
    assert case.how.unusual() == how


def test_an_expanded_tensor_is_the_same_along_axis_0_and_masks_are_not() -> None:
    case = case_from_object(BASE | {"how": {"x": "expanded", "dy": "expanded", "params": "expanded"}})
    for name, v in case.tensors().items():
        assert (name == "drop") == bool((v != v[:1]).any())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_case_holds_numbers_of_its_dtype(dtype: str) -> None:
    case = case_from_object(BASE | {"dtype": dtype})
    assert {v.dtype.name for v in case.tensors().values()} == {dtype}
    assert {v.dtype.name for v in case.tangents().values()} == {dtype}
    with pytest.raises(CaseError, match=r"values: x overflows float16 at family huge, exponent 20"):
        case_from_object(BASE | {"dtype": "float16", "values": {"family": "huge", "exponent": 20}}).tensors()


VIT_BLOCKS: dict[str, dict[str, Any]] = {
    "attention": {"n": 2, "t": 3},
    "encoder": {"n": 2, "t": 3, "mlp": 2, "drop_a": {"keep": 0.5, "kept": [True, False]}},
    "tower": {"n": 2, "t": 3, "mlp": 2, "depth": 2},
    "patch_embed": {"n": 2, "h": 4, "w": 4, "d": 3, "p": 2},
    "vit_head": {"n": 2, "t": 3, "d": 4},
    "loss": {"n": 2, "classes": 3},
    "vit": {"n": 2, "h": 16, "w": 16, "depth": 2},
}

SITES = {site: {"keep": 0.5, "kept": [True, False]} for site in ("a", "m")}

BAD_VIT: tuple[tuple[str, str, Any, str], ...] = (
    # block, field to replace, value, what the sentence says
    ("attention", "n", 0, "attention.n = 0: must be at least 1"),
    ("attention", "t", 0, "attention.t = 0: must be at least 1"),
    ("attention", "heads", 0, "attention.heads = 0: must be at least 1"),
    ("attention", "head_dim", -1, "attention.head_dim = -1: must be at least 1"),
    ("attention", "core", "flash", "block.core = 'flash': Invalid enum value 'flash'"),
    ("attention", "h", 4, "block: Object contains unknown field `h`"),
    ("encoder", "mlp", 0, "encoder.mlp = 0: must be at least 1"),
    ("encoder", "norm", "channel", "block.norm = 'channel': Invalid enum value 'channel'"),
    ("encoder", "drop_a", {"keep": 0.0, "kept": [True, True]}, "encoder.drop_a.keep = 0.0: must be above 0"),
    ("encoder", "drop_a", {"keep": 0.5, "kept": [True]}, "encoder.drop_a.kept has 1 flags: must have one per example"),
    ("encoder", "drop_m", {"keep": 0.5, "kept": []}, "encoder.drop_m.kept has 0 flags: must have one per example"),
    ("tower", "depth", 0, "tower.depth = 0: must be at least 1"),
    ("tower", "mlp", 0, "encoder.mlp = 0: must be at least 1"),
    ("tower", "drops", [SITES], "tower.drops has sites for 1 blocks: must be empty or have 2"),
    ("tower", "drops", [SITES, {"a": SITES["a"]}], "block.drops[1]: Object missing required field `m`"),
    ("tower", "n", 3, "encoder.drop_a.kept has 2 flags: must have one per example, and n = 3"),
    ("patch_embed", "p", 0, "patch_embed.p = 0: must be at least 1"),
    ("patch_embed", "d", 0, "patch_embed.d = 0: must be at least 1"),
    ("patch_embed", "ic", 0, "patch_embed.ic = 0: must be at least 1"),
    ("patch_embed", "w", 1, "patch_embed.w = 1: must be at least 2"),
    ("vit_head", "t", 0, "vit_head.t = 0: must be at least 1"),
    ("vit_head", "classes", 0, "vit_head.classes = 0: must be at least 1"),
    ("loss", "classes", 0, "loss.classes = 0: must be at least 1"),
    ("loss", "alpha", -0.25, "loss.alpha = -0.25: must be from 0 (one-hot targets) to 1 (all classes alike)"),
    ("loss", "alpha", 1.5, "loss.alpha = 1.5: must be from 0 (one-hot targets) to 1 (all classes alike)"),
    ("vit", "alpha", 2, "vit.alpha = 2.0: must be from 0 (one-hot targets) to 1 (all classes alike)"),
    ("vit", "h", 15, "vit.h = 15: must be at least 16"),
    ("vit", "p", 0, "vit.p = 0: must be at least 1"),
    ("vit", "image", 0, "vit.image = 0: must be at least 1"),
    ("vit", "classes", 1, "vit.classes = 1: must be at least 2"),
    ("vit", "drops", [SITES], "vit.drops has sites for 1 blocks: must be empty or have 2"),
    ("vit", "drops", [SITES, SITES | {"m": {"keep": 1.5, "kept": [True, True]}}], "encoder.drop_m.keep = 1.5: must be"),
)


def vit_case(kind: str, dtype: str = "float32", **fields: Any) -> Any:
    """A case of a ViT block as an object, with some of its fields replaced."""
    drops = {"drops": [SITES, SITES]} if kind == "tower" else {}
    return {"block": {"kind": kind, **VIT_BLOCKS[kind], **drops, **fields}, "dtype": dtype}


@pytest.mark.parametrize(("kind", "field", "value", "sentence"), BAD_VIT, ids=lambda v: str(v)[:40])
def test_what_makes_no_sense_in_a_vit_is_named(kind: str, field: str, value: Any, sentence: str) -> None:
    assert case_from_object(vit_case(kind)).block.kind == kind
    with pytest.raises(CaseError) as e:
        case_from_object(vit_case(kind, **{field: value}))
    assert str(e.value).startswith(sentence)


@pytest.mark.parametrize("kind", ["attention", "encoder", "tower", "patch_embed", "vit"])
def test_the_bf16_flag_is_of_float32_runs(kind: str) -> None:
    assert case_from_object(vit_case(kind, bf16=True)).dtype == "float32"
    assert case_from_object(vit_case(kind, "float64")).dtype == "float64"
    with pytest.raises(CaseError, match=f"^{kind}.bf16 with dtype float64: the flag rounds float32 operands$"):
        case_from_object(vit_case(kind, "float64", bf16=True))


def with_field(path: str, value: Any) -> dict[str, Any]:
    """BASE with one field replaced."""
    raw = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    at = raw
    for parent in parents:
        at = at[parent]
    at[last] = value
    return raw


@pytest.mark.parametrize(("path", "value", "sentence"), BAD, ids=lambda v: str(v)[:40])
def test_what_makes_no_sense_is_named(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(CaseError) as e:
        case_from_object(with_field(path, value))
    assert sentence in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not JSON: Input data was truncated"),
        ("[1]", "a case must be a JSON object, not list"),
        ("null", "a case must be a JSON object, not NoneType"),
        ("{}", "Object missing required field `block`"),
        (b"\xff", "not JSON: "),
    ],
)
def test_text_that_is_no_case(text: str | bytes, sentence: str) -> None:
    with pytest.raises(CaseError) as e:
        case_from_json(text)
    assert str(e.value).startswith(sentence)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PATHS = tuple(dict.fromkeys(path for path, _, _ in BAD))


@given(st.sampled_from(PATHS), JSON)
def test_whatever_a_field_holds_the_answer_is_a_case_or_a_sentence(path: str, value: Any) -> None:
    with contextlib.suppress(CaseError):
        assert isinstance(case_from_object(with_field(path, value)), Case)


@given(JSON)
def test_whatever_the_file_holds_the_answer_is_a_sentence(raw: Any) -> None:
    with pytest.raises(CaseError):
        case_from_object(raw)


@given(cases())
def test_a_case_survives_its_json(case: Case) -> None:
    again = case_from_json(case.to_json())
    assert again == case
    assert (again.id, hash(again), again.to_json()) == (case.id, hash(case), case.to_json())


PINNED = Case(
    block=UibSpec(n=2, h=3, w=5, c=4, expand=3, pre_k=3, drop=Drop(0.8, (True, False))),
    dtype="float64",
    values=Values("huge", 7, 12),
    overrides={"x": {"0": 1.5}},
)


def test_the_format_and_the_id_are_pinned() -> None:
    assert PINNED.to_json().decode() == (
        '{"schema":1,"block":{"kind":"uib","n":2,"h":3,"w":5,"c":4,"expand":3,"pre_k":3,'
        '"drop":{"keep":0.8,"kept":[true,false]}},"dtype":"float64",'
        '"values":{"family":"huge","seed":7,"exponent":12},"overrides":{"x":{"0":1.5}}}'
    )
    assert PINNED.id == "cac2da8f6e3d"


@pytest.mark.parametrize(
    "changes", [{"dtype": "float64"}, {"values": Values(seed=2)}, {"overrides": {"x": {"0": 1.0}}}], ids=str
)
def test_every_field_is_part_of_the_id(changes: dict[str, Any]) -> None:
    assert msgspec.structs.replace(UIB, **changes).id != UIB.id


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_the_spec(kind: str) -> None:
    case = ordinary(kind)
    got = {name: (v.shape, v.dtype.name) for name, v in case.tensors().items()}
    assert got == {t.name: (t.shape, case.dtype) for t in case.block.tensors()}


def test_an_override_replaces_one_element_and_nothing_else() -> None:
    plain = UIB.tensors()
    changed = msgspec.structs.replace(UIB, overrides={"dy": {"5": -2.5}}).check().tensors()
    assert changed["dy"].ravel()[5] == -2.5
    for name, v in plain.items():
        assert np.count_nonzero(v != changed[name]) == (name == "dy")


@pytest.mark.parametrize("value", [1e300, float("nan"), float("-inf")])
def test_a_value_that_the_dtype_cannot_hold_is_named(value: float) -> None:
    case = msgspec.structs.replace(SMALLEST, overrides={"eW": {"0": value}})
    with pytest.raises(CaseError, match="eW overflows float32"):
        case.tensors()
