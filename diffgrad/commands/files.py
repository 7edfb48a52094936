"""Files that commands read and write: every trouble with one is a sentence that names the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from diffgrad.errors import UsageError


def probe(option: str, path: Path | None) -> None:
    """Find out before a long run, not after it, that its result cannot be written.

    Raises:
        UsageError: it cannot.
    """
    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be written ({e.strerror})") from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{option} {path}: could not be written ({e.strerror})") from None


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write a command's result, if it is asked for."""
    if path is not None:
        write_text("--json", path, msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
