"""The journal: what is pending, what is done, who owns a file, and what a torn line costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diffgrad.corpus import CorpusError
from diffgrad.journal import FOLDER, Journal, Pending, forget, ownerless, recover
from tests.helpers import SMALLEST, UIB


def test_a_case_that_began_and_is_not_done_is_pending_once_its_campaign_is_gone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for name in ("torch", "jax"):
        journal.begin(name, UIB)
        journal.begin(name, SMALLEST)
    journal.done("torch", UIB)
    journal.done("jax", SMALLEST)
    assert recover(tmp_path) == []  # its owner lives
    forget(ownerless(tmp_path))
    journal.abandon()
    assert set(recover(tmp_path)) == {Pending("torch", SMALLEST), Pending("jax", UIB)}
    forget(ownerless(tmp_path))
    assert recover(tmp_path) == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_campaign_that_ends_in_good_order_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin("torch", UIB)
    journal.begin("torch", UIB)  # drawn twice
    journal.done("torch", UIB)
    journal.close()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_what_is_pending_at_a_good_end_stays_pending(tmp_path: Path) -> None:
    """A case of a framework that the present campaign does not run."""
    journal = Journal(tmp_path)
    journal.begin("torch", UIB)
    journal.close()
    assert recover(tmp_path) == [Pending("torch", UIB)]


def test_a_campaign_killed_while_others_are_recovered_is_not_forgotten(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    first.begin("torch", UIB)
    second.begin("torch", SMALLEST)
    first.abandon()
    gone = ownerless(tmp_path)
    second.abandon()
    forget(gone)
    assert recover(tmp_path) == [Pending("torch", SMALLEST)]


def test_campaigns_that_a_case_ended_are_counted(tmp_path: Path) -> None:
    """Not those that were done with it, nor how often one began it."""
    for cases in ([UIB, SMALLEST], [UIB, UIB]):
        journal = Journal(tmp_path)
        journal.begin("torch", SMALLEST)
        journal.done("torch", SMALLEST)
        for case in cases:
            journal.begin("torch", case)
        journal.abandon()
    assert set(recover(tmp_path)) == {Pending("torch", UIB, 2), Pending("torch", SMALLEST, 1)}


def test_a_torn_line_is_a_case_that_never_began(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin("torch", UIB)
    os.write(journal._file, b'{"begin":"torch","id":"x","case":{"block":{"ki')
    journal.abandon()
    (tmp_path / FOLDER / "other.jsonl").write_bytes(b"[]\n{}\nnull\n\xff\n")
    assert recover(tmp_path) == [Pending("torch", UIB)]


def test_a_corpus_without_a_journal_has_nothing_pending(tmp_path: Path) -> None:
    assert recover(tmp_path) == []
    forget(ownerless(tmp_path))


def test_no_case_runs_that_could_not_be_recorded(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(CorpusError, match=r"cases could not be recorded there \(File exists\)"):
        Journal(tmp_path)


def test_a_full_disk_is_one_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin("torch", UIB)
    os.close(journal._file)
    journal._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(CorpusError, match=r"could not be recorded \(No space left on device\).* make room"):
        journal.begin("torch", SMALLEST)
    journal.abandon()
