"""What the tests of each framework's conditions share."""

from __future__ import annotations

from typing import Any, get_args

from diffgrad.case import Case, Dtype
from diffgrad.how import How, Memory
from diffgrad.judge import judge
from diffgrad.trace import Trace
from diffgrad.values import Values
from diffgrad.worker import Answer, Workers

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
MEMORIES: tuple[Memory, ...] = tuple(m for m in get_args(Memory) if m)


def case_of(block: Any, dtype: Dtype = "float64", **how: Any) -> Case:
    """A case of a block under some conditions."""
    return Case(block=block, dtype=dtype, values=Values(seed=3), how=How(**how)).check()


def traces(workers: Workers, *cases: Case) -> list[Trace]:
    """Their traces, in the order of the cases; none of them is wrong."""
    found = {a.case: a for a in workers.run(cases)}
    return [sound(found[case]) for case in cases]


def sound(answer: Answer) -> Trace:
    """The trace of an answer that is right, but for what the framework is known to compute in a lower precision."""
    judgement = judge(answer)
    assert judgement.verdict.split(":")[0] in ("ok", "lossy"), f"{answer.case.to_json()!r}: {judgement.sentence}"
    assert not judgement.faults
    assert answer.outcome.trace is not None
    return answer.outcome.trace


def same_quantities(other: Trace, plain: Trace) -> None:
    """Both delivered the same sites and nodes."""
    assert set(other.acts) == set(plain.acts)
    assert set(other.cots) == set(plain.cots)
    assert set(other.grads) == set(plain.grads)
