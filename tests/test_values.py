"""The raw stream and the families are pinned: a case means the same bits for ever."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffgrad.bars import PRECISIONS, recorded, total
from diffgrad.case import Dtype, numpy_dtype
from diffgrad.specs import Drop, EncoderSpec, LossSpec, Role, Sites, Spec, Tensor, TowerSpec, UibSpec, VitSpec
from diffgrad.strategies.cases import DRAWN, DTYPES
from diffgrad.values import FAMILIES, LIMITS, Bits, Floats, Values, draw_tensor
from tests.helpers import KINDS, SMALLEST, UIB, ordinary

MAP = (2, 3, 4, 5)
SHAPES: dict[Role, tuple[int, ...]] = {
    "input": (2, 2, 1, 1),
    "kernel": (2, 3, 1, 1),
    "matrix": (4, 2),
    "gamma": (4,),
    "beta": (4,),
    "cotangent": (2, 2, 1, 1),
}

PINS: tuple[tuple[str, int, Role, str], ...] = (
    # family, exponent, role, the first values at seed 9
    ("blank", 0, "input", "0x0.0p+0 0x0.0p+0"),
    ("normal", 0, "input", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1"),
    ("normal", 0, "kernel", "0x1.32eep-1 -0x1.edep-1 0x1.a56p-2 -0x1.144p-5"),
    ("normal", 0, "matrix", "0x1.09cf147fec6ddp-1 -0x1.abb552e7eac73p-1 0x1.6cebe47182b98p-2"),
    ("normal", 0, "gamma", "0x1.84e78a3ff636ep0 0x1.512ab46054e34p-3 0x1.5b3af91c60ae6p0"),
    ("normal", 0, "beta", "0x1.09cf147fec6ddp-1 -0x1.abb552e7eac73p-1 0x1.6cebe47182b98p-2"),
    ("normal", 0, "cotangent", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1"),
    ("dyadic", 0, "input", "-0x1p0 -0x1p-3 -0x1p-2 -0x1p0"),
    ("dyadic", 0, "kernel", "-0x1p-1 -0x1p-2 -0x1.8p-1 -0x1.8p-1"),
    ("dyadic", 0, "matrix", "-0x1p-1 -0x1p-2 -0x1.800p-1 -0x1.800p-1"),
    ("dyadic", 0, "gamma", "-0x1p0 -0x1p-1 -0x1.8p0 -0x1.8p0"),
    ("offset", 14, "input", "0x1.0004273c51ffbp14 0x1.fff2a25568c0bp13 0x1.0002d9d7c8e30p14"),
    ("offset", 14, "beta", "0x1.09cf147fec6ddp2 -0x1.abb552e7eac73p2 0x1.6cebe47182b98p1"),
    ("tiny", 140, "input", "0x1.09cf147fec6ddp-140 -0x1.abb552e7eac73p-140 0x1.6cebe47182b98p-141"),
    ("huge", 100, "cotangent", "0x1.09cf147fec6ddp100 -0x1.abb552e7eac73p100 0x1.6cebe47182b98p99"),
    ("wide", 100, "kernel", "0x1.32eep99 -0x1.edep99 0x1.a56p98"),
    ("wide", 100, "beta", "0x1.09cf147fec6ddp99 -0x1.abb552e7eac73p99 0x1.6cebe47182b98p98"),
    ("zeros", 0, "input", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x0p0 0x0p0"),
    ("zeros", 0, "beta", "0x1p-20 0x0p0 0x0p0 0x0p0"),
    ("constant", 0, "input", "0x1.67746532ad4e6p-1 0x1.5ee027a63ff8ap-2 0x1.67746532ad4e6p-1"),
    ("constant", 0, "kernel", "0x0p0 0x0p0 0x0p0 -0x1.144p-5"),
    ("constant", 0, "beta", "0x1.09cf147fec6ddp-1 -0x1.abb552e7eac73p-1 0x1.6cebe47182b98p-2 -0x1.de7aa213948bap-6"),
    ("one_hot", 0, "cotangent", "0x0p0 0x1.55daa973f563ap1 0x0p0 0x0p0"),
    ("repeated", 2, "input", "0x1.4c42d99fe7894p0 0x1.3dc37f8be3780p-1 0x1.c826dd8de367ep-1 0x1.6571f9e934675p-1"),
    ("repeated", 60, "input", "0x1.09cf147fec6ddp0 0x1.09cf147fec6ddp0 0x1.6cebe47182b98p-1 0x1.6cebe47182b98p-1"),
    ("repeated", 60, "cotangent", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1"),
    ("kinks", 0, "input", "0x1.8p2 -0x1.abb552e7eac73p0 0x1.8p2 0x1.8000020000000p2"),
    ("kinks", 0, "cotangent", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1"),
    ("integers", 3, "input", "0x1p1 -0x1p1 0x0p0 -0x1.4p2"),
    ("integers", -3, "cotangent", "0x1p-3 0x1p-3 0x1p-3 0x1p-3"),
    ("integers", 0, "kernel", "0x1p0 -0x1p0 0x0p0 0x0p0 0x1p0 0x1p0"),
    ("integers", 0, "gamma", "0x1p0 0x1p0 0x1p1 0x1p0"),
    ("limits", 127, "input", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1 -0x1.8p127"),
    ("limits", 5, "cotangent", "0x1.09cf147fec6ddp0 -0x1.abb552e7eac73p0 0x1.6cebe47182b98p-1 -0x1.8p5"),
    ("limits", 127, "kernel", "0x1.32eep-1 -0x1.edep-1 0x1.a56p-2"),
)


def draw(family: str, exponent: int, role: Role, shape: tuple[int, ...], seed: int = 9) -> Floats:
    return draw_tensor(UIB.block, Tensor("t", shape, role), Values(family, seed, exponent))


def test_the_raw_stream_is_pinned() -> None:
    assert [int(v) for v in Bits(1, "x").raw(3)] == [0xC0A54EE485482FE5, 0xB73F5621297150E6, 0x49CAD4D8AF25081D]


@pytest.mark.parametrize(("family", "exponent", "role", "values"), PINS, ids=lambda v: str(v)[:12])
def test_families_are_pinned(family: str, exponent: int, role: Role, values: str) -> None:
    pinned = [float.fromhex(v).hex() for v in values.split()]
    drawn = draw(family, exponent, role, SHAPES[role]).ravel().tolist()
    assert [v.hex() for v in drawn[: len(pinned)]] == pinned


def test_every_family_has_a_pin() -> None:
    assert {pin[0] for pin in PINS} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_finite_in_float32_over_its_whole_range(family: str, kind: str) -> None:
    low, high = FAMILIES[family][1]
    case = ordinary(kind)
    for exponent in {low, (low + high) // 2, high}:
        msgspec.structs.replace(case, values=Values(family, 3, exponent)).tensors()  # raises where it is not


@pytest.mark.parametrize("family", FAMILIES)
def test_no_exponent_of_the_range_overflows(family: str) -> None:
    low, high = FAMILIES[family][1]
    for exponent in range(low, high + 1):
        msgspec.structs.replace(SMALLEST, values=Values(family, 3, exponent)).tensors()


@given(st.integers(0, 2**64 - 1), st.sampled_from(DRAWN))
def test_a_seed_gives_the_same_bits_and_another_seed_others(seed: int, family: str) -> None:
    exponent = FAMILIES[family][1][1]
    one, again = (draw(family, exponent, "input", MAP, seed) for _ in range(2))
    assert one.tobytes() == again.tobytes()
    assert one.tobytes() != draw(family, exponent, "input", MAP, seed ^ 1).tobytes()


def test_tensors_of_a_case_are_independent() -> None:
    x, dy = (UIB.tensors()[name] for name in ("x", "dy"))
    assert x.shape == dy.shape
    assert not (x == dy).any()


@given(st.integers(0, 2**64 - 1))
def test_normal_stays_within_its_documented_reach(seed: int) -> None:
    assert np.abs(Bits(seed, "x").normal((200,))).max() < 3.47


@given(st.integers(0, 2**64 - 1), st.sampled_from(("input", "kernel", "gamma", "beta", "cotangent")))
def test_dyadic_values_are_eighths_of_at_most_two(seed: int, role: Role) -> None:
    v = draw("dyadic", 0, role, MAP if role in ("input", "kernel", "cotangent") else (7,), seed)
    assert ((8 * v) == np.rint(8 * v)).all()
    assert np.abs(v).max() <= 2


def test_what_each_family_is_for() -> None:
    assert draw("offset", 14, "input", MAP).min() > 2.0**13
    assert 0 < np.abs(draw("tiny", 140, "input", MAP)).max() < np.finfo(np.float32).tiny
    assert np.abs(draw("huge", 100, "cotangent", MAP)).max() > 2.0**99
    assert 0 < (draw("zeros", 0, "input", MAP) == 0).mean() < 1
    assert (np.ptp(draw("constant", 0, "input", (2, 16, 3, 3)), axis=(0, 2, 3)) == 0).any()
    assert np.count_nonzero(draw("one_hot", 0, "cotangent", MAP)) == 1
    assert not np.ptp(draw("repeated", 60, "input", (2, 5, 3)), axis=1).any()
    assert np.ptp(draw("repeated", 30, "input", (2, 5, 3)), axis=1).all()
    kinks = draw("kinks", 0, "input", (1000,))
    assert all((kinks == kink).sum() > 100 for kink in (0, 6))
    assert np.signbit(kinks[kinks == 0]).any()
    assert all((np.abs(kinks - kink) > 0).any() and np.abs(kinks - kink)[kinks != kink].min() < 1e-5 for kink in (0, 6))
    whole = draw("integers", 3, "input", (1000,))
    assert set(whole.tolist()) == set(range(-6, 7))
    assert set(draw("integers", 3, "cotangent", MAP).ravel().tolist()) == {8.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ["input", "cotangent"])
def test_limits_are_finite_and_their_powers_are_not(role: Role, dtype: Dtype) -> None:
    largest = [np.abs(draw("limits", e, role, (1000,)).astype(numpy_dtype(dtype))).max() for e in LIMITS[dtype]]
    assert all(np.isfinite(v) for v in largest)
    with np.errstate(over="ignore"):
        assert np.isfinite(np.exp(largest[0] / 2))
        assert not np.isfinite(np.exp(largest[0] * 2))
        if dtype != "float64":  # whose limits lie beyond those of float32, in which every exponent is to be finite
            assert not np.isfinite(largest[-1] + largest[-1])
            assert not np.isfinite(largest[1] ** 3) or not np.isfinite(largest[2] ** 3)


def test_an_empty_batch_has_values_of_every_family() -> None:
    for family, (_, (_, high)) in FAMILIES.items():
        for role in ("input", "cotangent"):
            assert draw(family, high, role, (0, 3, 2, 2)).shape == (0, 3, 2, 2)


A, M = Drop(0.8, (True, False, True)), Drop(0.5, (False, True, True))


@pytest.mark.parametrize(
    ("spec", "scales"),
    [
        (UibSpec(n=3, h=1, w=1, c=1, drop=A), {"drop": [1.25, 0.0, 1.25]}),
        (EncoderSpec(n=3, t=1, mlp=1, drop_m=M), {"drop_m": [0.0, 2.0, 2.0]}),
        (EncoderSpec(n=3, t=1, mlp=1, drop_a=A, drop_m=M), {"drop_a": [1.25, 0.0, 1.25], "drop_m": [0.0, 2.0, 2.0]}),
        (
            TowerSpec(n=3, t=1, mlp=1, depth=2, drops=(Sites(A, M), Sites(M, A))),
            {
                "b1drop_a": [1.25, 0.0, 1.25],
                "b1drop_m": [0.0, 2.0, 2.0],
                "b2drop_a": [0.0, 2.0, 2.0],
                "b2drop_m": [1.25, 0.0, 1.25],
            },
        ),
    ],
    ids=lambda v: str(v)[:12],
)
def test_drop_masks_come_from_the_spec_and_not_from_the_seed(spec: Spec, scales: dict[str, list[float]]) -> None:
    assert {t.name: draw_tensor(spec, t, Values("huge", 5, 100)).tolist() for t in spec.constants()} == scales


def test_targets_are_smoothed_labels_whatever_the_family() -> None:
    """(1 - alpha)*onehot + alpha/K at alpha = 0.1, one label a row."""
    targets = draw("huge", 100, "target", (50, 4))
    assert {v.hex() for v in targets.ravel().tolist()} == {(0.1 / 4).hex(), (0.9 + 0.1 / 4).hex()}
    assert ((targets > 0.5).sum(1) == 1).all()
    assert (targets > 0.5).any(0).all()


def targets(spec: Spec, seed: int = 9) -> Floats:
    (target,) = (t for t in spec.constants() if t.role == "target")
    return draw_tensor(spec, target, Values(seed=seed))


@pytest.mark.parametrize(("alpha", "pair"), [(0.0, {0.0, 1.0}), (0.5, {0.125, 0.625}), (1.0, {0.25})])
def test_the_smoothing_is_the_spec_s(alpha: float, pair: set[float]) -> None:
    nets: tuple[Spec, ...] = (
        LossSpec(n=9, classes=4, alpha=alpha),
        VitSpec(n=9, h=16, w=16, depth=1, classes=4, alpha=alpha),
    )
    for spec in nets:
        assert set(targets(spec).ravel().tolist()) == pair


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 40))
def test_soft_targets_are_any_shares_that_sum_to_one(seed: int, n: int, classes: int) -> None:
    shares = targets(LossSpec(n=n, classes=classes, soft=True), seed)
    summed = total(recorded(shares, PRECISIONS["float64"]), (1,))
    assert (shares >= 0).all()
    assert (np.abs(summed.val - 1) <= summed.err).all()


def test_soft_targets_are_no_smoothed_labels() -> None:
    assert len(set(targets(LossSpec(n=4, classes=5, soft=True)).ravel().tolist())) > 4
