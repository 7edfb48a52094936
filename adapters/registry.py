"""The table of adapters: one row per framework. A framework is imported only when its adapter is loaded."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from diffgrad.adapters.base import Adapter
from diffgrad.how import How


class Row(NamedTuple):
    """An adapter's row: the package that it needs, and what a user types to get it."""

    package: str
    install: str


ADAPTERS: dict[str, Row] = {
    "torch": Row("torch", "pip install 'diffgrad[torch]'"),
    "jax": Row("jax", "pip install 'diffgrad[jax]'"),
    "tensorflow": Row("tensorflow", "pip install 'diffgrad[tensorflow]'"),
    "numpy": Row("numpy", "pip install diffgrad"),
}

FRAMEWORKS = ("torch", "jax", "tensorflow")
"""The frameworks under test. ``numpy`` is the same-precision reference and runs when it is asked for."""


class Offer(NamedTuple):
    """The conditions that an adapter can run under, beside the plain ones. The first mode is its own default."""

    modes: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    """Modes in which a compiler sees the whole block, and may recompute an activation inside its consumer."""
    layouts: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    convs: tuple[str, ...] = ()
    flavours: tuple[str, ...] = ()
    """Fields of ``How`` that mean something to it."""


OFFERS: dict[str, Offer] = {
    "torch": Offer(
        modes=("eager", "compile", "func", "checkpoint", "jvp"),
        compiled=("compile",),
        layouts=("channels_last",),
        norms=("composed", "layer"),
        convs=("unfold", "layer"),
        flavours=("x", "dy", "params", "threads", "isa", "tf32", "benchmark", "deterministic"),
    ),
    "jax": Offer(
        modes=("jit", "eager", "checkpoint", "linearize", "jvp"),
        compiled=("jit", "checkpoint", "linearize", "jvp"),
        layouts=("channels_first",),
        norms=("fused", "layer", "fast"),
        convs=("unfold", "layer"),
        flavours=("x", "dy", "params", "tf32"),
    ),
    "tensorflow": Offer(
        modes=("eager", "function", "xla", "checkpoint", "jvp"),
        compiled=("function", "xla"),
        layouts=("channels_first",),
        norms=("composed", "fused", "layer"),
        convs=("grouped", "layer"),
        flavours=("x", "dy", "params", "threads", "isa", "onednn", "deterministic"),
    ),
    "numpy": Offer(modes=("eager",)),
}
"""Adapter -> what it offers. Held against the adapters by a test."""


def mode_of(name: str, how: How) -> str:
    """The mode in which an adapter runs a case."""
    return how.mode or OFFERS[name].modes[0]


def offers(name: str, how: How) -> bool:
    """Whether an adapter has these conditions at all; if not, a case is none of its business."""
    offer = OFFERS[name]
    named = ((how.layout, offer.layouts), (how.norm, offer.norms), (how.conv, offer.convs))
    fields = ("x", "dy", "params", "threads", "isa", "onednn", "tf32", "benchmark", "deterministic")
    return (
        mode_of(name, how) in offer.modes
        and all(not value or value in known for value, known in named)
        and all(field in offer.flavours for field in how.unusual() if field in fields)
        and (how.device == "cpu" or name != "numpy")
    )


def compiled(name: str, how: How) -> bool:
    """Whether a compiler sees the whole block in the mode of a case."""
    return mode_of(name, how) in OFFERS[name].compiled


def load(name: str, quick: bool = False) -> Adapter:
    """Import a framework's adapter. ``quick`` asks for its cheapest compilation.

    Raises:
        ImportError: the framework is not installed.
    """
    module = importlib.import_module(f"diffgrad.adapters.{name}")
    return module.adapter(quick)  # type: ignore[no-any-return]
