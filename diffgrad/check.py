"""The check: a recorded run against the oracle, link by link and end to end, with a verdict for every quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import PRECISIONS, Bounded, Precision, quiet
from diffgrad.chains import Chain, Link
from diffgrad.oracle import Expected, Tensors, Walk
from diffgrad.trace import Trace

FAULTS = ("wrong", "nonfinite")
"""Verdicts that are faults of the run, worst last."""


class Quantity(msgspec.Struct, frozen=True):
    """One compared array and its verdict.

    Attributes:
        link: the link that is answerable, as ``op@site`` (``batchnorm@qn``); several joined by + at a fan-in.
        what: ``activation``, ``cotangent`` or ``gradient``.
        name: the site (activation), the documents' cotangent name, or the parameter node.
        verdict: ok | lossy:<model> | wrong | nonfinite | vacuous.
        note: in words, what is wrong beyond the numbers (missing, shape, dtype); empty otherwise.
        index, got, expected, error, bar: the element with the worst error/bar.
        ratio: worst error/bar over elements with a finite, non-zero bar.
        elements, vacuous: how many elements were compared, and how many prove nothing.
    """

    link: str
    what: str
    name: str
    verdict: str
    note: str = ""
    index: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    error: float = 0.0
    bar: float = 0.0
    ratio: float = 0.0
    elements: int = 0
    vacuous: int = 0

    @property
    def faulty(self) -> bool:
        """True for wrong and nonfinite."""
        return self.verdict in FAULTS

    def sentence(self) -> str:
        """The verdict in words: which link, which quantity, where, got, expected, error and bar."""
        head = f"{self.verdict} at {self.link}: {self.what} {self.name}"
        if self.note:
            return f"{head}: {self.note}"
        where = ",".join(map(str, self.index))
        return (
            f"{head}[{where}]: got {self.got:.9g}, expected {self.expected:.9g}, "
            f"error {self.error:.3g}, bar {self.bar:.3g}"
        )


@dataclass(frozen=True)
class Report:
    """Every quantity of one run, in blame order: forward links first, then backward from the output."""

    quantities: tuple[Quantity, ...]
    links: int
    """Links evaluated."""
    nodes: int
    """Parameter-gradient nodes compared."""

    @property
    def first_fault(self) -> Quantity | None:
        """The first faulty quantity: the link to blame."""
        return next((q for q in self.quantities if q.faulty), None)

    @property
    def verdict(self) -> str:
        """The run's verdict: the first fault, else the first lossy link, else vacuous (if all is), else ok."""
        fault = self.first_fault
        if fault is not None:
            return fault.verdict
        lossy = next((q.verdict for q in self.quantities if q.verdict.startswith("lossy")), None)
        if lossy is not None:
            return lossy
        return "vacuous" if all(q.verdict == "vacuous" for q in self.quantities) else "ok"

    @property
    def elements(self) -> int:
        return sum(q.elements for q in self.quantities)

    @property
    def vacuous(self) -> int:
        return sum(q.vacuous for q in self.quantities)

    @property
    def worst_ratio(self) -> float:
        """Worst error/bar over all quantities."""
        return max((q.ratio for q in self.quantities), default=0.0)


def check_run(chain: Chain, tensors: Tensors, trace: Trace, dtype: str, compiled: bool = False) -> Report:
    """Check a recorded run: link by link in its own precision and, in float64, end to end as well.

    Args:
        chain: the block's chain.
        tensors: the case's tensors in the run's dtype.
        trace: what the adapter returned.
        dtype: ``float32`` or ``float64``.
        compiled: True for modes in which a compiler may recompute a producer inside its consumer.
    """
    p = PRECISIONS[dtype]
    report = check_links(chain, tensors, trace, p, compiled)
    if dtype == "float64" and report.first_fault is None:
        whole = check_end_to_end(chain, tensors, trace, p)
        return Report(report.quantities + whole.quantities, report.links, report.nodes)
    return report


def check_links(chain: Chain, tensors: Tensors, trace: Trace, p: Precision, compiled: bool = False) -> Report:
    """Each link alone, on the framework's own recorded inputs."""
    expected = Walk(chain, tensors, p, trace, compiled).run()
    quantities = _compare_all(chain, expected, trace, p)
    return Report(tuple(_name_looser(chain, tensors, trace, p, compiled, quantities)), len(chain.links), len(chain.nodes))


def check_end_to_end(chain: Chain, tensors: Tensors, trace: Trace, p: Precision) -> Report:
    """The whole chain from the case's inputs, with propagated bars."""
    expected = Walk(chain, tensors, p).run()
    quantities = _compare_all(chain, expected, trace, p)
    return Report(tuple(quantities), 0, 0)


def _compare_all(chain: Chain, expected: Expected, trace: Trace, p: Precision) -> list[Quantity]:
    cot_names = chain.cotangents()
    out = [
        compare(_title(link), "activation", link.writes, trace.acts.get(link.writes), expected.acts[link.writes], p)
        for link in chain.links
    ]
    for link in reversed(chain.links):
        if link.writes != chain.output:
            out.append(_cotangent(chain, expected, trace, link.writes, cot_names, p))
        out += [
            compare(_title(link), "gradient", node, trace.grads.get(node), expected.grads[node], p)
            for node in link.feeds
        ]
    out.append(_cotangent(chain, expected, trace, chain.input, cot_names, p))
    return out


def _cotangent(
    chain: Chain, expected: Expected, trace: Trace, site: str, names: dict[str, str], p: Precision
) -> Quantity:
    """The cotangent at a site is the work of the links that read the site."""
    blame = "+".join(_title(link) for link in chain.links if site in link.reads)
    return compare(blame, "cotangent", names[site], trace.cots.get(site), expected.cots[site], p)


def _title(link: Link) -> str:
    return f"{link.op.name}@{link.writes}"


def compare(link: str, what: str, name: str, got: NDArray[Any] | None, expected: Bounded, p: Precision) -> Quantity:
    """One delivered array against its expected value and bar. NaN is never within a finite bar."""
    if got is None:
        return Quantity(link, what, name, "wrong", note="not delivered (None or missing)")
    if got.shape != expected.val.shape:
        return Quantity(link, what, name, "wrong", note=f"shape {got.shape}, expected {expected.val.shape}")
    if got.dtype.name != p.name:
        return Quantity(link, what, name, "wrong", note=f"dtype {got.dtype.name}, expected {p.name}")
    if got.size == 0:
        return Quantity(link, what, name, "ok")
    g = got.astype(np.float64)
    bar = expected.err
    with quiet():
        error = np.abs(g - expected.val)
        judged = np.isfinite(bar)
        bad = judged & ~(error <= bar)
        ratio = np.where(judged & (bar > 0), error / bar, 0.0)
    nonfinite = judged & ~np.isfinite(g)
    empty = ~(bar < np.abs(expected.val)) & (bar > 0)
    rank = np.where(nonfinite, np.inf, np.where(bad & (bar == 0), np.inf, ratio))
    at = np.unravel_index(int(np.argmax(np.where(bad, rank + 1.0, ratio))), g.shape)
    if nonfinite.any():
        verdict = "nonfinite"
    elif bad.any():
        verdict = "wrong"
    else:
        verdict = "vacuous" if empty.all() else "ok"
    finite_ratio = ratio[np.isfinite(ratio)]
    return Quantity(
        link=link,
        what=what,
        name=name,
        verdict=verdict,
        index=tuple(int(i) for i in at),
        got=float(g[at]),
        expected=float(expected.val[at]),
        error=float(error[at]),
        bar=float(bar[at]),
        ratio=float(finite_ratio.max()) if finite_ratio.size else 0.0,
        elements=g.size,
        vacuous=int(empty.sum()),
    )


def _name_looser(
    chain: Chain, tensors: Tensors, trace: Trace, p: Precision, compiled: bool, quantities: list[Quantity]
) -> list[Quantity]:
    """Where a fault fits a named cheaper algorithm of its op, say ``lossy:<model>`` instead."""
    blamed = {q.link for q in quantities if q.faulty and not q.note}
    named = dict.fromkeys(range(len(quantities)), "")
    for link in chain.links:
        if _title(link) not in blamed:
            continue
        for model, op in link.op.looser().items():
            wider = Walk(chain, tensors, p, trace, compiled, {link.writes: op}).run()
            for i, q in enumerate(_compare_all(chain, wider, trace, p)):
                if quantities[i].link == _title(link) and quantities[i].faulty and not q.faulty and not named[i]:
                    named[i] = model
    return [
        msgspec.structs.replace(q, verdict=f"lossy:{named[i]}") if named[i] else q for i, q in enumerate(quantities)
    ]
