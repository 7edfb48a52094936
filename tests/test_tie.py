"""Tying a net: every node in both precisions, and what is not tied is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diffgrad.adapters.numpy import NumpyAdapter, Var
from diffgrad.mutants import MUTANTS
from diffgrad.specs import CaseError
from diffgrad.tie import NETS, Tied, net_spec, tie
from diffgrad.worker import InProcess
from tests.helpers import NET

NODES = {"mobilenetv4_conv_m": 233, "convnext_t": 182, "vit_tiny": 200}
"""The documents' counts of parameter nodes."""


@pytest.mark.parametrize("name", NETS)
def test_a_documented_net_has_the_documented_count_of_nodes(name: str) -> None:
    spec = net_spec(name, image=224, batch=8, classes=1000)
    assert len(spec.parameters()) == NODES[name]
    assert (spec.n, spec.h, spec.w) == (8, 224, 224)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((31, 2, 2), "--image 31: the net halves the image five times, so it must be at least 32"),
        ((32, 1, 2), "--batch 1: the head's batch norm takes its statistics over the batch alone: at least 2"),
        ((32, 2, 1), "--classes 1: a cross entropy needs at least 2"),
    ],
)
def test_impossible_sizes_name_their_option(sizes: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(CaseError) as e:
        net_spec("mobilenetv4_conv_m", *sizes)
    assert str(e.value) == sentence


def test_an_unknown_net_is_named() -> None:
    with pytest.raises(CaseError, match="resnet50: no such net; known are mobilenetv4_conv_m"):
        net_spec("resnet50", 224, 8, 1000)


Tie = Callable[[type[NumpyAdapter]], Tied]


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> Tie:
    """tied(adapter): a small net in that adapter."""

    def run(adapter: type[NumpyAdapter]) -> Tied:
        monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: adapter())
        with InProcess(["numpy"]) as runner:
            ((name, result),) = tie(NET, runner, seed=1)
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
