"""The corpus: one JSON file per counterexample, named by the hash of its case, and an index anyone can read.

Files are written to a temporary name and renamed, so that several processes may write at once and nobody ever sees half
a file.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from packaging.version import Version

from diffgrad.case import SCHEMA, Case, case_from_object, check_schema, convert
from diffgrad.specs import CaseError

Status = Literal["open", "fixed", "convention"]


class CorpusError(RuntimeError):
    """The corpus cannot be read or written; the message says which file and why."""


class Signature(msgspec.Struct, frozen=True, omit_defaults=True):
    """What makes two findings the same one.

    ``link`` is the op that is answerable, ``condition`` says which of its results (activation, cotangent, gradient) or
    which exception. ``how`` names the conditions, beside the mode, that the fault takes; empty if it shows under plain
    ones.
    """

    adapter: str
    mode: str
    dtype: str
    link: str
    verdict: str
    condition: str
    how: str = ""

    def __str__(self) -> str:
        parts = (self.adapter, self.mode, self.dtype, self.link, self.verdict, self.condition)
        return "/".join((*parts, self.how) if self.how else parts)

    @property
    def core(self) -> tuple[str, ...]:
        """What stays the same while the conditions of a case are made plainer."""
        return (self.adapter, self.dtype, self.link, self.verdict, self.condition)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A saved counterexample.

    Attributes:
        status: ``open`` (a framework's fault, still there), ``fixed`` (expected to pass: a mended framework bug or a
            mended false alarm of ours), ``convention`` (a documented difference of convention).
        verdict: what the case gave when it was saved; for ``fixed`` entries, what it gave before.
        sentence: the blamed link, element, got, expected, error and bar.
        explanation: one line for people.
        upstream: reference to the framework's own issue, where known.
        cpu: a flag of the processor without which the fault does not show, such as ``avx512_bf16``; empty for none.
        date: when it was saved, as YYYY-MM-DD.
        original: the case before it was shrunk to a single op, where it was.
        witnesses: what others gave for the same case (other frameworks, float64, other modes, NumPy): name -> verdict.
        history: version of the framework -> ``fails`` or ``passes``, of every version that was tried since.
    """

    case: Case
    signature: Signature
    status: Status
    sentence: str
    versions: dict[str, str]
    explanation: str = ""
    upstream: str = ""
    cpu: str = ""
    date: str = ""
    original: Case | None = None
    witnesses: dict[str, str] = {}
    history: dict[str, str] = {}
    schema: int = SCHEMA

    @property
    def seen(self) -> tuple[str, ...]:
        """The versions of the framework in which the fault was seen, the oldest first."""
        own = self.versions.get(self.signature.adapter, "")
        failing = {v for v, outcome in self.history.items() if outcome == "fails"} | ({own} if own else set())
        return tuple(sorted(failing, key=Version))

    @property
    def id(self) -> str:
        """The file's stem: hash of the case, then the framework, link and quantity that are at fault."""
        s = self.signature
        return "-".join((self.case.id, s.adapter, s.link.replace("+", "_"), s.condition.split(" ")[0].lower()))


def entry_to_json(entry: Entry) -> bytes:
    """Readable JSON, fields in a fixed order."""
    raw = msgspec.to_builtins(entry)
    raw["case"] = msgspec.json.decode(entry.case.to_json())
    if entry.original is not None:
        raw["original"] = msgspec.json.decode(entry.original.to_json())
    for field in ("cpu", "date", "original", "witnesses", "history"):
        if not raw[field]:
            del raw[field]  # most entries have none
    head = {"schema": raw.pop("schema"), "id": entry.id}
    return msgspec.json.format(msgspec.json.encode({**head, **raw}), indent=2) + b"\n"


def read_entry(path: Path) -> Entry:
    """Read one corpus file.

    Raises:
        CorpusError: one sentence naming the file and what is wrong with it.
    """
    try:
        raw = msgspec.json.decode(path.read_bytes())
        check_schema(raw)
        if "case" not in raw:
            raise CaseError("no field 'case'")
        case = case_from_object(raw["case"])
        original = case_from_object(raw["original"]) if raw.get("original") else None
        stated = raw.pop("id", None)
        entry = convert(raw, Entry)
    except OSError as e:
        raise CorpusError(f"{path}: cannot be read ({e.strerror})") from None
    except (msgspec.DecodeError, CaseError) as e:
        raise CorpusError(f"{path}: not a corpus entry ({e}); restore it, or delete the file") from None
    entry = msgspec.structs.replace(entry, case=case, original=original)
    if stated is not None and stated != entry.id:
        raise CorpusError(
            f"{path}: its case was edited (id says {stated}, the case hashes to {entry.id}); restore it, "
            "or rename the file and correct the id"
        )
    return entry


def _cell(text: str) -> str:
    """Text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


class Corpus:
    """A folder of entries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Make sure that findings can be saved, before looking for any.

        Raises:
            CorpusError: the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".probe-"):
                pass
        except OSError as e:
            raise CorpusError(
                f"{self.folder}: findings could not be saved there ({e.strerror}); make it writable, or name another "
                "folder with --corpus"
            ) from None

    def paths(self) -> list[Path]:
        """Every entry's file, in a fixed order."""
        return sorted(self.folder.glob("*.json"))

    def entries(self) -> Iterator[Entry]:
        """Every entry. Raises CorpusError at the first file that is not one."""
        for path in self.paths():
            yield read_entry(path)

    def find(self, prefix: str) -> Entry:
        """The entry whose id begins with ``prefix``.

        Raises:
            CorpusError: there is none, or more than one.
        """
        found = [p for p in self.paths() if p.stem.startswith(prefix)] if prefix else []
        if len(found) == 1:
            return read_entry(found[0])
        if found:
            raise CorpusError(f"{prefix}: {len(found)} entries begin so ({', '.join(p.stem for p in found)}); say more")
        raise CorpusError(
            f"{prefix or 'an empty id'}: no entry of {self.folder} begins so; `diffgrad triage` lists them"
        )

    def replace(self, entry: Entry) -> Path:
        """Write an entry over the one of the same id.

        Raises:
            CorpusError: the file cannot be written; the old one is still there.
        """
        path = self.folder / f"{entry.id}.json"
        self._write(path, entry_to_json(entry))
        return path

    def remember(self, identity: str, found: Mapping[str, str]) -> None:
        """Add versions and whether the fault ``fails`` or ``passes`` there to an entry's history, as it is by now.

        Raises:
            CorpusError: the file cannot be read or written; it is as it was.
        """
        now = self.find(identity)
        history = {**now.history, **found}
        if history != now.history:
            ordered = {v: history[v] for v in sorted(history, key=Version)}
            self.replace(msgspec.structs.replace(now, history=ordered))

    def known(self) -> set[str]:
        """Signatures, as strings, of the faults that are still there: open ones and conventions."""
        return {str(e.signature) for e in self.entries() if e.status != "fixed"}

    def save(self, entry: Entry) -> Path:
        """Write an entry; an existing one of the same id is kept, since its status may have been judged by a person.

        Raises:
            CorpusError: the file cannot be written. Nothing half-written is left behind.
        """
        path = self.folder / f"{entry.id}.json"
        if not path.exists():
            self._write(path, entry_to_json(entry))
        return path

    def write_index(self) -> None:
        """Rewrite INDEX.md from the entries. One writer at a time, so that none misses another's entry."""
        try:
            lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:
            index = self.folder / "INDEX.md"
            raise CorpusError(f"{index}: could not be written ({e.strerror}); nothing was changed") from None
        try:
            self._write_index()
        finally:
            os.close(lock)

    def _write_index(self) -> None:
        rows = [
            f"| [{e.id}]({e.id}.json) | {e.status} | {e.signature.adapter} | {e.case.block.kind} | "
            f"{e.signature.link} | {e.signature.verdict} | {_cell(e.explanation or e.sentence)} |"
            for e in self.entries()
        ]
        head = [
            "# Saved counterexamples",
            "",
            "`diffgrad replay` runs them all. Written by diffgrad; edit the entries, not this page.",
            "",
            "| id | status | framework | block | link | verdict | in words |",
            "|---|---|---|---|---|---|---|",
        ]
        self._write(self.folder / "INDEX.md", ("\n".join(head + rows) + "\n").encode())

    def _write(self, path: Path, data: bytes) -> None:
        temporary = ""
        try:
            fd, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except OSError as e:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise CorpusError(f"{path}: could not be written ({e.strerror}); nothing was changed") from None
