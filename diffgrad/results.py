"""What ``diffgrad fuzz --json`` and ``diffgrad mutants --json`` write, as far as other commands read it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from diffgrad.errors import UsageError


class Condition(msgspec.Struct):
    """One framework in one mode and dtype."""

    adapter: str
    mode: str
    dtype: str
    runs: int
    verdicts: dict[str, int]
    worst_error_over_bar: float
    vacuous_share: float


class BlockRuns(msgspec.Struct):
    """One block in one framework, mode and dtype."""

    block: str
    adapter: str
    mode: str
    dtype: str
    verdicts: dict[str, int]


class Bin(msgspec.Struct):
    """Runs by their worst error/bar; ``decades`` is the bin's lower end."""

    decades: float
    runs: int


class NewFinding(msgspec.Struct):
    """A finding that the campaign saved."""

    id: str
    signature: str
    sentence: str


class KnownFinding(msgspec.Struct):
    """A finding that was known before the campaign saw it."""

    signature: str
    count: int


class Unconfirmed(msgspec.Struct):
    """A fault that was gone the second time."""

    signature: str
    reason: str
    sentence: str


class Fuzz(msgspec.Struct):
    """A campaign."""

    seed: int
    cases: int
    links_checked: int
    nodes_checked: int
    verdicts: dict[str, int]
    conditions: list[Condition]
    vacuous_share: float
    wall_s: float
    framework_cpu_s: dict[str, float]
    oracle_cpu_s: float
    total_cpu_s: float
    new_findings: list[NewFinding]
    known_findings: list[KnownFinding]
    unconfirmed: list[Unconfirmed] = []
    unsupported: dict[str, int] = {}
    blocks: list[BlockRuns] = []
    ratios: dict[str, list[Bin]] = {}


class Killed(msgspec.Struct):
    """A planted fault: cases until it was caught (0: it was not), and what it was caught by."""

    cases: int
    fault: str


class Mutants(msgspec.Struct):
    """A run of the planted faults."""

    mutants: int
    killed: int
    survivors: list[str]
    misblamed: list[str]
    median_cases_to_kill: float
    clean_cases: int
    false_alarms: int
    kills: dict[str, Killed]


T = TypeVar("T")


def read(option: str, path: Path, kind: type[T], command: str) -> T:
    """Read a command's JSON.

    Args:
        option: what the path was given to.
        path: the file.
        kind: what is in it.
        command: what writes such files.

    Raises:
        UsageError: one sentence that says what is wrong with it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be read ({e.strerror})") from None
    except msgspec.DecodeError as e:
        raise UsageError(f"{option} {path}: not what `{command} --json` writes ({e})") from None
