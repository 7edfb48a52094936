"""Tying a net: every node in both precisions, and what is not tied is said."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pytest

from diffgrad.adapters.numpy import NumpyAdapter, Var
from diffgrad.mutants import MUTANTS
from diffgrad.specs import CaseError, VitSpec
from diffgrad.tie import NETS, NetSpec, Sizes, Tied, net_spec, tie
from diffgrad.worker import InProcess
from tests.helpers import NET

NODES = {"mobilenetv4_conv_m": 233, "convnext_t": 182, "vit_tiny": 200}
"""The documents' counts of parameter nodes."""


@pytest.mark.parametrize("name", NETS)
def test_a_documented_net_has_the_documented_count_of_nodes(name: str) -> None:
    spec = net_spec(name, Sizes(image=224, batch=8))
    assert len(spec.parameters()) == NODES[name]
    assert (spec.n, spec.h, spec.w, spec.classes) == (8, 224, 224, 1000)


@pytest.mark.parametrize(("name", "batch"), [("mobilenetv4_conv_m", 8), ("convnext_t", 4), ("vit_tiny", 4)])
def test_each_net_has_a_batch_of_its_own(name: str, batch: int) -> None:
    assert (net_spec(name, Sizes()).n, net_spec(name, Sizes()).h) == (batch, 64)


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        (
            "mobilenetv4_conv_m",
            Sizes(31, 2),
            "--image 31: the net halves the image five times, so it must be at least 32",
        ),
        (
            "mobilenetv4_conv_m",
            Sizes(32, 1),
            "--batch 1: the head's batch norm takes its statistics over the batch alone, so it must be at least 2",
        ),
        ("mobilenetv4_conv_m", Sizes(32, 2, 1), "--classes 1: a cross entropy needs at least 2"),
        ("vit_tiny", Sizes(15, 1), "--image 15: its patches are 16 wide, so it must be at least 16"),
        ("convnext_t", Sizes(drop=True), "--drop: convnext_t has no such variant; it is for vit_tiny"),
        ("mobilenetv4_conv_m", Sizes(bf16=True), "--bf16: mobilenetv4_conv_m has no such variant; it is for vit_tiny"),
    ],
)
def test_impossible_sizes_name_their_option(name: str, sizes: Sizes, sentence: str) -> None:
    with pytest.raises(CaseError) as e:
        net_spec(name, sizes)
    assert str(e.value) == sentence


def test_an_unknown_net_is_named() -> None:
    with pytest.raises(CaseError, match="resnet50: no such net; known are mobilenetv4_conv_m"):
        net_spec("resnet50", Sizes())


def test_vit_with_drop_has_two_different_masks_in_its_blocks() -> None:
    spec = net_spec("vit_tiny", Sizes(drop=True))
    assert isinstance(spec, VitSpec)
    assert len(spec.drops) == spec.depth
    assert sum(s.a.kept != s.m.kept for s in spec.drops) > spec.depth / 2
    assert {k for s in spec.drops for k in (*s.a.kept, *s.m.kept)} == {True, False}


class Tie(Protocol):
    def __call__(self, adapter: type[NumpyAdapter], spec: NetSpec = NET) -> Tied: ...


VIT = VitSpec(n=2, h=8, w=8, p=4, heads=2, head_dim=3, mlp=5, depth=2, classes=4, bf16=True)
"""A literal net with the flag for rounded operands."""


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> Tie:
    """tied(adapter): a small net in that adapter."""

    def run(adapter: type[NumpyAdapter], spec: NetSpec = NET) -> Tied:
        monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: adapter())
        with InProcess(["numpy"]) as runner:
            ((name, result),) = tie(spec, runner, seed=1)
        assert name == "numpy"
        return result

    return run


def test_a_healthy_net_is_tied_at_every_node(tied: Tie) -> None:
    result = tied(NumpyAdapter)
    assert result.wrong == ()
    assert result.verdicts == {"float32": "ok", "float64": "ok"}
    assert result.tied == len(NET.parameters())
    assert 0 < result.max_err_over_bar <= 1


def test_a_net_with_one_wrong_kind_of_node_is_not(tied: Tie) -> None:
    result = tied(next(m.adapter for m in MUTANTS if m.name == "part_per_thousand"))
    assert result.verdicts == {"float32": "wrong", "float64": "wrong"}
    assert result.tied < len(NET.parameters())
    assert any(sentence.startswith("float32: wrong at batchnorm@") for sentence in result.wrong)
    assert result.max_err_over_bar > 1


def test_a_net_that_does_not_run_is_tied_nowhere(tied: Tie) -> None:
    class Fails(NumpyAdapter):
        def conv(self, *args: object, **kwargs: object) -> Var:
            raise MemoryError("too large")

    result = tied(Fails)
    assert result.tied == 0
    assert result.wrong == tuple(f"{d}: error: MemoryError: too large" for d in ("float32", "float64"))


def test_rounded_operands_are_the_formula_where_the_flag_is_set(tied: Tie) -> None:
    result = tied(NumpyAdapter, VIT)
    assert (result.wrong, result.lossy, result.tied) == ((), {}, len(VIT.parameters()))


def test_a_net_that_rounds_results_as_well_is_tied_by_that_name(tied: Tie) -> None:
    class Rounds(NumpyAdapter):
        def dense(self, x: Var, w: Var, b: Var, bf16: bool = False) -> Var:
            y = super().dense(x, w, Var(np.zeros_like(b.value)), bf16)
            low = Var(self.operand(y.value, bf16), (y,), lambda dy: (dy,))
            return Var(low.value + b.value, (low, b), lambda dy: (dy, dy.reshape(-1, dy.shape[-1]).sum(0)))

    result = tied(Rounds, VIT)
    assert (result.wrong, result.tied) == ((), len(VIT.parameters()))
    assert set(result.lossy) == {"lossy:bf16_result"}


def test_a_net_that_ignores_the_flag_is_not_tied(tied: Tie) -> None:
    result = tied(next(m.adapter for m in MUTANTS if m.name == "flag_ignored"), VIT)
    assert result.verdicts == {"float32": "wrong", "float64": "ok"}
    assert result.tied < len(VIT.parameters())
