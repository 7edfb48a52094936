"""The oracle: walks a chain in float64 and says, for every site and node, the value and its bar.

Two ways of walking share one loop. *End to end*, each link reads what the previous link's formula gave, and bars
propagate. *Link by link*, each link reads what the framework recorded, so that nothing accumulates and a fault shows at
the very link that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import Array, Bounded, Precision, add, gamma, quiet, recorded, settle
from diffgrad.chains import Chain, Link
from diffgrad.ops import Copy, Op
from diffgrad.trace import Trace

Tensors = Mapping[str, NDArray[Any]]

Key = tuple[str, str]
"""What a walk gives a value for: ("acts", site), ("cots", site) or ("grads", node)."""


@dataclass(frozen=True)
class Expected:
    """What the formulas give: activations by site, cotangents by site, gradients by node, each with its bar."""

    acts: dict[str, Bounded] = field(default_factory=dict)
    cots: dict[str, Bounded] = field(default_factory=dict)
    grads: dict[str, Bounded] = field(default_factory=dict)

    def each(self, chain: Chain, give: Callable[[Key, Bounded], None]) -> None:
        """Give every value away in blame order: forward links first, then backward from the output."""
        for link in chain.links:
            give(("acts", link.writes), self.acts[link.writes])
        for link in reversed(chain.links):
            if link.writes != chain.output:
                give(("cots", link.writes), self.cots[link.writes])
            for node in link.feeds:
                give(("grads", node), self.grads[node])
        if chain.input_cotangent:
            give(("cots", chain.input), self.cots[chain.input])


@dataclass(frozen=True)
class Fed:
    """What a link reads: ``carried`` has the producer's bar where a compiler may recompute it, ``plain`` has not."""

    carried: Bounded
    plain: Bounded


class Walk:
    """One walk of a chain.

    Args:
        chain: the block's chain.
        tensors: the case's tensors, in the run's dtype.
        p: the run's precision.
        trace: the recorded run, for a link-by-link walk; None to walk end to end.
        compiled: a compiler may recompute a producer inside its consumer with other contractions, so what a link
            reads carries its producer's bar (up to the last result that is certainly stored and read back).
        ops: replacements for some links' ops, keyed by the site they write (named looser models).
        noise: end to end only: every link reads its producer's value displaced by ``noise(shape)`` bars, as if exact.
            With zero noise every link reads the plain value, so that each bar is that of its own link alone.
        doubt: end to end only: the error of what every link reads, by ("acts", site) or ("cots", site), instead of
            the propagated one; with noise, the least displacement.
    """

    def __init__(
        self,
        chain: Chain,
        tensors: Tensors,
        p: Precision,
        trace: Trace | None = None,
        compiled: bool = False,
        ops: Mapping[str, Op] | None = None,
        noise: Callable[[tuple[int, ...]], Array] | None = None,
        doubt: Mapping[Key, Array] | None = None,
    ) -> None:
        self._chain = chain
        self._p = p
        self._trace = trace
        self._compiled = compiled and trace is not None
        self._ops = ops or {}
        self._noise = noise
        self._doubt = doubt
        self._given = {name: recorded(v.astype(np.float64), p) for name, v in tensors.items()}

    def run(self) -> Expected:
        """Forward through every link, then backward through every link."""
        out = Expected()
        self.each(lambda key, b: _put(out, key, b))
        return out

    def each(self, give: Callable[[Key, Bounded], None]) -> None:
        """The same, with each value given away as soon as it is there, in blame order: a net's need much memory."""
        with quiet():
            self._backward(give, self._forward(give))

    def _op(self, link: Link) -> Op:
        return self._ops.get(link.writes, link.op)

    def _params(self, link: Link) -> tuple[Bounded, ...]:
        return tuple(self._given[name] for name in (*link.feeds, *link.constants))

    def _forward(self, give: Callable[[Key, Bounded], None]) -> dict[str, Fed]:
        fed = {self._chain.input: as_fed(self._given[self._chain.input])}
        for link in self._chain.links:
            op, ps = self._op(link), self._params(link)
            xs, plain = (tuple(getattr(fed[s], kind) for s in link.reads) for kind in ("carried", "plain"))
            y = own = op.bound(xs, ps)
            if self._compiled and op.stored(xs, ps)[0]:
                own = op.bound(plain, ps)
            key = ("acts", link.writes)
            fed[link.writes] = self._feed(key, y, own.err)
            give(key, y)
        return fed

    def _backward(self, give: Callable[[Key, Bounded], None], fed: dict[str, Fed]) -> None:
        # What each consumer of a site hands back, and the part of its bar that a recomputing compiler may show.
        parts: dict[str, list[tuple[Bounded, Array]]] = defaultdict(list)
        for link in reversed(self._chain.links):
            if link.writes == self._chain.output:
                dy = as_fed(self._given["dy"])
            else:
                dy = self._collect(give, parts, link.writes)
            fed.pop(link.writes)  # all that read it are done
            op, ps = self._op(link), self._params(link)
            xs, plain = (tuple(getattr(fed[s], kind) for s in link.reads) for kind in ("carried", "plain"))
            v = own = op.vjp(xs, ps, dy.carried)
            if self._compiled and op.stored(xs, ps)[1]:
                own = op.vjp(plain, ps, dy.plain)
            for site, dx, own_dx in zip(link.reads, v.inputs, own.inputs, strict=True):
                parts[site].append((dx, own_dx.err))
            for node, grad in zip(link.feeds, v.params, strict=True):
                give(("grads", node), grad)
        if self._chain.input_cotangent:
            self._collect(give, parts, self._chain.input)

    @cached_property
    def _uses(self) -> dict[str, int]:
        """Into how many parts autodiff may split the cotangent at every site."""
        uses: dict[str, int] = defaultdict(int)
        for link in reversed(self._chain.links):
            for site in link.reads:
                uses[site] += uses[link.writes] if isinstance(link.op, Copy) else link.op.uses
        return uses

    def _collect(
        self, give: Callable[[Key, Bounded], None], parts: dict[str, list[tuple[Bounded, Array]]], site: str
    ) -> Fed:
        """The cotangent at a site: the sum over everything that reads it."""
        readers = parts.pop(site)
        terms = [dx for dx, _ in readers]
        dy = terms[0] if len(terms) == 1 else add(*terms)
        if len(terms) > 1 and self._trace is None and self._uses[site] > len(terms):
            # Nothing was observed in between: the parts of each term may have been added to the others one by one.
            parts_of_all: Array = sum((t.reach + t.err for t in terms), np.zeros_like(dy.val))
            dy = dy.widen(gamma(self._uses[site] - len(terms), self._p) * parts_of_all)
        carried: Array = readers[0][1] if len(terms) == 1 else dy.err
        fed = self._feed(("cots", site), dy, carried)
        give(("cots", site), dy)
        return fed

    def _feed(self, key: Key, expected: Bounded, carried: Array) -> Fed:
        if self._noise is not None:
            # Noise may take away a degeneracy that the plain run has (a variance of 0), and its wide bar with it.
            reach = expected.err if self._doubt is None else np.maximum(expected.err, self._doubt[key])
            moved = expected.val + self._noise(expected.val.shape) * reach
            return as_fed(Bounded(moved, np.zeros_like(moved), self._p))
        if self._doubt is not None:
            return as_fed(Bounded(expected.val, self._doubt[key], self._p))
        if self._trace is None:
            return as_fed(expected)
        part, site = key
        got = getattr(self._trace, part).get(site)
        if got is None or got.shape != expected.val.shape:
            # Its absence is reported where it is due; downstream nothing can be said.
            return as_fed(Bounded(expected.val, np.full_like(expected.val, np.inf), self._p))
        plain = recorded(got.astype(np.float64), self._p)
        if not self._compiled:
            return as_fed(plain)
        # Recorded and recomputed value both lie within the bar, on either side: their distance is what is carried.
        with quiet():
            apart = carried + np.minimum(np.abs(plain.val - expected.val), carried)
        return Fed(recorded(got.astype(np.float64), self._p, apart), plain)


def end_to_end(chain: Chain, tensors: Tensors, p: Precision) -> Expected:
    """The whole chain from the case's inputs, with bars for any correct run in precision ``p``.

    A block's bars are worst cases, propagated. Over a net those grow beyond all use (by the width of every layer), so a
    deep chain is bounded by stochastic arithmetic instead: the spread of runs in which every link's result is displaced
    at random by several times its own worst-case bar. Real roundings are smaller and as independent.
    """
    return _spread(chain, tensors, p) if chain.deep else Walk(chain, tensors, p).run()


# How far a result is displaced, in bars. Real roundings may fill a tight bar, and then err like a displacement of one
# bar; at 16 the chance that a right element errs further than it did in eight runs is some 1e-9.
_REACH = 16.0
# Arrays of few elements have few chances to stray in one run; large nets have none so small but their loss.
_NOISY_RUNS = 8
_NOISY_RUNS_OF_LARGE = 3
_LARGE = 1_000_000


def _spread(chain: Chain, tensors: Tensors, p: Precision) -> Expected:
    plain = _parts(Walk(chain, tensors, p, noise=np.zeros).run())
    rng = np.random.default_rng(0)
    strayed: dict[Key, float] = defaultdict(float)
    alone = {key: centre.err for key, centre in plain.items()}
    local = dict(alone)

    def stray(key: Key, moved: Bounded) -> None:
        # One number an array: the furthest that any of its elements strayed.
        strayed[key] = max(strayed[key], _furthest(moved.val, plain[key].val))
        local[key] = np.maximum(local[key], moved.err)

    large = sum(t.size for t in tensors.values()) > _LARGE
    for _ in range(_NOISY_RUNS_OF_LARGE if large else _NOISY_RUNS):
        Walk(chain, tensors, p, noise=lambda shape: rng.uniform(-_REACH, _REACH, shape), doubt=alone).each(stray)
    # Both are bounds: how far the noise took an array, and what one link makes of the doubt in what it reads. The
    # latter is 0 behind a mask that is certain.
    alone.clear()
    doubt = {key: local.pop(key) + strayed[key] for key in plain}
    # A mask that may turn is no small displacement, and there may be many: behind one, nothing is promised.
    turning = {("cots", link.reads[0]) for link in chain.links if _may_turn(link, plain, doubt)}
    turned = False
    out = Expected()

    def bar(key: Key, linked: Bounded) -> None:
        nonlocal turned
        turned = turned or key in turning
        centre, allowed = plain.pop(key), doubt.pop(key)
        err = np.full_like(allowed, np.inf) if turned else np.minimum(allowed, linked.err)
        _put(out, key, settle(centre.val, err, p, centre.cancelled))

    Walk(chain, tensors, p, doubt=doubt).each(bar)
    return out


def _may_turn(link: Link, plain: Mapping[Key, Bounded], doubt: Mapping[Key, Array]) -> bool:
    """Whether the doubt in what a link reads leaves it open on which side of a kink it is."""
    key = ("acts", link.reads[0])
    return any(bool(((np.abs(plain[key].val - k) <= doubt[key]) & (doubt[key] > 0)).any()) for k in link.op.kinks)


def _parts(e: Expected) -> dict[Key, Bounded]:
    return {(part, name): b for part in ("acts", "cots", "grads") for name, b in getattr(e, part).items()}


def _put(e: Expected, key: Key, b: Bounded) -> None:
    getattr(e, key[0])[key[1]] = b


def _furthest(a: Array, b: Array) -> float:
    with quiet():
        distance = float(np.max(np.abs(a - b), initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def as_fed(b: Bounded) -> Fed:
    """A value that no compiler recomputes."""
    return Fed(b, b)
