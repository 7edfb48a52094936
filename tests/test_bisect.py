"""Bisection: the search on tables of outcomes, pip and its environments on tiny wheels made here, and what is said."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from diffgrad.bisect import (
    BisectError,
    Bisection,
    Ends,
    Trial,
    Tried,
    Verdict,
    bisect,
    package_of,
    remember,
    search,
    verdict_of,
)
from diffgrad.commands.bisect import bisect as command
from diffgrad.corpus import Corpus, CorpusError, Entry
from diffgrad.how import How
from diffgrad.releases import Environments, Pip, between, environments
from diffgrad.trace import Outcome
from diffgrad.worker import Answer
from tests.helpers import entry

WORDS: dict[str, Verdict] = {"f": "fails", "p": "passes", "s": "skipped"}
COMPILE_ERROR = "INVALID_ARGUMENT: Algorithm not supported: ALG_DOT_BF16_BF16_F32"


def searched(table: str) -> tuple[Ends | None, list[int]]:
    """The search's answer for releases that fail, pass or are skipped, and those that it tried."""
    tried: dict[int, Verdict] = {}

    def probe(i: int) -> Verdict:
        return tried.setdefault(i, WORDS[table[i]])

    return search(len(table), probe), list(tried)


@pytest.mark.parametrize(
    ("table", "ends", "most"),
    [
        ("fp", Ends(0, 1), 2),
        ("ppppppff", Ends(5, 6), 5),
        ("ffffffffffffffffpppppppppppppppp", Ends(15, 16), 7),
        ("pfffffffffffffff", Ends(0, 1), 6),
        ("ffff", Ends(0, 3), 2),
        ("pppp", Ends(0, 3), 2),
        ("sspf", Ends(2, 3), 4),
        ("pfs", Ends(0, 1), 3),
        ("ssssssssssffffpp", Ends(13, 14), 10),
        ("psssf", Ends(0, 4), 5),
        ("ppssff", Ends(1, 4), 6),
        ("sfs", Ends(1, 1), 3),
        ("sss", None, 3),
    ],
)
def test_the_nearest_two_that_differ_are_found_in_few_tries(table: str, ends: Ends | None, most: int) -> None:
    found, tried = searched(table)
    assert found == ends
    assert len(tried) <= most


def test_between_two_that_differ_nothing_is_left_to_try() -> None:
    for n in range(1, 8):
        for table in map("".join, itertools.product("fps", repeat=n)):
            found, _ = searched(table)
            if found is not None:
                low, high = table[found.low], table[found.high]
                assert "s" not in (low, high)
                assert low == high or set(table[found.low + 1 : found.high]) <= {"s"}, table


def test_one_change_is_found_wherever_it_is_and_whatever_cannot_run_at_the_ends() -> None:
    for before, after in ("fp", "pf"):
        for old, low, high, new in itertools.product(range(5), range(1, 5), range(1, 5), range(5)):
            found, _ = searched("s" * old + before * low + after * high + "s" * new)
            assert found == Ends(old + low - 1, old + low), (old, low, high, new)


def of_jax(verdict: str = "error", condition: str = "JaxRuntimeError", how: How | None = None) -> Entry:
    """An entry of a case that does not compile."""
    base = entry()
    return msgspec.structs.replace(
        base,
        case=msgspec.structs.replace(base.case, how=how or How()),
        signature=msgspec.structs.replace(
            base.signature, adapter="jax", mode="jit", link="run", verdict=verdict, condition=condition, how=""
        ),
        sentence=f"error: JaxRuntimeError: {COMPILE_ERROR}",
        versions={"jax": "0.10.2"},
    )


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("error", reason=f"JaxRuntimeError: {COMPILE_ERROR}"), "fails"),
        (Outcome("error", reason="JaxRuntimeError: INTERNAL: something else"), "skipped"),
        (Outcome("error", reason=f"XlaRuntimeError: {COMPILE_ERROR}"), "fails"),
        (Outcome("error", reason="JaxRuntimeError: INVALID_ARGUMENT: No such compile option: 'xla_new'"), "skipped"),
        (Outcome("error", reason="AttributeError: module 'jax.nn' has no attribute 'new'"), "skipped"),
        (Outcome("error", reason="TypeError: f() got an unexpected keyword argument 'new'"), "skipped"),
        (Outcome("error", reason="ValueError: something else"), "skipped"),
        (Outcome("hang", reason="no answer within 120 s"), "skipped"),
        (Outcome("unsupported", reason="has no float16 here"), "skipped"),
    ],
)
def test_an_error_is_the_finding_or_says_nothing(outcome: Outcome, verdict: str) -> None:
    finding = of_jax()
    said, reason = verdict_of(finding, Answer("jax", finding.case, outcome))
    assert said == verdict
    assert outcome.reason in reason


def wheels(folder: Path, *names: str) -> Path:
    """A folder of wheels, each with one module that knows its version."""
    folder.mkdir()
    for name in names:
        package, version = name.split("-")
        info = f"{package}-{version}.dist-info"
        parts = {
            f"{package}.py": f"VERSION = {version!r}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        parts[f"{info}/RECORD"] = "".join(f"{p},,\n" for p in (*parts, f"{info}/RECORD"))
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
            for path, text in parts.items():
                file.writestr(path, text)
    return folder


@pytest.fixture
def pip_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip without this machine's settings."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


@pytest.fixture
def local(tmp_path: Path, pip_env: pytest.MonkeyPatch) -> Path:
    """An index of this machine's own."""
    folder = wheels(tmp_path / "wheels", "tiny-1.0", "tiny-1.1", "tiny-1.2rc1", "jax-0.1", "jax-0.2")
    pip_env.setenv("PIP_NO_INDEX", "1")
    pip_env.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_index_that_cannot_be_reached_is_said(pip_env: pytest.MonkeyPatch) -> None:
    pip_env.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    with pytest.raises(BisectError, match=r"^pip cannot reach a package index \(NewConnectionError\)"):
        Pip(sys.executable).releases("jax", False)


def test_a_package_without_releases_is_said(local: Path) -> None:
    with pytest.raises(BisectError, match=r"^pip finds no release of absent \(No matching distribution found"):
        Pip(sys.executable).releases("absent", False)


def test_releases_are_listed_oldest_first_and_prereleases_on_request(local: Path) -> None:
    pip = Pip(sys.executable)
    assert list(map(str, pip.releases("tiny", False))) == ["1.0", "1.1"]
    assert list(map(str, pip.releases("tiny", True))) == ["1.0", "1.1", "1.2rc1"]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ("1.1", "1.0", "^--from 1.1: must be older than --to 1.0$"),
        ("1.0", "1.0", "^--from 1.0: must be older than --to 1.0$"),
        ("1.0", "7.0", "^--to 7.0: pip finds no such tiny for this Python, but 2 others, 1.0 to 1.1$"),
        ("0.1rc1", "1.1", "^--from 0.1rc1: pip finds no such tiny .*; --pre lists prereleases too$"),
        ("old", "1.1", "^--from old: not a version$"),
    ],
)
def test_a_range_without_sense_is_said(local: Path, low: str, high: str, message: str) -> None:
    with pytest.raises(BisectError, match=message):
        between(Pip(sys.executable).releases("tiny", False), "tiny", low, high)


def test_an_environment_is_made_once_and_whole(local: Path, tmp_path: Path) -> None:
    places = environments(sys.executable, tmp_path / "envs")
    python, reason = places.get("tiny", "1.1")
    assert python is not None, reason
    asked = [str(python), "-c", "import tiny; print(tiny.VERSION)"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "1.1\n"
    for wheel in local.iterdir():
        wheel.unlink()
    assert places.get("tiny", "1.1") == (python, "")
    missing, reason = places.get("tiny", "1.0")
    assert missing is None
    assert reason == "cannot be installed (No matching distribution found for tiny==1.0)"
    assert [p.name for p in places.folder.iterdir()] == [python.parent.parent.name] == [f"tiny-1.1-{places.tag}"]


def test_an_interrupted_install_leaves_no_environment(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(pip: Pip, *args: str) -> None:
        assert Path(pip.python).exists()
        raise KeyboardInterrupt

    places = environments(sys.executable, tmp_path / "envs")
    monkeypatch.setattr(Pip, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        places.get("tiny", "1.1")
    assert list(places.folder.iterdir()) == []


def test_an_interpreter_that_is_missing_or_no_python_is_said(tmp_path: Path) -> None:
    with pytest.raises(BisectError, match=r"^--python /no/python: there is no such interpreter$"):
        environments("/no/python", tmp_path)
    with pytest.raises(BisectError, match=r"^--python /bin/false: cannot make environments"):
        environments("/bin/false", tmp_path)


def test_a_cache_that_cannot_be_written_is_said(local: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BisectError, match=r"^--cache .*/file/envs: cannot be written \(Not a directory\)$"):
        environments(sys.executable, tmp_path / "file" / "envs").get("tiny", "1.0")


def test_the_package_is_the_framework_s_own() -> None:
    assert package_of(of_jax(), None) == package_of(of_jax(), "jax") == "jax"
    with pytest.raises(BisectError, match=r"--package torch: the finding is one of jax, which comes with jax$"):
        package_of(of_jax(), "torch")
    with pytest.raises(BisectError, match=r"a finding of numpy, which has no releases to bisect$"):
        package_of(entry(), None)
    with pytest.raises(BisectError, match=r"it shows on cuda, and releases are compared on a CPU only$"):
        package_of(of_jax(how=How(device="cuda")), None)


class Table(Trial):
    """Outcomes that are known beforehand."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        super().__init__(of_jax(), "jax", Environments(Pip(""), "", Path()), lambda _: None)
        self.verdicts = verdicts

    def _try(self, version: str) -> Tried:
        return Tried(version, self.verdicts[int(version[2:])], "why", version)


def bisected(table: str) -> Bisection:
    versions = [f"0.{i}" for i in range(len(table))]
    return bisect(of_jax(), "jax", versions, Table([WORDS[c] for c in table]))


@pytest.mark.parametrize(
    ("table", "change", "good", "bad", "sentence"),
    [
        ("ppff", "regression", "0.1", "0.2", "last good release jax 0.1, first bad release jax 0.2"),
        ("ffpp", "fix", "0.2", "0.1", "last bad release jax 0.1, first good release jax 0.2"),
        (
            "fssp",
            "fix",
            "0.3",
            "0.0",
            "last bad release jax 0.0, first good release jax 0.3; between them 0.1, 0.2 cannot run it",
        ),
        ("ffff", "none", "", "0.3", "no change between jax 0.0 and 0.3: it fails in both"),
        ("ppp", "none", "0.2", "", "no change between jax 0.0 and 0.2: it passes in both"),
        (
            "spp",
            "none",
            "0.2",
            "",
            "no change between jax 0.1 and 0.2: it passes in both; what was tried of the releases beyond cannot run it",
        ),
        (
            "ssf",
            "none",
            "",
            "0.2",
            "only jax 0.2 can run it, and there it fails; what was tried of the releases beyond cannot run it",
        ),
    ],
)
def test_the_answer_in_words(table: str, change: str, good: str, bad: str, sentence: str) -> None:
    found = bisected(table)
    assert (found.change, found.good, found.bad, found.sentence) == (change, good, bad, sentence)


def test_where_nothing_runs_there_is_no_answer() -> None:
    with pytest.raises(BisectError, match=r"none of the 3 releases tried can run it; the first: why$"):
        bisected("sss")


def test_what_was_tried_is_added_to_the_history(tmp_path: Path) -> None:
    store = Corpus(tmp_path)
    finding = msgspec.structs.replace(of_jax(), history={"0.3": "passes"})
    path = store.save(finding)
    remember(store, finding.id, bisected("fsspp").tried)
    # 0.1 and 0.2 were skipped.
    history = {"0.0": "fails", "0.3": "passes", "0.4": "passes"}
    assert store.find(finding.id) == msgspec.structs.replace(finding, history=history)
    text = path.read_bytes()
    remember(store, finding.id, [Tried("0.1", "skipped")])
    assert path.read_bytes() == text


class Here(Environments):
    """This interpreter, whatever the release."""

    def get(self, package: str, version: str, beside: Sequence[str] = ()) -> tuple[Path | None, str]:
        return Path(sys.executable), ""


def test_a_release_is_tried_in_a_worker_and_must_be_the_one_that_runs() -> None:
    trial = Trial(entry(), "numpy", Here(Pip(sys.executable), "", Path()), lambda _: None)
    assert trial(np.__version__) == "passes"
    assert trial.tried[np.__version__].framework == np.__version__
    with pytest.raises(BisectError, match=rf"numpy {np.__version__} runs there instead of 1\.0$"):
        trial("1.0")


def run(*words: str) -> BaseException | None:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, words).exception


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zzz", "--from", "0.1", "--to", "0.2"), "zzz: no entry of .* begins so"),
        (("{id}", "--from", "0.2", "--to", "0.1"), "--from 0.2: must be older than --to 0.1"),
        (("{id}", "--from", "0.1", "--to", "0.9"), "--to 0.9: pip finds no such jax"),
        (("{id}", "--from", "0.1", "--to", "0.2", "--python", "/no/python"), "there is no such interpreter"),
        (("{id}", "--from", "0.1", "--to", "0.2"), r"none of the 2 releases tried .*No matching distribution found"),
    ],
)
def test_trouble_is_one_sentence_and_leaves_the_corpus_alone(
    words: tuple[str, ...], message: str, local: Path, tmp_path: Path
) -> None:
    store = Corpus(tmp_path / "corpus")
    store.prepare()
    path = store.save(of_jax())
    text = path.read_bytes()
    folders = ("--corpus", str(store.folder), "--cache", str(tmp_path / "envs"))
    error = run(*(w.format(id=of_jax().id) for w in words), *folders)
    assert isinstance(error, BisectError | CorpusError)
    with pytest.raises(type(error), match=message):
        raise error
    assert "\n" not in str(error)
    assert path.read_bytes() == text
    assert list(store.paths()) == [path]
