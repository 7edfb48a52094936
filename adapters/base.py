"""What an adapter is: one block's forward per method, in the framework's own idiom, with its sites tapped.

Adapters never read the chain or the oracle: they see a case's spec and tensors only. Otherwise a wiring fault in the
chain would be shared by both sides and never be seen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from diffgrad.case import Case
from diffgrad.specs import BLOCKS, Spec
from diffgrad.trace import Arrays, Outcome, Trace

Tap = Callable[[str, Any], Any]
"""tap(site, value) -> value: names an activation, so that its value and its cotangent are recorded."""


class Unsupported(NamedTuple):
    """A documented limit of a framework: which cases it refuses, and why."""

    applies: Callable[[Case], bool]
    reason: str


class Adapter(ABC):
    """One framework. Subclasses add one method per block, named as the block is."""

    name: ClassVar[str]
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the framework and what it computes with."""

    def devices(self) -> tuple[str, ...]:
        """The devices that the framework sees."""
        return ("cpu",)

    @abstractmethod
    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        """Run the block forward and backward; return the trace and the CPU seconds spent inside the framework."""

    def block(self, spec: Spec) -> Callable[..., Any]:
        """The method that holds this block's forward."""
        return getattr(self, spec.kind)  # type: ignore[no-any-return]

    def run_blocks(self, blocks: Iterable[tuple[str, Spec]], names: Iterable[str], t: Any, tap: Tap) -> Any:
        """A net's blocks one after another, each with its own tensors (by prefix) and its output tapped by name."""
        v = t["x"]
        for (prefix, spec), name in zip(blocks, names, strict=True):
            own = {k.removeprefix(prefix): p for k, p in t.items() if k.startswith(prefix)} | {"x": v}
            v = self.block(spec)(spec, own, partial(_prefixed, tap, prefix))
            v = v if name == "out" else tap(name, v)  # the output's cotangent is given
        return v

    def refusal(self, case: Case) -> str:
        """Why the framework cannot run this case, or an empty string."""
        return next((u.reason for u in self.unsupported if u.applies(case)), "")

    def run(self, case: Case) -> Outcome:
        """Run a case; an exception where a result is due is an outcome of status ``error``."""
        refusal = self.refusal(case)
        if refusal:
            return Outcome("unsupported", reason=refusal)
        tensors = case.tensors()
        try:
            trace, cpu_s = self.trace(case, tensors)
        except Exception as e:  # whatever a framework raises where a result is due is a finding, and kept whole
            return Outcome("error", reason=f"{type(e).__name__}: {e}")
        return Outcome("ok", trace, cpu_s=cpu_s)


def _prefixed(tap: Tap, prefix: str, site: str, v: Any) -> Any:
    return tap(prefix + site, v)


class Stopwatch:
    """CPU seconds of this process, all threads, between entering and leaving."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.process_time() - self._start


def missing_blocks(adapter: type[Adapter]) -> list[str]:
    """Blocks of the table for which an adapter has no method."""
    return [name for name in BLOCKS if not callable(getattr(adapter, name, None))]
