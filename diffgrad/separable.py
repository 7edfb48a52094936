"""Batch separability: where no op couples examples, a batch is its examples one by one (FORMULAS section 4).

A metamorphic property: the framework's batched run against its own single-example runs, inputs stacked, parameters
summed. It must hold for ConvNeXt and ViT, whose layer norms look at one example, and fail for batch norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from diffgrad.bars import PRECISIONS, Array
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.oracle import Expected, end_to_end
from diffgrad.specs import Drop, Sites
from diffgrad.trace import Trace
from diffgrad.worker import Runner


def single_examples(case: Case) -> Iterator[Case]:
    """One case per example of a batched case: same parameters, that example's input, cotangent and drop flags."""
    for i in range(case.block.n):
        yield _chosen(case, [i])


def _chosen(case: Case, examples: list[int]) -> Case:
    """The case of some of a case's examples, in that order."""
    spec, tensors = case.block, case.tensors()
    changes = {f: _flags(getattr(spec, f), examples) for f in spec.__struct_fields__ if f.startswith("drop")}
    block = msgspec.structs.replace(spec, n=len(examples), **changes)
    slices = {name: tensors[name][examples].ravel().tolist() for name in (spec.input().name, "dy")}
    overrides = {name: {str(k): v for k, v in enumerate(flat)} for name, flat in slices.items()}
    return msgspec.structs.replace(case, block=block, overrides=overrides)


def _flags(field: Any, examples: list[int]) -> Any:
    """A spec's drop field (a site, a block's two, or those of several blocks) for some of its examples."""
    match field:
        case Drop(keep, kept):
            return Drop(keep, tuple(kept[i] for i in examples))
        case Sites(a, m):
            return Sites(_flags(a, examples), _flags(m, examples))
        case tuple():
            return tuple(_flags(sites, examples) for sites in field)
    return field


def ordered(case: Case, runner: Runner, adapter: str) -> list[str]:
    """What depends on the order of the examples, in words: reversing them must reverse outputs and input cotangents.

    The two runs may differ by their end-to-end bars. Use float64, where those are narrow.
    """
    there = list(reversed(range(case.block.n)))
    turned = _chosen(case, there)
    traces = {a.case: a.outcome.trace for a in runner.run([case, turned], [adapter], quick=True)}
    first, second = traces[case], traces[turned]
    if first is None or second is None:
        return ["a run gave no trace"]
    bars, x, out = [_bars(case), _bars(turned)], case.block.input().name, []
    for part, name in (("acts", "out"), ("cots", x)):
        if name not in getattr(first, part):
            continue
        a, b = getattr(first, part)[name], getattr(second, part)[name][there]
        allowed = getattr(bars[0], part)[name].err + getattr(bars[1], part)[name].err[there]
        if not (np.abs(a.astype(np.float64) - b) <= allowed).all():
            out.append({"acts": "output", "cots": "input cotangent"}[part])
    return out


def coupled(case: Case, runner: Runner, adapter: str) -> list[str]:
    """What differs between the batched run and the runs one by one, in words; empty where they separate.

    Two correct runs differ by at most the sum of their end-to-end bars. Use float64, where those are narrow.
    """
    alone = list(single_examples(case))
    traces = {a.case: a.outcome.trace for a in runner.run([case, *alone], [adapter], quick=True)}
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
