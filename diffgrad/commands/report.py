"""``diffgrad report``: one HTML page of what is known."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from diffgrad.commands.files import probe, write_json, write_text
from diffgrad.corpus import Corpus
from diffgrad.errors import UsageError
from diffgrad.report import page
from diffgrad.results import Fuzz, Mutants, read
from diffgrad.triage import rows


def report(
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="Write the page there.")],
    fuzz: Annotated[Path | None, typer.Option(metavar="JSON", help="What `diffgrad fuzz --json` wrote.")] = None,
    mutants: Annotated[Path | None, typer.Option(metavar="JSON", help="What `diffgrad mutants --json` wrote.")] = None,
    corpus: Annotated[Path, typer.Option("--corpus", help="Folder of saved counterexamples.")] = Path("corpus"),
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Write one self-contained HTML page: the findings, and a campaign and the planted faults if they are given."""
    campaign = read("--fuzz", fuzz, Fuzz, "diffgrad fuzz") if fuzz else None
    planted = read("--mutants", mutants, Mutants, "diffgrad mutants") if mutants else None
    now = datetime.now(UTC)
    findings = rows(Corpus(corpus), now.date())
    probe("--html", html)
    probe("--json", json)
    try:
        text = page(findings, campaign, planted, now)
    except ImportError as e:
        raise UsageError(f"the plots need {e.name}: pip install 'diffgrad[report]'") from None
    write_text("--html", html, text)
    write_json(json, {"file": str(html), "findings": len(findings), "bytes": len(text.encode())})
    print(
        f"{html}: {len(findings)} findings{', a campaign' if fuzz else ''}{', the planted faults' if mutants else ''}"
    )
