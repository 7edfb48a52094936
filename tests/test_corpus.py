"""The corpus: whole files or none, one sentence for every file that is not an entry, and nothing overwritten."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from diffgrad.case import Case
from diffgrad.corpus import Corpus, CorpusError, Entry, entry_to_json, read_entry
from diffgrad.strategies import cases
from diffgrad.values import Values
from tests.helpers import ROOT, SMALLEST, UIB, entry

ENTRY = entry(UIB)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


@given(cases())
def test_an_entry_survives_its_json(case: Case) -> None:
    one = entry(case)
    raw = msgspec.json.decode(entry_to_json(one))
    assert list(raw)[:3] == ["schema", "id", "case"]
    assert raw["id"] == one.id == f"{case.id}-numpy-batchnorm-gradient"
    assert msgspec.convert({k: v for k, v in raw.items() if k != "id"}, Entry) == one


def test_the_file_format_is_pinned(corpus: Corpus) -> None:
    text = corpus.save(entry()).read_text()
    assert text == entry_to_json(entry()).decode()
    assert text.splitlines()[:12] == [
        "{",
        '  "schema": 1,',
        f'  "id": "{entry().id}",',
        '  "case": {',
        '    "schema": 1,',
        '    "block": {',
        '      "kind": "uib",',
        '      "n": 1,',
        '      "h": 1,',
        '      "w": 2,',
        '      "c": 1',
        "    }",
    ]
    assert text.endswith("}\n")


def test_what_is_saved_is_read_back_in_a_fixed_order(corpus: Corpus) -> None:
    saved = [entry(msgspec.structs.replace(SMALLEST, values=Values(seed=s))) for s in range(5)]
    paths = [corpus.save(e) for e in saved]
    assert corpus.paths() == sorted(paths)
    assert list(corpus.entries()) == sorted(saved, key=lambda e: e.id)
    assert oct(paths[0].stat().st_mode & 0o777) == "0o644"


def test_an_existing_entry_is_kept_since_a_person_may_have_judged_it(corpus: Corpus) -> None:
    judged = msgspec.structs.replace(ENTRY, status="fixed", explanation="mended")
    path = corpus.save(judged)
    assert corpus.save(ENTRY) == path
    assert read_entry(path) == judged


# Files that are not entries: one row each.

Change = Callable[[dict[str, Any]], Any]


def put(**fields: Any) -> Change:
    return lambda raw: raw | fields


def put_in(part: str, **fields: Any) -> Change:
    return lambda raw: raw | {part: raw[part] | fields}


def without(name: str) -> Change:
    return lambda raw: {k: v for k, v in raw.items() if k != name}


BAD: dict[str, tuple[Change, str]] = {
    "a field that does not exist": (put(note="x"), "(Object contains unknown field `note`)"),
    "a field of the case that does not exist": (put_in("case", seed=1), "(Object contains unknown field `seed`)"),
    "a newer schema": (put(schema=2), "(schema = 2: written by a newer diffgrad; this one reads up to 1"),
    "a newer schema of the case": (put_in("case", schema=2), "(schema = 2: written by a newer diffgrad;"),
    "a status that does not exist": (put(status="opne"), "(status = 'opne': Invalid enum value 'opne')"),
    "no case": (without("case"), "(no field 'case')"),
    "a case that is no object": (put(case=3), "(a case must be a JSON object, not int)"),
    "no signature": (without("signature"), "(Object missing required field `signature`)"),
    "a signature without a mode": (
        lambda raw: raw | {"signature": without("mode")(raw["signature"])},
        "(signature: Object missing required field `mode`)",
    ),
    "a case that makes no sense": (
        lambda raw: put_in("case", block=raw["case"]["block"] | {"n": 0})(raw),
        "(uib.n = 0: must be at least 1)",
    ),
    "not an object": (lambda raw: [raw], "(a case must be a JSON object, not list)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_entry_is_named_with_its_reason(name: str, corpus: Corpus) -> None:
    change, reason = BAD[name]
    path = corpus.save(ENTRY)
    path.write_bytes(msgspec.json.encode(change(msgspec.json.decode(path.read_bytes()))))
    with pytest.raises(CorpusError) as e:
        list(corpus.entries())
    assert str(e.value).startswith(f"{path}: not a corpus entry ({reason[1:]}")
    assert str(e.value).endswith("); restore it, or delete the file")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (entry_to_json(ENTRY)[:-20], "not a corpus entry (Input data was truncated)"),
        (b"", "not a corpus entry (Input data was truncated)"),
        (b"\xff\xfe", "not a corpus entry ("),
        (b"<<<<<<< HEAD\n", "not a corpus entry (JSON is malformed"),
    ],
    ids=["truncated", "empty", "binary", "conflict"],
)
def test_a_damaged_file_is_named(data: bytes, reason: str, corpus: Corpus) -> None:
    path = corpus.save(ENTRY)
    path.write_bytes(data)
    with pytest.raises(CorpusError) as e:
        read_entry(path)
    assert str(e.value).startswith(f"{path}: {reason}")


def test_a_case_edited_by_hand_is_noticed(corpus: Corpus) -> None:
    path = corpus.save(ENTRY)
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    other = entry(msgspec.structs.replace(UIB, values=Values(seed=2)))
    with pytest.raises(CorpusError) as e:
        read_entry(path)
    assert str(e.value) == (
        f"{path}: its case was edited (id says {ENTRY.id}, the case hashes to {other.id}); restore it, "
        "or rename the file and correct the id"
    )


def test_what_cannot_be_read_is_named(corpus: Corpus) -> None:
    gone, folder = corpus.folder / "gone.json", corpus.folder / "folder.json"
    folder.mkdir()
    for path, reason in ((gone, "No such file or directory"), (folder, "Is a directory")):
        with pytest.raises(CorpusError) as e:
            read_entry(path)
        assert str(e.value) == f"{path}: cannot be read ({reason})"


# Writing. The tests may run as root, whom no mode bits stop; a folder below a regular file cannot be written by anyone.


@pytest.fixture
def nowhere(tmp_path: Path) -> Corpus:
    (tmp_path / "file").write_text("in the way")
    return Corpus(tmp_path / "file" / "corpus")


def test_a_folder_that_cannot_be_written_is_found_out_before_the_search(nowhere: Corpus) -> None:
    with pytest.raises(CorpusError) as e:
        nowhere.prepare()
    assert str(e.value) == (
        f"{nowhere.folder}: findings could not be saved there (Not a directory); make it writable, "
        "or name another folder with --corpus"
    )


@pytest.mark.parametrize("write", [lambda c: c.save(ENTRY), Corpus.write_index], ids=["entry", "index"])
def test_a_write_to_such_a_folder_is_one_sentence(write: Callable[[Corpus], object], nowhere: Corpus) -> None:
    with pytest.raises(CorpusError, match=r"could not be written \(Not a directory\); nothing was changed"):
        write(nowhere)


def test_prepare_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "a" / "b")
    corpus.prepare()
    assert list(corpus.folder.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_half_way_leaves_nothing_behind(
    step: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.save(entry())
    corpus.write_index()
    before = {p.name: p.read_bytes() for p in corpus.folder.iterdir()}

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    for write in (lambda: corpus.save(ENTRY), corpus.write_index):
        with pytest.raises(CorpusError, match=r"could not be written \(No space left on device\); nothing was changed"):
            write()
    assert {p.name: p.read_bytes() for p in corpus.folder.iterdir()} == before


WRITER = """
import sys
from pathlib import Path
from diffgrad.corpus import Corpus
from diffgrad.values import Values
import msgspec
from tests.helpers import UIB, entry
corpus = Corpus(Path(sys.argv[1]))
for seed in range(25):
    corpus.save(entry(msgspec.structs.replace(UIB, values=Values(seed=seed))))
    corpus.write_index()
"""


def test_several_processes_may_write_the_same_entries_at_once(corpus: Corpus) -> None:
    command = [sys.executable, "-c", WRITER, str(corpus.folder)]
    writers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    seen = 0
    while any(w.poll() is None for w in writers):
        seen = max(seen, sum(1 for _ in corpus.entries()))  # a reader never sees half a file
    for w in writers:
        _, errors = w.communicate()
        assert w.returncode == 0, errors
    assert len(list(corpus.entries())) == 25 >= seen
    assert {p.suffix for p in corpus.folder.iterdir()} == {".json", ".md"}
    assert (corpus.folder / "INDEX.md").read_text().count("| open |") == 25


def test_the_index_says_in_words_what_each_entry_is(corpus: Corpus) -> None:
    corpus.save(entry())
    corpus.save(msgspec.structs.replace(ENTRY, status="fixed", explanation="False alarm, mended."))
    corpus.write_index()
    text = (corpus.folder / "INDEX.md").read_text()
    assert text.startswith("# Saved counterexamples\n")
    for row in (
        f"| [{ENTRY.id}]({ENTRY.id}.json) | fixed | numpy | uib | batchnorm | wrong | False alarm, mended. |",
        f"| [{entry().id}]({entry().id}.json) | open | numpy | uib | batchnorm | wrong | {entry().sentence} |",
    ):
        assert row in text.splitlines()


def test_whatever_a_framework_says_is_one_row_of_the_index(corpus: Corpus) -> None:
    corpus.save(msgspec.structs.replace(ENTRY, sentence="error: ValueError: a | b\n  at line 1\r\n  at line 2"))
    corpus.write_index()
    rows = [line for line in (corpus.folder / "INDEX.md").read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == 1
    assert rows[0].endswith("at line 2 |")
    assert rows[0].replace("\\|", "").count("|") == 8


@pytest.mark.parametrize(
    ("link", "condition", "name"),
    [
        ("batchnorm", "gradient", "batchnorm-gradient"),
        ("copy+add", "cotangent", "copy_add-cotangent"),
        ("conv2d", "gradient shape", "conv2d-gradient"),
        ("run", "NotImplementedError", "run-notimplementederror"),
    ],
)
def test_an_id_is_a_file_name_that_says_what_is_wrong(link: str, condition: str, name: str) -> None:
    assert entry(link=link, condition=condition).id == f"{SMALLEST.id}-numpy-{name}"


def test_what_is_still_there_is_known(corpus: Corpus) -> None:
    for status, seed in (("open", 1), ("fixed", 2), ("convention", 3)):
        case = msgspec.structs.replace(SMALLEST, values=Values(seed=seed))
        corpus.save(entry(case, status, condition=f"gradient {seed}"))  # type: ignore[arg-type]
    assert corpus.known() == {f"numpy/eager/float32/batchnorm/wrong/gradient {seed}" for seed in (1, 3)}


def test_a_signature_reads_as_a_path() -> None:
    assert str(ENTRY.signature) == "numpy/eager/float32/batchnorm/wrong/gradient"
