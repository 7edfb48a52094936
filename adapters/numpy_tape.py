"""A small reverse-mode tape. In a 16-bit format it holds numbers in float32 and rounds them to the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]


@dataclass(eq=False)
class Var:
    """A value on the tape: its parents, and the map from its cotangent to theirs.

    ``half`` is the 16-bit format of a run in one. Every value and cotangent is then a float32 array of numbers of that
    format: a primitive computes and sums in float32, and its result is rounded once, where it goes on the tape.
    """

    value: Floats
    parents: tuple[Var, ...] = ()
    pull: Callable[[Floats], tuple[Floats, ...]] = lambda dy: ()
    cot: Floats | None = field(default=None)
    half: np.dtype[Any] | None = None

    def __post_init__(self) -> None:
        if self.half is None and self.parents:
            self.half = self.parents[0].half
        self.value = self.rounded(self.value)

    def rounded(self, v: Floats) -> Floats:
        """``v`` as the tape holds it."""
        return v if self.half is None else v.astype(self.half).astype(np.float32)

    def delivered(self, v: Floats) -> Floats:
        """``v``, which the tape holds, in the run's own dtype."""
        return v if self.half is None else v.astype(self.half)


def leaf(v: Floats) -> Var:
    """A given tensor on the tape."""
    return Var(v.astype(np.float32), half=v.dtype) if v.dtype.itemsize == 2 else Var(v)


def backward(out: Var, dy: Floats) -> None:
    """Accumulate cotangents from ``out`` to everything it depends on; ``dy`` is as the tape holds it."""
    order: list[Var] = []
    seen: set[int] = set()

    def visit(v: Var) -> None:
        if id(v) not in seen:
            seen.add(id(v))
            for parent in v.parents:
                visit(parent)
            order.append(v)

    visit(out)
    out.cot = dy
    for v in reversed(order):
        if v.cot is None:
            continue
        for parent, g in zip(v.parents, v.pull(v.cot), strict=True):
            own = parent.rounded(g)
            parent.cot = own if parent.cot is None else parent.rounded(parent.cot + own)
