"""From an answer to a judgement: the verdict of a run, and the signature of its fault if it has one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, partial

from diffgrad.adapters.registry import compiled, mode_of
from diffgrad.bars import PRECISIONS
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.check import FAULTS, Quantity, Report, check_bare, check_run
from diffgrad.corpus import Signature
from diffgrad.how import How
from diffgrad.oracle import Expected, end_to_end
from diffgrad.tangents import check_tangents
from diffgrad.trace import Arrays, Trace
from diffgrad.worker import Answer

RUN_FAULTS = ("crash", "hang", "error")
"""Outcomes without a trace that are faults of the framework."""

FAULTY = (*FAULTS, *RUN_FAULTS)
"""Verdicts of a run that are faults of the framework."""


@dataclass(frozen=True)
class Fault:
    """One distinct fault of a run, in blame order."""

    signature: Signature
    sentence: str
    quantity: Quantity | None = None
    """The first array that shows it; None where the run ended without a trace."""


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

    def alike(self, signature: Signature) -> Fault | None:
        """The same fault under whatever conditions, if the run has it."""
        return next((f for f in self.faults if f.signature.core == signature.core), None)


def judge(answer: Answer) -> Judgement:
    """Check one answer, under the conditions of its case."""
    case, outcome = answer.case, answer.outcome
    signed = partial(signature_of, answer.adapter, case)
    if outcome.trace is None:
        if outcome.status not in RUN_FAULTS:
            return Judgement(outcome.status, outcome.reason)
        kind = _exception(outcome.reason) if outcome.status == "error" else case.block.kind
        sentence = f"{outcome.status}: {_brief(outcome.reason)}"
        signature = _signature(answer.adapter, case, "run", outcome.status, kind)
        return Judgement(outcome.status, sentence, (Fault(signature, sentence),))
    report = _report(case, outcome.trace, compiled(answer.adapter, case.how))
    faults: dict[Signature, Fault] = {}
    faulty = [q for q in report.quantities if q.faulty]
    if any(q.defect for q in faulty):
        faulty = faulty[:1]  # a part that is missing or misshapen leaves its mark on everything around it
    for q in faulty:
        faults.setdefault(signed(q), Fault(signed(q), q.sentence(), q))
    sentence = next(iter(faults.values())).sentence if faults else ""
    return Judgement(report.verdict, sentence, tuple(faults.values()), report)


def _report(case: Case, trace: Trace, recomputes: bool) -> Report:
    chain, tensors = chain_of(case.block), _tensors(case)
    p = PRECISIONS[case.dtype]
    without = impossible(case.how)
    if case.how.mode == "jvp":
        quantities = check_tangents(chain, tensors, trace, case.tangents(), p, recomputes, without)
        return Report(tuple(quantities), len(chain.links), 0)
    # Asked for only where it is needed: it costs as much as everything else.
    whole = partial(_whole, case)
    report = check_run(chain, tensors, trace, case.dtype, recomputes, whole, case.lr, without)
    if case.how.bare and report.first_fault is None:
        bare = check_bare(chain, tensors, trace, p, whole, without)
        return Report((*report.quantities, *bare), report.links, report.nodes)
    return report


_OF_DEVICES = ("winograd", "winograd4x4", "fft", "approximate_tanh", "approximate_exp")
"""Cheaper algorithms that only kernels of an accelerator take; on a CPU they would be news."""


def impossible(how: How) -> tuple[str, ...]:
    """The looser models that a run under these conditions cannot have used."""
    return (*(() if how.tf32 else ("tf32_operands",)), *(() if how.device == "cuda" else _OF_DEVICES))


def signature_of(adapter: str, case: Case, fault: Quantity) -> Signature:
    """What makes a fault the same one wherever it shows: sites and sizes do not count."""
    link = "+".join(part.split("@")[0] for part in fault.link.split("+"))
    condition = f"{fault.what} {fault.defect}".strip()
    return _signature(adapter, case, link, fault.verdict, condition)


def _brief(reason: str) -> str:
    """A message without the stack that some put into it, in one line of some length."""
    lines = [line.strip() for line in reason.splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith(('File "', "Detected at node")))
    return told if len(told) <= _LETTERS else told[:_LETTERS] + "..."


_LETTERS = 400


def _exception(reason: str) -> str:
    """An exception's type and the first words of its message; names, sizes and numbers vary from case to case."""
    kind, _, message = reason.partition(":")
    words = re.findall(r"[A-Za-z]{2,}", message.splitlines()[0] if message else "")
    return " ".join([kind, "-".join(words[:_WORDS]).lower()]).strip()


_WORDS = 6


def _signature(adapter: str, case: Case, link: str, verdict: str, condition: str) -> Signature:
    how = case.how
    return Signature(adapter, mode_of(adapter, how), case.dtype, link, verdict, condition, how.label())


# The frameworks answer the same case at about the same time, and share what does not depend on them.


@lru_cache(maxsize=32)
def _tensors(case: Case) -> Arrays:
    return case.tensors()


@lru_cache(maxsize=8)
def _whole(case: Case) -> Expected:
    return end_to_end(chain_of(case.block), _tensors(case), PRECISIONS[case.dtype])
