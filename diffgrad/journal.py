"""The journal: every case is on disk before it runs, so that nothing that kills a process loses it.

Each campaign appends to a file of its own in ``<corpus>/.journal`` and holds a lock on it as long as it lives. A line
is one event: a case begins in a framework, or is done with. A file without a living owner is a campaign that was
killed: what began there and was never done is run again by the next one.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from diffgrad.case import Case, case_from_object
from diffgrad.corpus import CorpusError
from diffgrad.specs import CaseError

FOLDER = ".journal"


class Pending(NamedTuple):
    """A case that began in a framework and was never done with, in how many campaigns that were killed."""

    adapter: str
    case: Case
    campaigns: int = 1


class Journal:
    """One campaign's journal.

    Args:
        corpus: the corpus' folder.

    Raises:
        CorpusError: the journal cannot be written; no case runs unrecorded.
    """

    def __init__(self, corpus: Path) -> None:
        folder = corpus / FOLDER
        self.path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._pending: set[tuple[str, str]] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            new.rename(self.path)  # by its name it is never seen without its lock
        except OSError as e:
            raise CorpusError(f"{self.path}: cases could not be recorded there ({e.strerror})") from None

    def begin(self, adapter: str, case: Case) -> None:
        """The case is about to run in a framework."""
        identity = case.id
        self._pending.add((adapter, identity))
        self._write({"begin": adapter, "id": identity, "case": msgspec.Raw(case.to_json())})

    def done(self, adapter: str, case: Case) -> None:
        """Its answer was judged, and what it showed is known or saved."""
        identity = case.id
        self._write({"done": adapter, "id": identity})
        self._pending.discard((adapter, identity))

    def close(self) -> None:
        """A campaign that ends in good order leaves nothing behind but what is pending still."""
        if not self._pending:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def abandon(self) -> None:
        """A campaign that fails leaves what is pending to the next one."""
        os.close(self._file)

    def _write(self, event: dict[str, object]) -> None:
        line = msgspec.json.encode(event) + b"\n"
        try:
            while line:  # a disk that fills up takes a part of it
                line = line[os.write(self._file, line) :]
        except OSError as e:
            raise CorpusError(
                f"{self.path}: the next case could not be recorded ({e.strerror}); nothing that was found is lost: "
                "make room, and the next run goes on with what was pending"
            ) from None


def ownerless(corpus: Path) -> list[Path]:
    """The journals of campaigns that were killed."""
    return [path for path in sorted((corpus / FOLDER).glob("*.jsonl")) if not _owned(path)]


def recover(corpus: Path) -> list[Pending]:
    """What campaigns that were killed left pending. Their journals are kept until ``forget``.

    Lines that are torn or that this version cannot read are passed over: their case never began.
    """
    found: dict[tuple[str, str], Pending] = {}
    for path in ownerless(corpus):
        for key, pending in _left(path).items():
            before = found[key].campaigns if key in found else 0
            found[key] = pending._replace(campaigns=before + 1)
    return list(found.values())


def _left(path: Path) -> dict[tuple[str, str], Pending]:
    """What one journal has as begun and not as done."""
    pending: dict[tuple[str, str], Pending] = {}
    for line in _lines(path):
        try:
            event = msgspec.json.decode(line)
            if "begin" in event:
                pending[event["begin"], event["id"]] = Pending(event["begin"], case_from_object(event["case"]))
            else:
                pending.pop((event["done"], event["id"]), None)
        except (msgspec.DecodeError, CaseError, KeyError, TypeError):
            continue
    return pending


def forget(journals: Iterable[Path]) -> None:
    """Remove journals: what they left pending has been run, or is in a new one."""
    for path in journals:
        path.unlink(missing_ok=True)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []  # another campaign has just run what it says


def _owned(path: Path) -> bool:
    """Whether a living process holds the journal."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True  # its owner has just ended in good order
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
