"""``diffgrad triage``: what is in the corpus, or one finding as a bug report."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from diffgrad.commands.files import probe, write_json, write_text
from diffgrad.corpus import Corpus
from diffgrad.errors import UsageError
from diffgrad.show import console
from diffgrad.triage import STATUSES, Row, bug_report, rows, run_now, version_range

_COLOURS = {"open": "bold red", "convention": "yellow", "fixed": "green"}


def triage(
    identity: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A finding, by the beginning of its id: its bug report.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the bug report there.")] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run the case now, or use only what is stored.")] = True,
    corpus: Annotated[Path, typer.Option("--corpus", help="Folder of saved counterexamples.")] = Path("corpus"),
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """List the saved findings, open ones first; or write one as a bug report in its framework's own template."""
    if out is not None and identity is None:
        raise UsageError("--out: only a bug report goes there; name a finding, or take --json for the list")
    probe("--json", json)
    store = Corpus(corpus)
    if identity is None:
        listed = rows(store, datetime.now(UTC).date())
        show(listed, corpus)
        counts = Counter(row.status for row in listed)
        write_json(json, {**{s: counts[s] for s in STATUSES}, "entries": [msgspec.to_builtins(r) for r in listed]})
        return
    entry = store.find(identity)
    probe("--out", out)
    now = run_now(entry) if run else None
    text = bug_report(entry, now)
    if out is None:
        print(text, end="")
    else:
        write_text("--out", out, text)
    write_json(json, {"id": entry.id, "shows": now.shows if now else None, "report": text})


def show(listed: list[Row], folder: Path) -> None:
    """The table, for people."""
    out = console()
    table = Table(box=None, pad_edge=False)
    for column in ("id", "status", "signature", "seen in", "link"):
        table.add_column(column, overflow="fold")
    table.add_column("age", justify="right")
    for row in listed:
        age = "-" if row.age_days is None else f"{row.age_days} d"
        status = f"[{_COLOURS[row.status]}]{row.status}[/]"
        cells = (row.signature, version_range(row.seen), row.link or "-")
        table.add_row(escape(row.short), status, *map(escape, cells), age)
    out.print(table)
    counts = Counter(row.status for row in listed)
    out.print(f"{len(listed)} in {escape(str(folder))}: " + ", ".join(f"{counts[s]} {s}" for s in STATUSES) + ".")
    if listed:
        out.print(f"diffgrad triage {escape(listed[0].short)} writes its bug report.")
