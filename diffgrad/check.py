"""The check: a recorded run against the oracle, link by link and end to end, with a verdict for every quantity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import LOOSER_PRECISIONS, PRECISIONS, Bounded, Precision, quiet, recorded, scale
from diffgrad.chains import Chain, Link
from diffgrad.chains.base import with_ops
from diffgrad.ops import Op
from diffgrad.oracle import Expected, Key, Tensors, Walk, end_to_end
from diffgrad.trace import Trace

FAULTS = ("wrong", "nonfinite")
"""Verdicts that are faults of the run, worst last."""


class Quantity(msgspec.Struct, frozen=True):
    """One compared array and its verdict.

    Attributes:
        link: the link that is answerable, as ``op@site`` (``batchnorm@qn``); several joined by + at a fan-in.
        what: ``activation``, ``cotangent``, ``gradient``, ``update`` or ``tangent``; of a bare run, with that word.
        name: the site (activation), the documents' cotangent name, or the parameter node.
        verdict: ok | lossy:<model> | wrong | nonfinite | vacuous.
        defect: what is wrong beyond the numbers: ``missing``, ``shape``, ``dtype`` or ``stray``; empty otherwise.
        note: the defect in words.
        index, got, expected, error, bar: the element with the worst error/bar.
        ratio: worst error/bar over elements with a finite, non-zero bar.
        elements, vacuous: how many elements were compared, and how many prove nothing.
    """

    link: str
    what: str
    name: str
    verdict: str
    defect: str = ""
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

    def bare_of(self, chain: Chain) -> str:
        """The key of this quantity in ``Trace.bare``, if it is one that a bare run delivers."""
        inner = self.what == "activation" and self.name != chain.output
        inner = inner or (self.what == "cotangent" and self.name != chain.input_cotangent)
        return "" if inner else {chain.output: "out", chain.input_cotangent: chain.input}.get(self.name, self.name)

    def sentence(self) -> str:
        """The verdict in words: which link, which quantity, where, got, expected, error and bar."""
        head = f"{self.verdict} at {self.link}: {self.what} {self.name}"
        if self.note:
            return f"{head}: {self.note}"
        where = ",".join(map(str, self.index))
        got, expected = f"{self.got:.9g}", f"{self.expected:.9g}"
        if got == expected:
            got, expected = f"{self.got:.17g}", f"{self.expected:.17g}"
        return f"{head}[{where}]: got {got}, expected {expected}, error {self.error:.3g}, bar {self.bar:.3g}"


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


def check_run(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    dtype: str,
    compiled: bool = False,
    whole: Callable[[], Expected] | None = None,
    lr: float = 0.0,
    without: Collection[str] = (),
) -> Report:
    """Check a recorded run: link by link in its own precision and, in float64, end to end as well.

    Args:
        chain: the block's chain.
        tensors: the case's tensors in the run's dtype.
        trace: what the adapter returned.
        dtype: the run's, a row of PRECISIONS.
        compiled: True for modes in which a compiler may recompute a producer inside its consumer.
        whole: gives the end-to-end expectation, if the caller has it already (it is the same for every framework).
        lr: the learning rate of the SGD step after the backward; 0 if there is none.
        without: looser models that this run cannot have used, so that they excuse nothing.
    """
    p = PRECISIONS[dtype]
    report = check_links(chain, tensors, trace, p, compiled, without)
    report = Report(report.quantities + tuple(_steps(chain, tensors, trace, p, lr)), report.links, report.nodes)
    if dtype == "float64" and report.verdict in ("ok", "vacuous"):
        compared = partial(_whole, chain, trace, p)
        quantities = compared(whole() if whole is not None else end_to_end(chain, tensors, p))
        named = _name_looser_whole(chain, tensors, trace, p, quantities, compared, without)
        return Report((*report.quantities, *named), report.links, report.nodes)
    return report


def check_bare(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    p: Precision,
    whole: Callable[[], Expected],
    without: Collection[str] = (),
) -> list[Quantity]:
    """The second run, which exposed nothing but its inputs and outputs, against the observed one and end to end.

    An array that is the observed one bit by bit has been checked already; any other must lie within the end-to-end
    bars. Of a net, those may promise nothing.
    """
    observed = {"out": trace.acts.get("out")} | {k: trace.cots.get(k) for k in (chain.input,)} | trace.grads
    same = {k for k, v in trace.bare.items() if _same(v, observed.get(k))}
    wanted = {"out", *chain.nodes} | ({chain.input} if chain.input_cotangent else set())
    if wanted <= same:
        return []
    bare = Trace(
        acts={k: v for k, v in trace.bare.items() if k == "out"},
        cots={k: v for k, v in trace.bare.items() if k == chain.input},
        grads={k: v for k, v in trace.bare.items() if k not in ("out", chain.input)},
    )

    def compared(expected: Expected) -> list[Quantity]:
        return [q for q in _whole(chain, bare, p, expected) if q.bare_of(chain) in wanted - same]

    quantities = _name_looser_whole(chain, tensors, trace, p, compared(whole()), compared, without)
    return [msgspec.structs.replace(q, what=f"bare {q.what}") for q in quantities]


def _same(a: NDArray[Any], b: NDArray[Any] | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_links(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    p: Precision,
    compiled: bool = False,
    without: Collection[str] = (),
) -> Report:
    """Each link alone, on the framework's own recorded inputs."""

    def links(precision: Precision, ops: Mapping[str, Op]) -> list[Quantity]:
        return _links(Walk(chain, tensors, precision, trace, compiled, ops), chain, trace, p)

    named = name_looser(chain, tensors, trace, p, links(p, {}), links, without)
    return Report((*named, *_strays(chain, trace)), len(chain.links), len(chain.nodes))


def _steps(chain: Chain, tensors: Tensors, trace: Trace, p: Precision, lr: float) -> list[Quantity]:
    """theta - lr*g of every parameter, on the gradient that the framework delivered."""
    if not lr:
        return [
            Quantity(f"sgd@{name}", "update", name, "wrong", "stray", "delivered, but the case has no step")
            for name in trace.updates
        ]
    rows = []
    for node in chain.nodes:
        theta, g = tensors[node], trace.grads.get(node)
        if g is None or g.shape != theta.shape:
            continue  # its absence is reported as the gradient's
        with quiet():
            move = scale(recorded(g.astype(np.float64), p), lr, roundings=2.0)  # lr itself is rounded, too
            expected = recorded(theta.astype(np.float64), p) - move
        rows.append(Row(f"sgd@{node}", "update", node, trace.updates.get(node), expected))
    return compare(rows, p)


class Row(NamedTuple):
    """One quantity to compare."""

    link: str
    what: str
    name: str
    got: NDArray[Any] | None
    expected: Bounded


def _links(walk: Walk, chain: Chain, trace: Trace, p: Precision) -> list[Quantity]:
    compared = _Comparison(chain, trace, p)
    walk.each(compared)
    return compared.quantities()


def _whole(chain: Chain, trace: Trace, p: Precision, expected: Expected) -> list[Quantity]:
    compared = _Comparison(chain, trace, p)
    expected.each(chain, compared)
    return compared.quantities()


_GROUP = 2**16


class _Comparison:
    """Compares what it is given with what a run delivered: small arrays together, to save calls; large ones at once."""

    def __init__(self, chain: Chain, trace: Trace, p: Precision) -> None:
        self._trace, self._p = trace, p
        self._names = chain.cotangents()
        self._writers = {link.writes: link.title for link in chain.links}
        self._readers = {
            site: "+".join(link.title for link in chain.links if site in link.reads) for site in self._names
        }
        self._feeders = {node: link.title for link in chain.links for node in link.feeds}
        self._rows: list[Row] = []
        self._elements = 0
        self._done: list[Quantity] = []

    def __call__(self, key: Key, expected: Bounded) -> None:
        part, name = key
        match part:
            case "acts":
                row = Row(self._writers[name], "activation", name, self._trace.acts.get(name), expected)
            case "cots":
                # The cotangent at a site is the work of the links that read the site.
                row = Row(self._readers[name], "cotangent", self._names[name], self._trace.cots.get(name), expected)
            case _:
                row = Row(self._feeders[name], "gradient", name, self._trace.grads.get(name), expected)
        self._rows.append(row)
        self._elements += expected.val.size
        if self._elements > _GROUP:
            self._compare()

    def _compare(self) -> None:
        self._done += compare(self._rows, self._p)
        self._rows, self._elements = [], 0

    def quantities(self) -> list[Quantity]:
        """The verdict on each array, in the order in which they were given."""
        self._compare()
        return self._done


def _strays(chain: Chain, trace: Trace) -> list[Quantity]:
    """What a run delivered though the chain has no such site or node: a part that should not have run."""
    sites = set(chain.cotangents())
    written = {link.writes for link in chain.links}
    known = {"activation": written, "cotangent": sites - {chain.output}, "gradient": set(chain.nodes)}
    got = {"activation": trace.acts, "cotangent": trace.cots, "gradient": trace.grads}
    return [
        Quantity("block", what, name, "wrong", "stray", "delivered, but this block has none")
        for what in known
        for name in got[what]
        if name not in known[what]
    ]


def compare(rows: Sequence[Row], p: Precision) -> list[Quantity]:
    """Delivered arrays against their expected values and bars. NaN is never within a finite bar.

    All comparable rows are laid end to end and compared in one go; only the worst element of each is looked at singly.
    """
    refused = [_refusal(row, p) for row in rows]
    judged = iter(_judge([row for row, no in zip(rows, refused, strict=True) if no is None]))
    return [no if no is not None else next(judged) for no in refused]


def _refusal(row: Row, p: Precision) -> Quantity | None:
    """The verdict on an array that cannot even be compared; None where it can."""
    got, shape = row.got, row.expected.val.shape
    if got is None:
        defect, note = "missing", "not delivered (None or missing)"
    elif got.shape != shape:
        defect, note = "shape", f"shape {got.shape}, expected {shape}"
    elif got.dtype.name != p.name:
        defect, note = "dtype", f"dtype {got.dtype.name}, expected {p.name}"
    elif not got.size:
        return Quantity(row.link, row.what, row.name, "ok")
    else:
        return None
    return Quantity(row.link, row.what, row.name, "wrong", defect, note)


def _judge(rows: Sequence[Row]) -> list[Quantity]:
    if not rows:
        return []
    sizes = [row.expected.val.size for row in rows]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    got = np.concatenate([np.asarray(row.got, np.float64).reshape(-1) for row in rows])
    val = np.concatenate([row.expected.val.reshape(-1) for row in rows])
    bar = np.concatenate([row.expected.err.reshape(-1) for row in rows])
    reach = np.concatenate([row.expected.reach.reshape(-1) for row in rows])
    with quiet():
        error = np.abs(got - val)
        bound = np.isfinite(bar)
        bad = bound & ~(error <= bar)
        nonfinite = bound & ~np.isfinite(got)
        empty = ~(bar < np.abs(val)) & ~(bar < reach) & (bar > 0)
        ratio = np.where(bound & (error > 0), error / bar, 0.0)
    rank = np.where(nonfinite, np.inf, ratio)
    worst = np.maximum.reduceat(rank, starts)
    any_bad = np.logical_or.reduceat(bad, starts)
    any_nonfinite = np.logical_or.reduceat(nonfinite, starts)
    vacuous = np.add.reduceat(empty, starts, dtype=np.int64)
    out: list[Quantity] = []
    for i, row in enumerate(rows):
        flat = slice(starts[i], starts[i] + sizes[i])
        at = int(starts[i] + np.argmax(rank[flat]))
        if any_nonfinite[i]:
            verdict = "nonfinite"
        elif any_bad[i]:
            verdict = "wrong"
        else:
            verdict = "vacuous" if vacuous[i] == sizes[i] else "ok"
        out.append(
            Quantity(
                link=row.link,
                what=row.what,
                name=row.name,
                verdict=verdict,
                index=tuple(int(j) for j in np.unravel_index(at - starts[i], row.expected.val.shape)),
                got=float(got[at]),
                expected=float(val[at]),
                error=float(error[at]),
                bar=float(bar[at]),
                ratio=float(worst[i]),
                elements=sizes[i],
                vacuous=int(vacuous[i]),
            )
        )
    return out


def name_looser(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    p: Precision,
    quantities: list[Quantity],
    again: Callable[[Precision, Mapping[str, Op]], list[Quantity]],
    without: Collection[str],
) -> list[Quantity]:
    """Where named cheaper algorithms explain all that a link (or the links of a fan-in) delivered, say
    ``lossy:<model>`` instead. Each model is tried on all faulty links at once: links are checked on what was recorded.

    Args:
        chain, tensors, trace, p: the run.
        quantities: what the tight bars say of it.
        again: the same with another precision, and other ops at some sites.
        without: models that this run cannot have used.
    """
    left = {q.link for q in quantities if q.faulty}
    titles = {link.writes: link.title for link in chain.links}
    answerable = [link for link in chain.links if any(link.title in name.split("+") for name in left)]
    found = {link.writes: _models_at(link, tensors, trace, p, quantities) for link in answerable}
    renamed = list(quantities)
    for model, looser, ops in _ways(found, p, without):
        having = {titles[site] for site in ops or found}
        tried = {link for link in left if having & set(link.split("+"))}
        if not tried:
            continue
        left -= tried - {q.link for q in again(looser, ops) if q.faulty}
        for i, q in enumerate(quantities):
            if q.faulty and q.link in tried - left:
                renamed[i] = msgspec.structs.replace(q, verdict=f"lossy:{model}")
    return renamed


def _name_looser_whole(
    chain: Chain,
    tensors: Tensors,
    trace: Trace,
    p: Precision,
    quantities: list[Quantity],
    compared: Callable[[Expected], list[Quantity]],
    without: Collection[str],
) -> list[Quantity]:
    """The same end to end, where what a cheaper algorithm loses may show though no link of its own could tell."""
    if not any(q.faulty for q in quantities):
        return quantities
    found = {link.writes: _models_at(link, tensors, trace, p, quantities) for link in chain.links}
    for model, looser, ops in _ways(found, p, without):
        cheaper = replace(chain, links=with_ops(chain.links, **ops))
        if any(q.faulty for q in compared(end_to_end(cheaper, tensors, looser))):
            continue
        return [msgspec.structs.replace(q, verdict=f"lossy:{model}") if q.faulty else q for q in quantities]
    return quantities


def _ways(
    found: Mapping[str, Mapping[str, Op]], p: Precision, without: Collection[str]
) -> Iterator[tuple[str, Precision, dict[str, Op]]]:
    """Every cheaper algorithm at hand, by name: with the ops that it puts at some sites, or a precision for all."""
    for model in dict.fromkeys(name for models in found.values() for name in models):
        if model in without:
            continue
        yield model, p, {site: models[model] for site, models in found.items() if model in models}
    for model, precision in LOOSER_PRECISIONS.items():
        looser = precision(p)
        if looser is not None and model not in without:
            yield model, looser, {}


def _models_at(
    link: Link, tensors: Tensors, trace: Trace, p: Precision, quantities: Sequence[Quantity]
) -> dict[str, Op]:
    """The looser models that a link's recorded output suggests."""
    misshapen = {q.name for q in quantities if q.what == "activation" and q.defect == "shape"}
    held = {**tensors, **{site: v for site, v in trace.acts.items() if site not in misshapen}}
    wanted = [*link.reads, *link.feeds, *link.constants, link.writes]
    if any(name not in held for name in wanted):
        return {}
    *given, y = (recorded(held[name].astype(np.float64), p) for name in wanted)
    with quiet():
        return link.op.looser(tuple(given[: len(link.reads)]), tuple(given[len(link.reads) :]), y)
