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
class Fault:
    """One distinct fault of a run, in blame order."""

    signature: Signature
    sentence: str


@dataclass(frozen=True)
class Judgement:
    """A run's verdict, its distinct faults (the first is the one to blame), and the report where there is a trace.

    Links are checked one by one on recorded inputs, so a later fault is no echo of an earlier one.
    """

    verdict: str
    sentence: str = ""
    faults: tuple[Fault, ...] = ()
    report: Report | None = None

    @property
    def signature(self) -> Signature | None:
        """The first fault's signature."""
        return self.faults[0].signature if self.faults else None

    def fault(self, signature: Signature) -> Fault | None:
        """The fault of that signature, if the run has it."""
        return next((f for f in self.faults if f.signature == signature), None)


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
        sentence = f"{outcome.status}: {outcome.reason}"
        return Judgement(outcome.status, sentence, (Fault(signature, sentence),))
    report = check_run(
        chain_of(case.block),
        _tensors(case),
        outcome.trace,
        case.dtype,
        mode in COMPILED_MODES,
        _whole(case) if case.dtype == "float64" else None,
        case.lr,
    )
    faults: dict[Signature, Fault] = {}
    faulty = [q for q in report.quantities if q.faulty]
    if any(q.defect for q in faulty):
        faulty = faulty[:1]  # a part that is missing or misshapen leaves its mark on everything around it
    for q in faulty:
        signature = signature_of(answer.adapter, mode, case.dtype, q)
        faults.setdefault(signature, Fault(signature, q.sentence()))
    sentence = next(iter(faults.values())).sentence if faults else ""
    return Judgement(report.verdict, sentence, tuple(faults.values()), report)


def signature_of(adapter: str, mode: str, dtype: str, fault: Quantity) -> Signature:
    """What makes a fault the same one wherever it shows: sites and sizes do not count."""
    link = "+".join(part.split("@")[0] for part in fault.link.split("+"))
    condition = f"{fault.what} {fault.defect}".strip()
    return Signature(adapter, mode, dtype, link, fault.verdict, condition)


# The frameworks answer the same case at about the same time, and share what does not depend on them.


@lru_cache(maxsize=32)
def _tensors(case: Case) -> Arrays:
    return case.tensors()


@lru_cache(maxsize=8)
def _whole(case: Case) -> Expected:
    return end_to_end(chain_of(case.block), _tensors(case), PRECISIONS[case.dtype])
