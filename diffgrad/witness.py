"""Witnesses: what everyone else gives for a case in which one framework is at fault.

The oracle decides who is wrong. The other frameworks, the same framework in other modes and dtypes, and NumPy in the
same precision are shown beside it, so that a reader sees at once how narrow the fault is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from diffgrad.adapters.registry import OFFERS, load, mode_of, offers
from diffgrad.case import Case, Dtype
from diffgrad.corpus import Signature
from diffgrad.how import How
from diffgrad.judge import judge
from diffgrad.specs import CaseError
from diffgrad.worker import Answer, Runner


def witnesses(runner: Runner, case: Case, found: Signature) -> dict[str, str]:
    """Name of the witness -> its verdict, and the same fault if it has it, or else its first one.

    Args:
        runner: the frameworks that are at hand.
        case: the case.
        found: the fault; its framework is not a witness under the case's own conditions.
    """
    out: dict[str, str] = {}
    for name, other, variant in _asked(runner, case, found.adapter):
        for answer in runner.run([variant], [other], quick=False):
            out[name] = _said(answer, found)
    out[f"numpy {case.dtype}"] = _said(reference(case), found)
    return out


def reference(case: Case) -> Answer:
    """The NumPy run of a case, in its dtype and under plain conditions."""
    plain = replace(case, how=How())
    return Answer("numpy", plain, load("numpy").run(plain))


def _asked(runner: Runner, case: Case, adapter: str) -> Iterator[tuple[str, str, Case]]:
    """(name, adapter, case) of every witness but NumPy."""
    plain = replace(case, how=How(device=case.how.device))
    for other in runner.about():
        if other not in (adapter, "numpy"):
            yield f"{other} {mode_of(other, plain.how)}", other, plain
    for mode in OFFERS[adapter].modes:
        how = replace(case.how, mode=mode, bare=case.how.bare and mode != "jvp")
        if mode != mode_of(adapter, case.how) and offers(adapter, how):
            yield f"{adapter} {mode}", adapter, replace(case, how=how, lr=0.0 if mode == "jvp" else case.lr)
    for dtype in get_args(Dtype):
        try:
            variant = replace(case, dtype=dtype).check()
            variant.tensors()
        except CaseError:
            continue  # its numbers do not fit
        if dtype != case.dtype:
            yield f"{adapter} {dtype}", adapter, variant


def _said(answer: Answer, found: Signature) -> str:
    judgement = judge(answer)
    same = (f for f in judgement.faults if (f.signature.link, f.signature.condition) == (found.link, found.condition))
    fault = next(iter((*same, *judgement.faults)), None)
    return fault.sentence if fault is not None else judgement.verdict
