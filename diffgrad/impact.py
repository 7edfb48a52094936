"""Impact: what else is wrong in a chain where one of its ops is, by what reads what."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import NamedTuple

from diffgrad.chains import Chain, Link, chain_of
from diffgrad.strategies import sample
from diffgrad.strategies.blocks import SPECS

_LINEAR = frozenset(
    {"conv2d", "depthwise", "dense", "layerscale", "add", "copy", "droppath", "clsslice", "flatten"}
    | {"globalaveragepool", "prependcls", "addposition"}
)
"""Ops whose input cotangent does not read their input."""
_SHIFTED = ("conv2d", "depthwise", "dense", "batchnorm", "layernorm")
"""Ops whose parameters after the first are added at the end, so that their gradients do not read the input."""
_GIVEN = ("prependcls", "addposition")
"""Ops all of whose parameters are added."""
_SPECIMENS = 40


class Impact(NamedTuple):
    """What a fault of one link (or of the sum of several ones' cotangents) may reach, its own results included.

    Attributes:
        link: ``op@site``, or several joined by +.
        reads: the sites that it reads.
        activations: sites, in forward order.
        cotangents: the documents' names, in backward order.
        nodes: parameters whose gradients are reached, in backward order.
    """

    link: str
    reads: tuple[str, ...]
    activations: tuple[str, ...]
    cotangents: tuple[str, ...]
    nodes: tuple[str, ...]


def impacts(chain: Chain, ops: str, what: str) -> list[Impact]:
    """The impact at every link of a chain that has one of the ops.

    Args:
        chain: the chain.
        ops: a signature's link: the name of an op, or several joined by +.
        what: which result is wrong: ``activation``, ``cotangent``, ``gradient``, ``update`` or ``tangent``.
    """
    if "+" in ops:  # the fault is of a sum: at a site that all of them read
        forks = {site: [k for k in chain.links if site in k.reads] for site in chain.cotangents()}
        joined = {site: links for site, links in forks.items() if {k.op.name for k in links} == set(ops.split("+"))}
        return [_impact(chain, "+".join(k.title for k in ks), (site,), {site}) for site, ks in joined.items()]
    found = []
    for link in chain.links:
        if link.op.name == ops:
            sites = _forward(chain, link) if what in ("activation", "tangent") else set()
            # What an op alone has as parameters (keys and values) may be activations in a block.
            back = what == "cotangent" or (what == "gradient" and not link.feeds)
            cots = set(link.reads) if back else set()
            nodes = link.feeds if what in ("gradient", "update") else ()
            found.append(_impact(chain, link.title, link.reads, cots, sites, nodes, what != "tangent"))
    return found


def documented(ops: str) -> dict[str, Chain]:
    """The documents' blocks that have one of the ops: of each, the chain of a specimen with most of its parts."""
    found = {}
    for kind in SPECS:
        if kind.startswith("op_"):
            continue
        chains = _specimens(kind)
        counts = [(len(impacts(c, ops, "cotangent")), len(c.links)) for c in chains]
        best = max(range(len(chains)), key=counts.__getitem__)
        if counts[best][0] and not chains[best].deep:  # nets are made of the other blocks
            found[kind] = chains[best]
    return found


@cache
def _specimens(kind: str) -> tuple[Chain, ...]:
    return tuple(chain_of(spec) for spec in sample(SPECS[kind](), _SPECIMENS, key=0))


def _impact(
    chain: Chain,
    title: str,
    reads: tuple[str, ...],
    cots: set[str],
    sites: Collection[str] = (),
    nodes: tuple[str, ...] = (),
    backward: bool = True,
) -> Impact:
    """What is reached from the sites whose cotangents or activations are wrong to begin with."""
    cots, reached = set(cots), list(nodes)
    for k in reversed(chain.links) if backward else ():
        reached += _nodes(k, sites, k.writes in cots)
        if k.writes in cots or (k.op.name not in _LINEAR and {*k.reads, k.writes} & set(sites)):
            cots |= set(k.reads)
    names = chain.cotangents()
    return Impact(
        title,
        reads,
        tuple(k.writes for k in chain.links if k.writes in sites),
        tuple(names[site] for site in reversed(names) if site in cots),
        tuple(dict.fromkeys(reached)),
    )


def _forward(chain: Chain, link: Link) -> set[str]:
    """The sites behind a link, with its own."""
    sites = {link.writes}
    for k in chain.links:
        if sites & set(k.reads):
            sites.add(k.writes)
    return sites


def _nodes(link: Link, sites: Collection[str], by_cotangent: bool) -> tuple[str, ...]:
    """The link's nodes that read a wrong cotangent, or a wrong activation."""
    if by_cotangent:
        return link.feeds
    if not set(link.reads) & set(sites) or link.op.name in _GIVEN:
        return ()
    return link.feeds[:1] if link.op.name in _SHIFTED else link.feeds
