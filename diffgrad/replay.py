"""Replay: every saved case run again, and whether it still gives what its entry says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from diffgrad.corpus import Corpus, CorpusError, Entry, read_entry
from diffgrad.judge import Judgement, judge
from diffgrad.worker import Runner


class Replayed(msgspec.Struct, frozen=True):
    """One entry's replay. ``got`` is the signature of the fault now, or the verdict where there is none."""

    id: str
    status: str
    expected: str
    got: str
    sentence: str
    as_expected: bool

    @property
    def outcome(self) -> str:
        """What an open finding's history says of this run: ``fails``, ``passes``, or nothing that it could say."""
        if self.status != "open" or self.got.startswith("not run"):
            return ""
        if self.as_expected:
            return "fails"
        return "passes" if self.got in ("ok", "vacuous") or self.got.startswith("lossy:") else ""


def entries_at(path: Path) -> list[Entry]:
    """The entries of a corpus folder, or the one of a file.

    Raises:
        CorpusError: there is no such path, or a file in it is not an entry.
    """
    if path.is_dir():
        return list(Corpus(path).entries())
    if not path.exists():
        raise CorpusError(f"{path}: no such file or folder")
    return [read_entry(path)]


def replay(entries: Sequence[Entry], runner: Runner) -> Iterator[Replayed]:
    """Run each entry's case in its framework as an ordinary user would, with the default compile options.

    What reads uninitialised memory is not at fault every time, so a case has a few tries to do as its entry says. An
    entry whose fault takes a processor that this machine is not is as expected without a run.
    """
    flags = processor_flags()
    for entry in entries:
        if entry.cpu and entry.cpu not in flags:
            yield Replayed(entry.id, entry.status, str(entry.signature), f"not run: no {entry.cpu} here", "", True)
            continue
        yield _tried(entry, runner)


def _tried(entry: Entry, runner: Runner) -> Replayed:
    for _ in range(_TRIES):
        (answer,) = runner.run([entry.case], [entry.signature.adapter], quick=False)
        result = compare(entry, judge(answer))
        if result.as_expected or entry.status == "fixed":
            break
    return result


_TRIES = 3


def processor_flags() -> frozenset[str]:
    """What the processor can do, as Linux lists it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def compare(entry: Entry, now: Judgement) -> Replayed:
    """An ``open`` or ``convention`` entry must give its own signature again, a ``fixed`` one must give no fault."""
    got = ", ".join(str(f.signature) for f in now.faults) or now.verdict
    if entry.status == "fixed":
        expected, same = "no fault", not now.faults and now.report is not None
    else:
        expected, same = str(entry.signature), now.fault(entry.signature) is not None
    return Replayed(entry.id, entry.status, expected, got, now.sentence, same)
