"""The table of adapters: one row per framework. A framework is imported only when its adapter is loaded."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from diffgrad.adapters.base import Adapter


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

COMPILED_MODES = ("jit",)
"""Modes in which a compiler may recompute a recorded activation inside its consumer."""


def load(name: str, quick: bool = False) -> Adapter:
    """Import a framework's adapter. ``quick`` asks for its cheapest compilation.

    Raises:
        ImportError: the framework is not installed.
    """
    module = importlib.import_module(f"diffgrad.adapters.{name}")
    return module.adapter(quick)  # type: ignore[no-any-return]
