"""What test_adapters asks of one adapter, in a process of its own: ``python -m tests.probe_adapter NAME``.

Frameworks are not imported into the tests' process: they would be there for every other test, warnings and all.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from diffgrad.adapters.base import Adapter, missing_blocks
from diffgrad.adapters.registry import load
from diffgrad.case import Case
from tests.helpers import KINDS, SMALLEST, ordinary


class Probe(msgspec.Struct):
    """Everything that is asked."""

    name: str
    missing: list[str]
    ran: dict[str, str]
    inputs_untouched: bool


def probe(name: str) -> Probe:
    """Ask the adapter of that name."""
    adapter = load(name, quick=True)
    ran = {}
    for kind in KINDS:
        outcome = adapter.run(ordinary(kind))
        ran[kind] = outcome.status if outcome.trace else f"{outcome.status}: {outcome.reason}"
    return Probe(
        name=adapter.name,
        missing=missing_blocks(type(adapter)),
        ran=ran,
        inputs_untouched=_untouched(adapter),
    )


def _untouched(adapter: Adapter, case: Case = SMALLEST) -> bool:
    tensors = case.tensors()
    before = {k: v.copy() for k, v in tensors.items()}
    adapter.trace(case, tensors)
    return all(np.array_equal(v, tensors[k]) for k, v in before.items())


if __name__ == "__main__":
    print(msgspec.json.encode(probe(sys.argv[1])).decode())
