"""``diffgrad bisect``: which release of its framework brought a finding, or mended it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from diffgrad.bisect import CACHE, Bisection, Trial, Tried, package_of, remember
from diffgrad.bisect import bisect as bisect_entry
from diffgrad.commands.files import probe, write_json
from diffgrad.corpus import Corpus, CorpusError
from diffgrad.releases import between, environments

_COLOURS = {"fails": "bold red", "passes": "green", "skipped": "yellow"}


def bisect(
    identity: Annotated[str, typer.Argument(metavar="ID", help="A finding, by the beginning of its id.")],
    low: Annotated[str, typer.Option("--from", metavar="VERSION", help="The oldest release to try.")],
    high: Annotated[str, typer.Option("--to", metavar="VERSION", help="The newest release to try.")],
    package: Annotated[
        str | None, typer.Option(help="What to bisect: jax, torch, tensorflow-cpu, tensorflow; the finding's own.")
    ] = None,
    pre: Annotated[bool, typer.Option("--pre", help="Prereleases too.")] = False,
    python: Annotated[str, typer.Option(help="The interpreter to install releases for.")] = sys.executable,
    cache: Annotated[Path, typer.Option(help="Folder that keeps an environment for every release.")] = CACHE,
    corpus: Annotated[Path, typer.Option("--corpus", help="Folder of saved counterexamples.")] = Path("corpus"),
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Find the release of its framework that brought a saved finding, or mended it.

    Exit 0: searched, with or without a change; 2: bad usage, or releases that cannot be had.
    """
    probe("--json", json)
    store = Corpus(corpus)
    entry = store.find(identity)
    chosen = package_of(entry, package)
    places = environments(python, cache)
    versions = between(places.pip.releases(chosen, pre), chosen, low, high)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{escape(entry.id)} in {len(versions)} releases of {chosen}, {versions[0]} to {versions[-1]}:")
    with console.status("installing and running"):
        trial = Trial(entry, chosen, places, lambda tried: _show(console, chosen, tried))
        result = bisect_entry(entry, chosen, versions, trial)
    console.print(escape(result.sentence[0].upper() + result.sentence[1:] + "."))
    kept = _remember(store, entry.id, result)
    if kept:
        console.print(escape(f"Not kept in the corpus: {kept}"))
    write_json(json, {**msgspec.to_builtins(result), "from": versions[0], "to": versions[-1], "kept": not kept})


def _show(console: Console, package: str, tried: Tried) -> None:
    reason = f" ({tried.reason})" if tried.reason else ""
    console.print(f"  {package} {tried.version}: [{_COLOURS[tried.verdict]}]{tried.verdict}[/]{escape(reason)}")


def _remember(store: Corpus, identity: str, result: Bisection) -> str:
    """Add to the entry's history. If that cannot be done, why: the answer stands all the same."""
    try:
        remember(store, identity, result.tried)
    except CorpusError as e:
        return str(e)
    return ""
