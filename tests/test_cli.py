"""The command line: exit codes, the JSON's fields, and one sentence for everything that cannot be done."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from diffgrad import __version__, certify, cli, show
from diffgrad.adapters.numpy import NumpyAdapter
from diffgrad.adapters.registry import ADAPTERS, OFFERS
from diffgrad.campaign import Tally, summary
from diffgrad.certify import OPS, Certificate
from diffgrad.chains import CHAINS
from diffgrad.corpus import Corpus
from diffgrad.mutants import MUTANTS, Mutant, hunt
from diffgrad.worker import About, InProcess
from tests.helpers import NET, ROOT, UIB, entry

COMMANDS = [command.callback.__name__ for command in cli.app.registered_commands if command.callback]


class Ran(msgspec.Struct):
    code: int
    out: str
    err: str
    json: Any


@pytest.fixture
def diffgrad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """diffgrad(*arguments): the command in this process, on a wide terminal, with --json."""
    monkeypatch.setattr(show._out, "width", 300)

    def run(*arguments: str, json: bool = True) -> Ran:
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        words = [*arguments, *(("--json", str(file)) if json else ())]
        result = CliRunner().invoke(cli.app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        text = file.read_bytes() if file.exists() else b""
        return Ran(result.exit_code, result.stdout, result.stderr, msgspec.json.decode(text) if text else None)

    return run


Run = Callable[..., Ran]

SHORT = ("--in-process", "--adapter", "numpy", "--seconds", "1", "--seed", "1")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[NumpyAdapter]], None]:
    """load(cls): what is called numpy from now on."""
    return lambda cls: monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: cls())


FAULTY = next(m.adapter for m in MUTANTS if m.name == "fan_in_doubled")


# What makes no sense: one row each.

BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "a block that is none": (("fuzz", "--block", "uibb"), "--block uibb: unknown; it must be one of uib"),
    "an adapter that is none": (
        ("fuzz", "--adapter", "pytorch"),
        "--adapter pytorch: unknown; it must be one of torch, jax, tensorflow, numpy",
    ),
    "a dtype that is none": (
        ("fuzz", "--dtype", "float8"),
        "--dtype float8: unknown; it must be one of float32, float64, bfloat16, float16",
    ),
    "a mode that no framework has": (
        ("fuzz", *SHORT, "--mode", "fast"),
        "--mode fast: unknown; it must be one of eager",
    ),
    "a mode that another framework has": (
        ("fuzz", "--seconds", "1", "--adapter", "numpy", "--mode", "compile"),
        "--mode compile: no framework that is asked for has it (numpy has eager)",
    ),
    "a device that is none": (
        ("fuzz", *SHORT, "--device", "tpu"),
        "--device tpu: unknown; it must be one of cpu, cuda, auto",
    ),
    "a device that is not there": (
        ("fuzz", "--seconds", "1", "--adapter", "torch", "--device", "cuda"),
        "torch sees no CUDA device (it has cpu): use --device cpu or auto",
    ),
    "a corpus below a file": (
        ("fuzz", *SHORT, "--corpus", "{file}/corpus"),
        "{file}/corpus: findings could not be saved there (Not a directory); make it writable, or name another folder "
        "with --corpus",
    ),
    "a corpus with a damaged entry": (
        ("fuzz", *SHORT, "--corpus", "{damaged}"),
        "{damaged}/x.json: not a corpus entry (Input data was truncated); restore it, or delete the file",
    ),
    "a net that is none": (("tie", "resnet50"), "resnet50: no such net; known are mobilenetv4_conv_m"),
    "a net too small": (
        ("tie", "mobilenetv4_conv_m", "--image", "8"),
        "--image 8: the net halves the image five times",
    ),
    "a replay of nothing": (("replay", "{file}/x.json"), "{file}/x.json: no such file or folder"),
    "a replay of no entry": (("replay", "{file}"), "{file}: not a corpus entry (JSON is malformed: invalid character"),
    **{
        f"{command} with a JSON below a file": (
            (command, "--json", "{file}/out.json"),
            "--json {file}/out.json: cannot be written (Not a directory)",
        )
        for command in ("fuzz", "certify", "mutants", "doctor")
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_one_sentence_and_exit_2(
    name: str, diffgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"file": str(tmp_path / "file"), "damaged": str(tmp_path / "damaged")}
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "x.json").write_text("{")
    words, sentence = BAD[name]
    ran = diffgrad(*(w.format(**places) for w in words), json=False)
    assert (ran.code, ran.out.strip()) == (2, "")
    assert ran.err.startswith("diffgrad: " + sentence.format(**places))
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fuzz", "--seconds", "0"), "--seconds"),
        (("fuzz", "--seconds", "soon"), "--seconds"),
        (("fuzz", "--sed", "1"), "--sed"),
        (("mutants", "--clean", "0"), "--clean"),
        (("fuz",), "fuz"),
    ],
    ids=" ".join,
)
def test_bad_usage_names_the_option_and_exits_2(words: tuple[str, ...], said: str, diffgrad: Run) -> None:
    ran = diffgrad(*words, json=False)
    assert ran.code == 2
    assert said in ran.err


def test_every_command_writes_json(diffgrad: Run) -> None:
    assert {"doctor", "fuzz", "replay", "tie", "certify", "mutants"} <= set(COMMANDS)
    for command in COMMANDS:
        assert "--json" in diffgrad(command, "--help", json=False).out


def test_the_version(diffgrad: Run) -> None:
    assert diffgrad("--version", json=False).out == f"{__version__}\n"


# fuzz

FUZZ_FIELDS = {
    *("cases", "links_checked", "nodes_checked", "verdicts", "vacuous_share", "wall_s", "framework_cpu_s"),
    *("total_cpu_s", "new_findings", "known_findings"),
}


def test_a_clean_campaign_exits_0(diffgrad: Run, tmp_path: Path) -> None:
    ran = diffgrad("fuzz", *SHORT, "--corpus", str(tmp_path / "corpus"))
    assert (ran.code, ran.err) == (0, "")
    assert set(ran.json) >= FUZZ_FIELDS
    assert (ran.json["seed"], ran.json["new_findings"], ran.json["known_findings"]) == (1, [], [])
    assert ran.json["cases"] == sum(ran.json["verdicts"].values()) > 0
    assert ran.json["links_checked"] > 0 < ran.json["nodes_checked"]
    assert ran.json["total_cpu_s"] > ran.json["framework_cpu_s"]["numpy"] > 0
    assert "No fault found: every link of every run lies within its derived error bar." in ran.out
    assert ran.out.endswith("Again with the same cases: --seed 1\n")


def test_a_cheaper_algorithm_is_counted_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {"torch": Counter({"lossy:bf16_result": 2, "ok": 1}), "jax": Counter({"lossy:bf16_result": 1, "ok": 2})}
    tally = Tally(cases=3, verdicts=verdicts)
    show.fuzz(
        {"seed": 1, **summary(tally, Corpus(tmp_path))},
        {name: About({name: "1.0"}, ("cpu",), ("eager",)) for name in verdicts},
        interrupted=False,
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "lossy:bf16_result, 3x: 2 in torch, 1 in jax" in out
    assert "within its derived error bar, or within that of a named cheaper algorithm." in out


def test_findings_exit_1_once_and_0_when_they_are_known(
    diffgrad: Run, tmp_path: Path, load: Callable[[type[NumpyAdapter]], None]
) -> None:
    load(FAULTY)
    words = ("fuzz", *SHORT, "--dtype", "float32", "--block", "uib", "--corpus", str(tmp_path / "corpus"))
    ran = diffgrad(*words)
    assert ran.code == 1
    (found,) = ran.json["new_findings"]
    assert found["signature"] == "numpy/eager/float32/copy+add/wrong/cotangent"
    assert Path(found["file"]).is_file()
    assert "1 new finding, minimized and saved." in ran.out
    assert f"diffgrad replay {found['file']}" in ran.out
    again = diffgrad(*words)
    assert (again.code, again.json["new_findings"]) == (0, [])
    assert [k["signature"] for k in again.json["known_findings"]] == [found["signature"]]
    assert "Nothing new: every fault seen is in the corpus already." in again.out

    replayed = diffgrad("replay", found["file"], "--in-process")
    assert (replayed.code, replayed.json) == (0, {"cases": 1, "as_expected": 1, "changed": []})
    load(NumpyAdapter)
    mended = diffgrad("replay", str(tmp_path / "corpus"), "--in-process")
    assert (mended.code, mended.json["cases"], mended.json["as_expected"]) == (1, 1, 0)
    (changed,) = mended.json["changed"]
    assert (changed["id"], changed["got"], changed["status"]) == (found["id"], "ok", "open")
    assert f"changed {found['id']} (open): expected {found['signature']}, got ok" in mended.out


class Talkative(NumpyAdapter):
    """Fails in the words that frameworks use, which look like markup to a terminal library."""

    def relu(self, x: Any) -> Any:
        raise RuntimeError("no kernel for [bold] on [/device:CPU:0]")


def test_what_a_framework_says_is_shown_as_it_is(
    diffgrad: Run, tmp_path: Path, load: Callable[[type[NumpyAdapter]], None]
) -> None:
    load(Talkative)
    ran = diffgrad("fuzz", *SHORT, "--dtype", "float32", "--block", "uib", "--corpus", str(tmp_path / "corpus"))
    assert ran.code == 1
    said = "error: RuntimeError: no kernel for [bold] on [/device:CPU:0]"
    assert said in ran.out
    (found,) = ran.json["new_findings"]
    assert found["sentence"] == said
    path = Path(found["file"])
    path.write_text(path.read_text().replace('"open"', '"fixed"'))
    ran = diffgrad("replay", str(path), "--in-process")
    assert ran.code == 1
    assert said in ran.out


def test_an_interrupted_campaign_keeps_what_it_has(tmp_path: Path) -> None:
    out, corpus = tmp_path / "out.json", tmp_path / "corpus"
    options = ["--adapter", "numpy", "--seconds", "120", "--seed", "1", "--corpus", str(corpus), "--json", str(out)]
    command = [sys.executable, "-m", "diffgrad.cli", "fuzz", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not out.exists():  # it is made before the frameworks start
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "")
    assert "Interrupted; what was found until then is saved." in stdout
    assert msgspec.json.decode(out.read_bytes())["cases"] > 0


# The other commands.


def test_an_empty_corpus_replays_as_expected(diffgrad: Run, tmp_path: Path) -> None:
    ran = diffgrad("replay", str(tmp_path))
    assert (ran.code, ran.json) == (0, {"cases": 0, "as_expected": 0, "changed": []})


def test_a_replay_records_what_an_open_finding_does_and_nothing_unless_it_is_asked_to(
    diffgrad: Run, tmp_path: Path
) -> None:
    """A fault that is not there, of which another version is on record."""
    store = Corpus(tmp_path / "corpus")
    store.prepare()
    path = store.save(msgspec.structs.replace(entry(), history={"1.0": "fails"}))
    store.save(entry(UIB, "fixed"))
    before = path.read_bytes()
    assert diffgrad("replay", str(store.folder), "--in-process").code == 1
    assert path.read_bytes() == before
    assert diffgrad("replay", str(store.folder), "--in-process", "--record").code == 1
    assert [e.history for e in store.entries() if e.status == "open"] == [{"1.0": "fails", np.__version__: "passes"}]
    assert [e.history for e in store.entries() if e.status == "fixed"] == [{}]


def test_replay_runs_a_worker(diffgrad: Run, tmp_path: Path) -> None:
    path = Corpus(tmp_path).save(entry(UIB, "fixed"))
    ran = diffgrad("replay", str(path))
    assert (ran.code, ran.json["as_expected"]) == (0, 1)


def test_doctor_says_what_runs_and_why_something_does_not(
    diffgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ran = diffgrad("doctor")
    assert (ran.code, set(ran.json["adapters"])) == (0, set(ADAPTERS))
    assert ran.json["diffgrad"] == __version__
    for name, row in ran.json["adapters"].items():
        if name == "jax":
            assert row == {
                "runs": False,
                "why": "jax cannot be imported (No module named 'jax'): pip install 'diffgrad[jax]'",
            }
        else:
            assert row["runs"] is True
            assert name in row["versions"]
            assert tuple(row["modes"]) == OFFERS[name].modes
            assert row["devices"]
    assert "pip install 'diffgrad[jax]'" in ran.out


@pytest.mark.parametrize(("adapter", "code"), [(NumpyAdapter, 0), (FAULTY, 1)], ids=["healthy", "faulty"])
def test_tie_reports_every_node(
    adapter: type[NumpyAdapter],
    code: int,
    diffgrad: Run,
    load: Callable[[type[NumpyAdapter]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a small net, in this process; the documented one takes a while."""
    load(adapter)
    monkeypatch.setattr(cli, "net_spec", lambda *sizes: NET)
    monkeypatch.setattr(cli, "Workers", lambda names, advice, device: InProcess(names))
    ran = diffgrad("tie", "mobilenetv4_conv_m", "--adapter", "numpy")
    nodes = len(NET.parameters())
    assert (ran.code, ran.json["net"], ran.json["nodes"]) == (code, "mobilenetv4_conv_m", nodes)
    result = ran.json["adapters"]["numpy"]
    assert {"tied", "wrong", "max_err_over_bar"} <= set(result)
    assert (result["wrong"] == []) is (code == 0)
    assert code == 1 or result["tied"] == nodes
    assert f"{result['tied']} of {nodes} nodes tied" in ran.out


def test_certify_reports_its_residuals(diffgrad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("certify_op", "certify_block"):  # with fewer instances
        full = getattr(certify, name)
        monkeypatch.setattr(certify, name, lambda subject, full=full: full(subject, instances=2))
    ran = diffgrad("certify")
    assert (ran.code, ran.json["ops"], ran.json["blocks"]) == (0, len(OPS), len(CHAINS))
    assert set(ran.json["certificates"]) == {*OPS, *CHAINS}
    assert all(c["holds"] for c in ran.json["certificates"].values())
    assert ran.json["max_residual"] == max(c["residual"] for c in ran.json["certificates"].values())


@pytest.mark.parametrize("over_bar", [2.0, float("nan")])
def test_what_does_not_hold_exits_1(over_bar: float, diffgrad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "certify_all", lambda: ([Certificate("relu", 1, 0.5, over_bar)], []))
    ran = diffgrad("certify")
    assert (ran.code, ran.json["certificates"]["relu"]["holds"]) == (1, False)
    assert "FAILS" in ran.out


MUTANT_FIELDS = {"mutants", "killed", "survivors", "median_cases_to_kill", "clean_cases", "false_alarms"}
SURVIVOR = Mutant("none", "no fault at all", NumpyAdapter, ("conv2d",))
MISBLAMED = MUTANTS[0]._replace(name="misblamed", blame=("conv2d",))


@pytest.mark.parametrize(
    ("table", "code", "killed", "survivors", "misblamed", "said"),
    [
        (MUTANTS[:2], 0, 2, [], [], "2 of 2 killed; 5 clean cases, 0 false alarms."),
        ((MUTANTS[0], SURVIVOR), 1, 1, ["none"], [], "SURVIVED"),
        ((MISBLAMED,), 1, 1, [], ["misblamed"], "(the wrong link)"),
    ],
    ids=["all killed", "a survivor", "a wrong blame"],
)
def test_mutants(
    table: tuple[Mutant, ...],
    code: int,
    killed: int,
    survivors: list[str],
    misblamed: list[str],
    said: str,
    diffgrad: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "MUTANTS", table)
    monkeypatch.setattr(cli, "hunt", lambda mutant, seed: hunt(mutant, seed, most=10))
    ran = diffgrad("mutants", "--clean", "5")
    assert ran.code == code
    assert set(ran.json) >= MUTANT_FIELDS
    assert (ran.json["mutants"], ran.json["killed"]) == (len(table), killed)
    assert (ran.json["survivors"], ran.json["misblamed"]) == (survivors, misblamed)
    assert (ran.json["clean_cases"], ran.json["false_alarms"]) == (5, 0)
    assert said in ran.out


def test_a_false_alarm_exits_1(diffgrad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "MUTANTS", MUTANTS[:1])
    monkeypatch.setattr(cli, "false_alarms", lambda blocks, seed, clean: (clean, ["a case: a sentence"]))
    ran = diffgrad("mutants", "--clean", "3")
    assert (ran.code, ran.json["false_alarms"]) == (1, 1)
    assert "false alarm a case: a sentence" in ran.out
