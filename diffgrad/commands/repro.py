"""``diffgrad repro``: a finding as a script that needs only the framework and NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffgrad.commands.files import probe, write_json, write_text
from diffgrad.corpus import Corpus
from diffgrad.repro import ReproError, script
from diffgrad.triage import run_now


def repro(
    identity: Annotated[str, typer.Argument(metavar="ID", help="A finding, by the beginning of its id.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the script there.")] = None,
    corpus: Annotated[Path, typer.Option("--corpus", help="Folder of saved counterexamples.")] = Path("corpus"),
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Write a script that shows a finding without diffgrad, and exits 1 while the fault is there."""
    entry = Corpus(corpus).find(identity)
    probe("--out", out)
    probe("--json", json)
    now = run_now(entry)
    if not now.shows:
        raise ReproError(f"{entry.id}: the fault does not show here now ({now.verdict}); there is nothing to reproduce")
    text = script(entry, now.quantity)
    if out is None:
        print(text, end="")
    else:
        write_text("--out", out, text)
    write_json(json, {"id": entry.id, "script": text})
