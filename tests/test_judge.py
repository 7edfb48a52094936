"""From an answer to a verdict and a signature."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from diffgrad.corpus import Signature
from diffgrad.how import How
from diffgrad.judge import judge
from diffgrad.trace import Outcome, Trace
from diffgrad.worker import Answer
from tests.helpers import UIB, altered, run_numpy


def answer(outcome: Outcome) -> Answer:
    return Answer("torch", UIB, outcome)


def signature(link: str, verdict: str, condition: str) -> Signature:
    return Signature("torch", "eager", "float32", link, verdict, condition)


@pytest.mark.parametrize(
    ("outcome", "verdict", "sentence", "found"),
    [
        (Outcome("crash", reason="it died"), "crash", "crash: it died", signature("run", "crash", "uib")),
        (Outcome("hang", reason="too long"), "hang", "hang: too long", signature("run", "hang", "uib")),
        (
            Outcome("error", reason="RuntimeError: no kernel: float8"),
            "error",
            "error: RuntimeError: no kernel: float8",
            signature("run", "error", "RuntimeError no-kernel-float"),
        ),
        (Outcome("unsupported", reason="documented"), "unsupported", "documented", None),
    ],
    ids=lambda v: v.status if isinstance(v, Outcome) else "",
)
def test_a_run_without_a_trace(outcome: Outcome, verdict: str, sentence: str, found: Signature | None) -> None:
    j = judge(answer(outcome))
    assert (j.verdict, j.sentence, j.signature, j.report) == (verdict, sentence, found, None)
    assert [f.signature for f in j.faults] == ([found] if found else [])


def test_a_healthy_run() -> None:
    j = judge(answer(Outcome("ok", run_numpy(UIB))))
    assert (j.verdict, j.sentence, j.signature) == ("ok", "", None)
    assert j.report is not None


RUN = run_numpy(UIB)
NAN = np.full_like(RUN.acts["en"], np.nan)
FAULTS: tuple[tuple[Trace, Signature], ...] = (
    (altered(RUN, "gradient", "pW", RUN.grads["pW"] + np.float32(9)), signature("conv2d", "wrong", "gradient")),
    (altered(RUN, "activation", "en", NAN), signature("batchnorm", "nonfinite", "activation")),
    (altered(RUN, "cotangent", "x", RUN.cots["x"] + np.float32(9)), signature("copy+add", "wrong", "cotangent")),
    (altered(RUN, "gradient", "pW", None), signature("conv2d", "wrong", "gradient")),
    (altered(RUN, "gradient", "pW", RUN.grads["pW"][0]), signature("conv2d", "wrong", "gradient")),
    (altered(RUN, "gradient", "pW", RUN.grads["pW"].astype("f8")), signature("conv2d", "wrong", "gradient")),
    (altered(RUN, "gradient", "zz", RUN.grads["pW"]), signature("block", "wrong", "gradient")),
)  # fmt: skip


@pytest.mark.parametrize(("trace", "found"), FAULTS, ids=lambda v: v.condition if isinstance(v, Signature) else "")
def test_a_fault_has_a_signature_of_op_verdict_and_condition(trace: Trace, found: Signature) -> None:
    j = judge(answer(Outcome("ok", trace)))
    assert j.signature is not None
    what, *note = j.signature.condition.split()
    assert (j.verdict, msgspec.structs.replace(j.signature, condition=what)) == (found.verdict, found)
    assert bool(note) == ("[" not in j.sentence)
    assert j.sentence.startswith(f"{found.verdict} at ")


def test_every_distinct_fault_of_a_run_is_told_in_blame_order() -> None:
    trace = RUN
    for node in ("qW", "dW", "pW", "pg"):
        trace = altered(trace, "gradient", node, RUN.grads[node] + np.float32(9))
    j = judge(answer(Outcome("ok", trace)))
    assert [f.signature.link for f in j.faults] == ["batchnorm", "conv2d", "depthwise"]
    assert [f.sentence.split("[")[0] for f in j.faults] == [
        "wrong at batchnorm@pn: gradient pg",
        "wrong at conv2d@pc: gradient pW",
        "wrong at depthwise@dc: gradient dW",
    ]
    assert (j.signature, j.sentence) == (j.faults[0].signature, j.faults[0].sentence)
    assert [j.fault(f.signature) for f in j.faults] == list(j.faults)
    assert j.fault(signature("relu", "wrong", "gradient")) is None


def test_a_compiled_mode_is_checked_with_what_a_compiler_may_do() -> None:
    """relu recomputed from the batch norm's float64 value: outside the eager bar, inside the compiled one."""
    en = RUN.acts["en"]
    fused = altered(RUN, "activation", "er", np.maximum(np.nextafter(en, np.float32(9)), 0))
    assert judge(answer(Outcome("ok", fused))).verdict == "wrong"
    compiled = msgspec.structs.replace(UIB, how=How(mode="compile"))
    assert judge(Answer("torch", compiled, Outcome("ok", fused))).verdict == "ok"
    assert judge(Answer("jax", UIB, Outcome("ok", fused))).verdict == "ok"


# Bare runs.


def bare(trace: Trace, **changes: np.ndarray | None) -> Trace:
    """The trace with a second run that is the first one but for some arrays."""
    outer = {"out": trace.acts["out"], "x": trace.cots["x"], **trace.grads} | changes
    return msgspec.structs.replace(trace, bare={k: v for k, v in outer.items() if v is not None})


# The second example is dropped: there the output is the input, and nothing is rounded.
OTHERWISE_ROUNDED = np.where([[[[True]]], [[[False]]]], np.nextafter(RUN.acts["out"], np.float32(9)), RUN.acts["out"])
BARE = msgspec.structs.replace(UIB, how=How(bare=True))


@pytest.mark.parametrize(
    ("changes", "verdict", "link"),
    [
        ({}, "ok", ""),
        ({"out": OTHERWISE_ROUNDED}, "ok", ""),
        ({"out": RUN.acts["out"] * np.float32(1.5)}, "wrong", "add@out"),
        ({"pW": RUN.grads["pW"] + np.float32(9)}, "wrong", "conv2d@pc"),
        ({"x": np.full_like(RUN.cots["x"], np.nan)}, "nonfinite", "copy@xb+add@out"),
        ({"x": None}, "wrong", "copy@xb+add@out"),
        ({"eg": None}, "wrong", "batchnorm@en"),
    ],
)
def test_a_bare_run_is_the_observed_one_or_within_the_end_to_end_bars(
    changes: dict[str, np.ndarray | None], verdict: str, link: str
) -> None:
    j = judge(Answer("torch", BARE, Outcome("ok", bare(RUN, **changes))))
    assert j.verdict == verdict
    if link:
        assert j.report is not None
        fault = j.report.first_fault
        assert fault is not None
        assert (fault.link, fault.what.split()[0]) == (link, "bare")
        assert j.signature is not None
        assert j.signature.how == "bare=true"


def test_a_bare_run_that_is_not_there_is_a_fault() -> None:
    assert judge(Answer("torch", BARE, Outcome("ok", RUN))).verdict == "wrong"
