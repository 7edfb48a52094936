"""Batch separability: where no op couples examples, a batch is its examples one by one (FORMULAS section 4).

A metamorphic property: the framework's batched run against its own single-example runs, inputs stacked, parameters
summed. It must hold for ConvNeXt, whose layer norms look at one example, and fail for batch norms.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from diffgrad.bars import PRECISIONS, Array
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.oracle import Expected, end_to_end
from diffgrad.specs import Drop
from diffgrad.trace import Trace
from diffgrad.worker import Runner


def single_examples(case: Case) -> Iterator[Case]:
    """One case per example of a batched case: same parameters, that example's input, cotangent and drop flag."""
    spec, tensors = case.block, case.tensors()
    for i in range(spec.n):
        changes: dict[str, object] = {"n": 1}
        drop = getattr(spec, "drop", None)
        if drop is not None:
            changes["drop"] = Drop(drop.keep, (drop.kept[i],))
        slices = {name: dict(enumerate(tensors[name][i].ravel().tolist())) for name in (spec.input().name, "dy")}
        overrides = {name: {str(k): v for k, v in flat.items()} for name, flat in slices.items()}
        yield msgspec.structs.replace(case, block=msgspec.structs.replace(spec, **changes), overrides=overrides)


def coupled(case: Case, runner: Runner, adapter: str) -> list[str]:
    """What differs between the batched run and the runs one by one, in words; empty where they separate.

    Two correct runs differ by at most the sum of their end-to-end bars. Use float64, where those are narrow.
    """
    alone = list(single_examples(case))
    traces = {a.case: a.outcome.trace for a in runner.run([case, *alone], [adapter], quick=False)}
    whole, parts = traces[case], [traces[c] for c in alone]
    if whole is None or any(t is None for t in parts):
        return ["a run gave no trace"]
    singles = [t for t in parts if t is not None]
    bars = [_bars(c) for c in (case, *alone)]
    x = case.block.input().name
    out = []
    for i, t in enumerate(singles):
        if _apart(whole.acts["out"][i], t.acts["out"][0], "acts", "out", bars, i):
            out.append(f"output of example {i}")
        if x in whole.cots and _apart(whole.cots[x][i], t.cots[x][0], "cots", x, bars, i):
            out.append(f"input cotangent of example {i}")
    return out + [f"gradient {node}" for node in whole.grads if _sum_apart(node, whole, singles, bars)]


def _bars(case: Case) -> Expected:
    return end_to_end(chain_of(case.block), case.tensors(), PRECISIONS[case.dtype])


def _apart(a: Array, b: Array, part: str, name: str, bars: list[Expected], i: int) -> bool:
    together, alone = getattr(bars[0], part)[name].err[i], getattr(bars[1 + i], part)[name].err[0]
    return not bool((np.abs(a.astype(np.float64) - b) <= together + alone).all())


def _sum_apart(node: str, whole: Trace, singles: list[Trace], bars: list[Expected]) -> bool:
    total = np.sum([t.grads[node].astype(np.float64) for t in singles], axis=0)
    allowed = np.sum([b.grads[node].err for b in bars], axis=0)
    return not bool((np.abs(whole.grads[node] - total) <= allowed).all())
