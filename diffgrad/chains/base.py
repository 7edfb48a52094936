"""A chain is a table: each link states its op, what it reads and writes, its cotangent and the nodes it feeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from diffgrad.ops import Op, SmoothedCrossEntropy


@dataclass(frozen=True)
class Link:
    """One row of a chain.

    Attributes:
        op: the arithmetic.
        reads: activation sites it reads.
        writes: the activation site it produces.
        cotangent: the documents' name of the cotangent at ``writes``.
        feeds: parameters it reads; their gradient nodes are evaluated at ``cotangent``.
        constants: tensors it reads that have no node (drop masks).
        slot: the optional part of the block that the link belongs to; empty for a link that is always there.
    """

    op: Op
    reads: tuple[str, ...]
    writes: str
    cotangent: str
    feeds: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    slot: str = ""

    @property
    def title(self) -> str:
        """The link's name in verdicts: ``op@site``."""
        return f"{self.op.name}@{self.writes}"


@dataclass(frozen=True)
class Chain:
    """The links of a block in forward order, from the input site to the output site.

    ``input_cotangent`` is empty where the backward ends before the input. ``deep`` chains are nets, whose end-to-end
    bars come from noise instead of worst cases.
    """

    links: tuple[Link, ...]
    input: str
    input_cotangent: str
    deep: bool = False

    @property
    def output(self) -> str:
        """The last site; its cotangent is given."""
        return self.links[-1].writes

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every parameter-gradient node, in forward order."""
        return tuple(node for link in self.links for node in link.feeds)

    def cotangents(self) -> dict[str, str]:
        """Site -> the documents' name of the cotangent there, the input site first (if its cotangent is asked for)."""
        first = {self.input: self.input_cotangent} if self.input_cotangent else {}
        return first | {link.writes: link.cotangent for link in self.links}


def fill(table: Iterable[Link], present: dict[str, bool]) -> tuple[Link, ...]:
    """Put the identity into every absent slot: its links go, and what read their output reads their input.

    This is the one place where a row's k = 0 (or an absent drop site) is turned into wiring.
    """
    links: list[Link] = []
    stands_for: dict[str, str] = {}
    for link in table:
        reads = tuple(stands_for.get(site, site) for site in link.reads)
        if link.slot and not present[link.slot]:
            stands_for[link.writes] = reads[0]
        else:
            links.append(replace(link, reads=reads))
            stands_for.pop(link.writes, None)
    return tuple(links)


def with_ops(table: Iterable[Link], **ops: Op) -> tuple[Link, ...]:
    """The table with the ops that write some sites replaced."""
    return tuple(replace(link, op=ops.get(link.writes, link.op)) for link in table)


def renamed(chain: Chain, prefix: str, first: str, last: str) -> tuple[Link, ...]:
    """A block's links inside a net: its input site is called ``first``, its output ``last``, the rest is prefixed."""

    def site(name: str) -> str:
        return {chain.input: first, chain.output: last}.get(name, prefix + name)

    return tuple(
        replace(
            link,
            reads=tuple(site(s) for s in link.reads),
            writes=site(link.writes),
            cotangent=f"dy_{last}" if link.writes == chain.output else prefix + link.cotangent,
            feeds=tuple(prefix + name for name in link.feeds),
            constants=tuple(prefix + name for name in link.constants),
        )
        for link in chain.links
    )


def in_series(parts: Iterable[tuple[str, Chain, str]]) -> tuple[Link, ...]:
    """The links of (prefix, chain, name of its output) one after another, in forward order."""
    links: list[Link] = []
    first = "x"
    for prefix, chain, last in parts:
        links += renamed(chain, prefix, first, last)
        first = last
    return tuple(links)


def with_loss(links: tuple[Link, ...], input_cotangent: str = "") -> Chain:
    """A net: links that end in the logits, then the smoothed cross entropy."""
    loss = Link(SmoothedCrossEntropy(), (links[-1].writes,), "out", "dyLoss", (), ("target",))
    return Chain((*links, loss), "x", input_cotangent, deep=True)
