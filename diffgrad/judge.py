"""From an answer to a judgement: the verdict of a run, and the signature of its fault if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from diffgrad.adapters.registry import COMPILED_MODES
from diffgrad.bars import PRECISIONS
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.check import Quantity, Report, check_run
from diffgrad.corpus import Signature
from diffgrad.oracle import Expected, end_to_end
from diffgrad.trace import Arrays
from diffgrad.worker import Answer

RUN_FAULTS = ("crash", "hang", "error")
"""Outcomes without a trace that are faults of the framework."""


@dataclass(frozen=True)
class Judgement:
    """A run's verdict; ``signature`` and ``sentence`` where there is a fault, ``report`` where there is a trace."""

    verdict: str
    sentence: str = ""
    signature: Signature | None = None
    report: Report | None = None


def judge(answer: Answer, mode: str) -> Judgement:
    """Check one answer.

    Args:
        answer: an adapter's outcome.
        mode: how the adapter ran (``eager`` or ``jit``).
    """
    case, outcome = answer.case, answer.outcome
    if outcome.trace is None:
        if outcome.status not in RUN_FAULTS:
            return Judgement(outcome.status, outcome.reason)
        kind = outcome.reason.split(":", 1)[0] if outcome.status == "error" else case.block.kind
        signature = Signature(answer.adapter, mode, case.dtype, "run", outcome.status, kind)
        return Judgement(outcome.status, f"{outcome.status}: {outcome.reason}", signature)
    report = check_run(
        chain_of(case.block),
        _tensors(case),
        outcome.trace,
        case.dtype,
        mode in COMPILED_MODES,
        _whole(case) if case.dtype == "float64" else None,
    )
    fault = report.first_fault
    if fault is None:
        return Judgement(report.verdict, report=report)
    signature = signature_of(answer.adapter, mode, case.dtype, fault)
    return Judgement(fault.verdict, fault.sentence(), signature, report)


def signature_of(adapter: str, mode: str, dtype: str, fault: Quantity) -> Signature:
    """What makes a fault the same one wherever it shows: sites and sizes do not count."""
    link = "+".join(part.split("@")[0] for part in fault.link.split("+"))
    condition = f"{fault.what} {fault.note.split(' ')[0]}".strip() if fault.note else fault.what
    return Signature(adapter, mode, dtype, link, fault.verdict, condition)


# The frameworks answer the same case at about the same time, and share what does not depend on them.


@lru_cache(maxsize=32)
def _tensors(case: Case) -> Arrays:
    return case.tensors()


@lru_cache(maxsize=8)
def _whole(case: Case) -> Expected:
    return end_to_end(chain_of(case.block), _tensors(case), PRECISIONS[case.dtype])
