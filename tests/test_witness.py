"""Witnesses: who is asked about a fault, and what each says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from diffgrad.adapters.base import Adapter
from diffgrad.adapters.numpy import NumpyAdapter, Var
from diffgrad.adapters.registry import OFFERS, Offer
from diffgrad.case import Case
from diffgrad.corpus import Signature
from diffgrad.how import How
from diffgrad.specs import ActivationOpSpec, DenseOpSpec
from diffgrad.values import Values
from diffgrad.witness import witnesses
from diffgrad.worker import InProcess
from tests.helpers import ordinary

DENSE = Case(block=DenseOpSpec(n=2, i=2, o=1), values=Values(seed=1))


class FaultyDense(NumpyAdapter):
    """Everything that dense hands back is doubled."""

    def dense(self, *args: Any, **kwargs: Any) -> Var:
        y = super().dense(*args, **kwargs)
        pull = y.pull
        y.pull = lambda dy: tuple(2 * d for d in pull(dy))
        return y


def found(adapter: str, case: Case, link: str, condition: str) -> Signature:
    return Signature(adapter, "eager", case.dtype, link, "wrong", condition)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """The framework called torch is the NumPy adapter with a fault, in two modes."""

    def load(name: str, quick: bool = False) -> Adapter:
        return FaultyDense() if name == "torch" else NumpyAdapter()

    monkeypatch.setattr("diffgrad.worker.load", load)
    monkeypatch.setitem(OFFERS, "torch", Offer(modes=("eager", "func"), flavours=("x",)))
    return InProcess(["torch", "jax", "numpy"])


def test_everyone_else_is_asked_and_the_framework_itself_under_other_conditions(planted: InProcess) -> None:
    said = witnesses(planted, DENSE, found("torch", DENSE, "dense", "gradient"))
    own = {"torch func", "torch float64", "torch bfloat16", "torch float16"}
    assert set(said) == {"jax jit", "numpy float32", *own}
    assert said["jax jit"] == said["numpy float32"] == "ok"
    assert all(said[name].startswith("wrong at dense@out: gradient ") for name in own)


def test_a_witness_is_quoted_on_the_same_quantity(planted: InProcess) -> None:
    said = witnesses(planted, DENSE, found("torch", DENSE, "dense", "cotangent"))
    assert said["torch func"].startswith("wrong at dense@out: cotangent ")


def test_others_are_asked_under_plain_conditions(planted: InProcess) -> None:
    """They may not have the case's own; the framework in another mode keeps them."""
    case = Case(block=DENSE.block, values=DENSE.values, how=How(x="step", mode="func"))
    said = witnesses(planted, case, found("torch", case, "dense", "gradient"))
    assert said["jax jit"] == "ok"
    assert "torch eager" in said
    assert "torch func" not in said


def test_a_dtype_that_the_numbers_or_the_block_do_not_fit_is_not_asked(planted: InProcess) -> None:
    large = Case(block=ActivationOpSpec(n=1, size=1, act="relu"), overrides={"x": {"0": 1e30}})
    said = witnesses(planted, large, found("torch", large, "relu", "cotangent"))
    assert "torch float16" not in said
    assert "torch bfloat16" in said
    flagged = Case(block=replace(ordinary("attention").block, bf16=True)).check()
    asked = set(witnesses(planted, flagged, found("torch", flagged, "dense", "gradient")))
    assert asked == {"jax jit", "numpy float32", "torch func"}
