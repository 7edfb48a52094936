"""A block's fault as a case of the single op that has it, on fewer and simpler numbers."""

from __future__ import annotations

import numpy as np
import pytest

from diffgrad.case import Case, case_from_json
from diffgrad.chains import chain_of
from diffgrad.judge import judge
from diffgrad.reduce import explicit, fewer, single_op
from diffgrad.specs import ConvOpSpec, LayerNormOpSpec
from diffgrad.trace import Outcome, Trace
from diffgrad.worker import Answer
from tests.helpers import KINDS, altered, ordinary, run_numpy

WITHOUT = {"copy", "add", "flatten", "droppath", "scores", "weighted", "prependcls", "addposition", "clsslice"}
"""Ops that are no block of their own, or only move numbers."""


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "op_sdpa"])  # alone already, its keys and values parameters
def test_every_link_of_a_block_can_stand_alone_and_gives_what_it_gave_there(kind: str) -> None:
    """The op's case holds exactly what the block's run recorded, so the same numbers come out."""
    case = ordinary(kind)
    trace = run_numpy(case)
    for link in chain_of(case.block).links:
        alone = single_op(case, trace, link.writes)
        bf16 = getattr(getattr(link.op, "products", None), "bf16", False)
        if link.op.name in WITHOUT or link.op.name == "smoothedcrossentropy" or bf16:
            continue
        assert alone is not None, link.op.name
        assert chain_of(alone.block).links[0].op.name == link.op.name
        run = run_numpy(alone)
        there = trace.acts[link.writes]
        assert run.acts["out"].size == there.size
        assert judge(Answer("numpy", alone, Outcome("ok", run))).verdict in ("ok", "vacuous")


def test_an_explicit_case_survives_its_file_to_the_last_bit() -> None:
    spec = LayerNormOpSpec(n=2, t=1, d=3)
    rng = np.random.default_rng(0)
    tensors = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in spec.tensors()}
    case = explicit(spec, tensors, Case(block=spec))
    again = case_from_json(case.to_json()).tensors()
    assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in tensors.items()}


def test_sizes_and_numbers_go_as_far_as_the_fault_lets_them() -> None:
    """At fault wherever the kernel has a number above 2: one tap and one number are left."""
    spec = ConvOpSpec(n=2, h=5, w=4, ic=3, oc=2, k=3, padding="symmetric")
    rng = np.random.default_rng(1)
    tensors = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in spec.tensors()}
    tensors["W"][1, 2, 1, 0] = 2.71828
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case.check())
        return bool((case.tensors()["W"] > 2).any())

    least = fewer(explicit(spec, tensors, Case(block=spec)), fails)
    assert sum(v.size for v in least.tensors().values()) <= 4
    assert {name: v.ravel().tolist() for name, v in least.tensors().items() if v.any()} == {"W": [3.0]}
    assert len(asked) < 400


def test_what_was_not_recorded_or_is_not_finite_cannot_stand_alone() -> None:
    case = ordinary("uib")
    trace = run_numpy(case)
    nan = np.full_like(trace.acts["ec"], np.nan)
    assert single_op(case, altered(trace, "activation", "ec", nan), "en") is None
    assert single_op(case, altered(trace, "activation", "ec", None), "en") is None
    assert single_op(case, Trace({}, {}, {}), "en") is None
    assert single_op(case, trace, "no such site") is None
