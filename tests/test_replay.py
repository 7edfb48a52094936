"""Replay: what each status promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffgrad.check import Report
from diffgrad.corpus import Corpus, CorpusError, Status
from diffgrad.judge import Fault, Judgement
from diffgrad.replay import compare, entries_at, replay
from diffgrad.worker import InProcess
from tests.helpers import SMALLEST, UIB, entry

FAULT = entry().signature
REPORT = Report((), 0, 0)
ANOTHER = entry(verdict="nonfinite").signature
SAME = Judgement("wrong", "again", (Fault(FAULT, "again"),), REPORT)
OTHER = Judgement("nonfinite", "another", (Fault(ANOTHER, "another"),), REPORT)
BOTH = Judgement("nonfinite", "another", (*OTHER.faults, *SAME.faults), REPORT)
CLEAN = Judgement("ok", report=REPORT)
LOSSY = Judgement("lossy:one_pass_variance", report=REPORT)
REFUSED = Judgement("unsupported", "documented")


@pytest.mark.parametrize(
    ("status", "now", "as_expected", "expected", "got"),
    [
        ("open", SAME, True, str(FAULT), str(FAULT)),
        ("open", OTHER, False, str(FAULT), str(ANOTHER)),
        ("open", BOTH, True, str(FAULT), f"{ANOTHER}, {FAULT}"),
        ("open", CLEAN, False, str(FAULT), "ok"),
        ("open", REFUSED, False, str(FAULT), "unsupported"),
        ("convention", SAME, True, str(FAULT), str(FAULT)),
        ("convention", CLEAN, False, str(FAULT), "ok"),
        ("fixed", CLEAN, True, "no fault", "ok"),
        ("fixed", LOSSY, True, "no fault", "lossy:one_pass_variance"),
        ("fixed", SAME, False, "no fault", str(FAULT)),
        ("fixed", OTHER, False, "no fault", str(ANOTHER)),
        ("fixed", REFUSED, False, "no fault", "unsupported"),
    ],
)
def test_what_a_status_promises(status: Status, now: Judgement, as_expected: bool, expected: str, got: str) -> None:
    r = compare(entry(status=status), now)
    assert (r.as_expected, r.expected, r.got, r.sentence) == (as_expected, expected, got, now.sentence)
    assert (r.id, r.status) == (entry().id, status)


@pytest.mark.parametrize(
    ("status", "now", "outcome"),
    [
        ("open", SAME, "fails"),
        ("open", BOTH, "fails"),
        ("open", CLEAN, "passes"),
        ("open", LOSSY, "passes"),
        ("open", OTHER, ""),
        ("open", REFUSED, ""),
        ("convention", SAME, ""),
        ("fixed", CLEAN, ""),
    ],
)
def test_what_a_history_says_of_a_run(status: Status, now: Judgement, outcome: str) -> None:
    assert compare(entry(status=status), now).outcome == outcome


def test_entries_are_run_in_their_own_framework() -> None:
    entries = [entry(UIB, "fixed"), entry(SMALLEST, "open")]
    with InProcess(["numpy"]) as runner:
        results = list(replay(entries, runner))
    assert [(r.id, r.got, r.as_expected) for r in results] == [
        (entries[0].id, "ok", True),
        (entries[1].id, "ok", False),
    ]


def test_a_path_is_a_folder_or_a_file(tmp_path: Path) -> None:
    assert entries_at(tmp_path) == []
    path = Corpus(tmp_path).save(entry())
    assert entries_at(tmp_path) == entries_at(path) == [entry()]
    with pytest.raises(CorpusError, match="gone: no such file or folder"):
        entries_at(tmp_path / "gone")
