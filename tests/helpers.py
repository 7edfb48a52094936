"""What several test modules need: paths, one ordinary case a block, and small constructions on traces."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.adapters.numpy import NumpyAdapter
from diffgrad.case import Case, Dtype
from diffgrad.corpus import Entry, Signature, Status
from diffgrad.specs import BLOCKS, Drop, MobileNetV4Spec, Spec, UibSpec
from diffgrad.specs.mobilenetv4_net import Row
from diffgrad.strategies import sample
from diffgrad.strategies.blocks import SPECS
from diffgrad.trace import Trace
from diffgrad.values import Values

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "corpus"
KINDS = tuple(BLOCKS)

UIB = Case(
    block=UibSpec(n=2, h=3, w=4, c=2, expand=2, pre_k=3, post_k=5, drop=Drop(0.5, (True, False))),
    values=Values(seed=1),
)
"""A literal case with every optional part, for tests that quote its sites and nodes."""

NET = MobileNetV4Spec(
    n=4,
    h=16,
    w=16,
    rows=(Row(4, 4, 2, 3, 3), Row(4, 6, 2, 3, 5, 2)),
    image=3,
    stem=4,
    fused=6,
    mid=8,
    oc=8,
    classes=5,
)
"""A literal net, small and well conditioned."""

SMALLEST = Case(block=UibSpec(n=1, h=1, w=2, c=1))
"""A literal case that costs next to nothing and runs everywhere."""

_MANY = 20_000


@cache
def specs(kind: str, count: int = 40) -> tuple[Spec, ...]:
    """Drawn specs of one block, the same ones every time."""
    return tuple(sample(SPECS[kind](), count, key=0))


def extent(spec: Spec) -> tuple[int, ...]:
    """Height and width of a block's map, or its number of tokens, or of classes."""
    shape = spec.input().shape
    return shape[2:] if len(shape) == 4 else shape[1:2]


@cache
def ordinary(kind: str, dtype: Dtype = "float32") -> Case:
    """One case of a block with most of its optional parts, sizes above 1, normal values and no gradient of only 0.

    Its products take operands as they are, so that it is the same block in both precisions.
    """

    def fullness(spec: Spec) -> tuple[bool, bool, int, int]:
        elements = sum(int(np.prod(t.shape)) for t in spec.tensors())
        return elements < _MANY, spec.n > 1 < math.prod(extent(spec)), len(spec.tensors()), -elements

    ranked = sorted((s for s in specs(kind) if not getattr(s, "bf16", False)), key=fullness, reverse=True)
    drawn = [Case(block=s, dtype=dtype, values=Values(seed=1)) for s in ranked]  # type: ignore[arg-type]
    return next(case for case in drawn if all(g.any() for g in run_numpy(case).grads.values()))


@cache
def run_numpy(case: Case) -> Trace:
    """The case in the same-precision reference."""
    return NumpyAdapter().trace(case, case.tensors())[0]


def altered(trace: Trace, what: str, name: str, array: NDArray[Any] | None) -> Trace:
    """The trace with one array replaced, or taken out (None). ``what`` is activation, cotangent or gradient."""
    field = {"activation": "acts", "cotangent": "cots", "gradient": "grads"}[what]
    arrays = {k: v for k, v in getattr(trace, field).items() if k != name}
    return msgspec.structs.replace(trace, **{field: arrays if array is None else arrays | {name: array}})


def poked(array: NDArray[Any], value: float, index: tuple[int, ...] | None = None) -> NDArray[Any]:
    """A copy with one element replaced, the first by default."""
    copy = array.copy()
    copy[(0,) * copy.ndim if index is None else index] = value
    return copy


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter at the repository's root."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def entry(case: Case = SMALLEST, status: Status = "open", **signature: str) -> Entry:
    """A corpus entry of the reference adapter; keywords replace fields of its signature."""
    fields = {"adapter": "numpy", "mode": "eager", "dtype": case.dtype, "link": "batchnorm"}
    fields |= {"verdict": "wrong", "condition": "gradient"}
    return Entry(
        case=case,
        signature=Signature(**fields | signature),
        status=status,
        sentence="wrong at batchnorm@pn: gradient pg[0]: got 1, expected 2, error 1, bar 1e-06",
        versions={"numpy": "2.0"},
    )
