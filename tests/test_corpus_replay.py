"""The committed corpus: every saved case still gives what its entry says, and the index is up to date."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from diffgrad.corpus import Corpus, read_entry
from diffgrad.replay import replay
from tests.conftest import GetWorkers
from tests.helpers import CORPUS

# By framework, so that the process that has started one goes on with it.
PATHS = sorted(Corpus(CORPUS).paths(), key=lambda path: path.stem.split("-")[::-1])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_saved_case_gives_what_its_entry_says(path: Path, workers: GetWorkers) -> None:
    entry = read_entry(path)
    (result,) = replay([entry], workers(entry.signature.adapter))
    assert result.as_expected, f"expected {result.expected}, got {result.got}: {result.sentence}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_saved_case_is_named_by_its_id_and_explained(path: Path) -> None:
    entry = read_entry(path)
    assert path.stem == entry.id
    assert entry.status == "open" or entry.explanation


def test_the_index_is_what_would_be_written_now(tmp_path: Path) -> None:
    assert PATHS
    for path in PATHS:
        shutil.copy(path, tmp_path)
    Corpus(tmp_path).write_index()
    assert (tmp_path / "INDEX.md").read_text() == (CORPUS / "INDEX.md").read_text()
