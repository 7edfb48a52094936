"""Every adapter has every block and runs it; what it refuses is tested in ``test_conditions_*``."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from diffgrad.adapters.base import Adapter, Unsupported, missing_blocks
from diffgrad.adapters.layout import from_nhwc, to_nhwc
from diffgrad.adapters.numpy import NumpyAdapter, Var, backward
from diffgrad.adapters.registry import ADAPTERS, FRAMEWORKS, OFFERS, load
from diffgrad.case import Case
from diffgrad.trace import Arrays, Trace
from tests.conftest import GetWorkers
from tests.helpers import KINDS, SMALLEST, UIB, ordinary, python
from tests.probe_adapter import Probe

every_adapter = pytest.mark.parametrize("name", ADAPTERS)


@every_adapter
def test_an_adapter_has_and_runs_every_block(name: str) -> None:
    ran = python("-m", "tests.probe_adapter", name)
    assert ran.returncode == 0, ran.stderr
    answers = msgspec.json.decode(ran.stdout, type=Probe)
    assert answers.name == name
    assert answers.missing == []
    assert answers.ran == dict.fromkeys(KINDS, "ok")
    assert answers.inputs_untouched


@every_adapter
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_delivers_every_node_in_the_cases_dtype(name: str, kind: str, workers: GetWorkers) -> None:
    case = ordinary(kind, "float64")
    (answer,) = workers(name).run([case])
    trace = answer.outcome.trace
    assert trace is not None, answer.outcome.reason
    assert set(trace.grads) == {t.name for t in case.block.parameters()}
    assert {t.name: t.shape for t in case.block.parameters()} == {k: v.shape for k, v in trace.grads.items()}
    assert {v.dtype.name for part in (trace.acts, trace.cots, trace.grads) for v in part.values()} == {"float64"}
    assert workers(name).about()[name].modes == OFFERS[name].modes


def test_the_table_of_adapters() -> None:
    assert set(FRAMEWORKS) == set(ADAPTERS) - {"numpy"}
    for name, row in ADAPTERS.items():
        assert row.install.startswith("pip install ")
        assert name in row.install or name == "numpy"
    with pytest.raises(ImportError):
        load("mxnet")


# What every adapter inherits.


class Bare(Adapter):
    name = "bare"
    unsupported = (Unsupported(lambda case: case.block.n == 2, "bare refuses pairs"),)

    def versions(self) -> dict[str, str]:
        return {}

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        raise ZeroDivisionError("by zero")


def test_a_missing_block_is_named() -> None:
    assert missing_blocks(Bare) == list(KINDS)
    assert missing_blocks(NumpyAdapter) == []


def test_a_refusal_is_reasoned_and_an_exception_is_not_a_refusal() -> None:
    assert (Bare().run(UIB).status, Bare().run(UIB).reason) == ("unsupported", "bare refuses pairs")
    assert (Bare().run(SMALLEST).status, Bare().run(SMALLEST).reason) == ("error", "ZeroDivisionError: by zero")


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_channels_last_frameworks_is_undone_exactly(kind: str) -> None:
    spec, tensors = ordinary(kind).block, ordinary(kind).tensors()
    there = to_nhwc(spec, tensors)
    for name, v in from_nhwc(spec, there).items():
        assert np.array_equal(v, tensors[name])
    x = spec.input().name
    assert there[x].shape == tuple((np.moveaxis(tensors[x], 1, -1) if tensors[x].ndim == 4 else tensors[x]).shape)
    assert all(v.flags.c_contiguous for v in there.values())


def test_attention_s_matrices_are_no_maps_to_lay_out() -> None:
    square = np.arange(24.0).reshape(1, 2, 3, 4)
    back = from_nhwc(ordinary("tower").block, {"b1attnS": square, "attnP": square, "b1pe": square})
    assert np.array_equal(back["b1attnS"], square)
    assert np.array_equal(back["attnP"], square)
    assert back["b1pe"].shape == (1, 4, 2, 3)


def test_the_tape_adds_up_what_a_value_feeds() -> None:
    x = Var(np.array(3.0))
    twice = Var(x.value * 2, (x,), lambda dy: (2 * dy,))
    out = Var(twice.value + x.value, (twice, x), lambda dy: (dy, dy))
    backward(out, np.array(5.0))
    assert [None if v.cot is None else v.cot.item() for v in (x, twice)] == [15, 5]
