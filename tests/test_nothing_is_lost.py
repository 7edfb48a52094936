"""Processes killed for real: the next run finds what was pending, runs it and says what it is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from diffgrad.corpus import Corpus
from diffgrad.journal import FOLDER, recover
from tests.helpers import ROOT, entry, ordinary

FAULTY = """
import os, time
from diffgrad.adapters import numpy
from diffgrad.adapters.numpy_tape import Var

class Planted(numpy.NumpyAdapter):
    def add(self, a, b):
        mark = os.environ.get("PLANTED_SLEEP")
        if mark and not os.path.exists(mark):
            open(mark, "w").close()
            time.sleep(600)
        return Var(a.value + b.value, (a, b), lambda dy: (dy, 2 * dy))

numpy.adapter = lambda quick=False: Planted()
"""
HOOK = """
import importlib.abc, sys
class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "diffgrad.serve":
            sys.meta_path.remove(self)
            import planted
sys.meta_path.insert(0, Late())
"""


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment in which NumPy's worker doubles the skip's cotangent, after sleeping once if it is told to."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "planted.py").write_text(FAULTY)
    (folder / "sitecustomize.py").write_text(HOOK)
    return {**os.environ, "PYTHONPATH": str(folder)}


def fuzz(corpus: Path, env: dict[str, str], *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "diffgrad.cli", "fuzz", "--adapter", "numpy", "--block", "uib", "--seed", "3"]
    command += ["--seconds", "2", "--dtype", "float32", "--corpus", str(corpus), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def kill(process: subprocess.Popen[str]) -> None:
    """The campaign only; its worker notices that it is alone."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not come")


def findings(corpus: Path) -> list[str]:
    return [str(e.signature) for e in Corpus(corpus).entries()]


SIGNATURE = "numpy/eager/float32/copy+add/wrong/cotangent"


@pytest.mark.timeout(180)
def test_a_campaign_killed_while_a_case_runs(tmp_path: Path, planted: dict[str, str]) -> None:
    corpus, mark = tmp_path / "corpus", tmp_path / "sleeping"
    process = fuzz(corpus, {**planted, "PLANTED_SLEEP": str(mark)})
    wait_for(mark)
    kill(process)
    pending = recover(corpus)
    assert pending
    assert findings(corpus) == []
    after = tmp_path / "after.json"
    again = fuzz(corpus, planted, "--json", str(after))
    again.communicate(timeout=120)
    assert again.returncode == 1
    assert findings(corpus) == [SIGNATURE]
    assert msgspec.json.decode(after.read_bytes())["recovered"] == len(pending)
    assert recover(corpus) == []


@pytest.mark.timeout(180)
def test_a_campaign_killed_while_it_shrinks(tmp_path: Path, planted: dict[str, str]) -> None:
    """The sleep comes at the first run whatever it is for; killed later, the hunt's own case is pending."""
    corpus = tmp_path / "corpus"
    process = fuzz(corpus, planted, "--seconds", "30")
    for _ in range(600):
        lines = [p.read_text().count('"begin"') for p in (corpus / FOLDER).glob("*.jsonl")]
        if sum(lines) > 3 or process.poll() is not None:
            break
        time.sleep(0.01)
    kill(process)
    found_before = findings(corpus)
    again = fuzz(corpus, planted)
    again.communicate(timeout=120)
    assert set(findings(corpus)) >= {SIGNATURE, *found_before}


@pytest.mark.timeout(180)
def test_a_disk_without_room_ends_in_a_sentence_and_the_next_run_goes_on(
    tmp_path: Path, planted: dict[str, str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()

    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    command = [sys.executable, "-m", "diffgrad.cli", "fuzz", "--adapter", "numpy", "--block", "uib", "--seed", "3"]
    command += ["--seconds", "2", "--dtype", "float32", "--corpus", str(corpus), "--in-process"]
    clean = {k: v for k, v in planted.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        command, env=clean, cwd=ROOT, preexec_fn=small, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "File too large" in ran.stderr
    assert findings(corpus) == []
    assert list(corpus.glob(".new-*")) == []
    again = fuzz(corpus, planted)
    again.communicate(timeout=120)
    assert findings(corpus) == [SIGNATURE]
    assert recover(corpus) == []


@pytest.mark.timeout(240)
def test_a_test_process_of_xdist_that_is_killed_leaves_its_case(tmp_path: Path, planted: dict[str, str]) -> None:
    corpus, mark = tmp_path / "corpus", tmp_path / "sleeping"
    (tmp_path / "test_fuzzing.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from diffgrad.campaign import Campaign\n"
        "from diffgrad.corpus import Corpus\n"
        "from diffgrad.worker import Workers\n"
        "def test_it():\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        f"    corpus = Corpus(Path({str(corpus)!r}))\n"
        "    corpus.prepare()\n"
        "    with Workers(['numpy']) as workers:\n"
        "        Campaign(workers, corpus, ['uib'], ['float32']).run(3, examples=5)\n"
    )
    env = {**planted, "PLANTED_SLEEP": str(mark)}
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", str(tmp_path / "test_fuzzing.py")]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(mark)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    wait_for_pending(corpus)
    process.kill()
    process.communicate()
    again = fuzz(corpus, planted)
    again.communicate(timeout=120)
    assert findings(corpus) == [SIGNATURE]


def wait_for_pending(corpus: Path) -> None:
    for _ in range(100):
        if recover(corpus):
            return
        time.sleep(0.1)
    raise AssertionError("nothing is pending")


@pytest.mark.timeout(240)
def test_two_campaigns_on_one_corpus(tmp_path: Path, planted: dict[str, str]) -> None:
    corpus = tmp_path / "corpus"
    both = [fuzz(corpus, planted) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=180)
        assert process.returncode in (0, 1), err
    assert set(findings(corpus)) == {SIGNATURE}
    index = (corpus / "INDEX.md").read_text()
    assert all(path.stem in index for path in Corpus(corpus).paths())
    assert recover(corpus) == []


WRITER = """
import sys
from pathlib import Path
from diffgrad.corpus import Corpus, read_entry
corpus = Corpus(Path(sys.argv[1]))
for path in sys.argv[2:]:
    corpus.save(read_entry(Path(path)))
    corpus.write_index()
"""


@pytest.mark.timeout(120)
def test_eight_writers_at_once(tmp_path: Path) -> None:
    source, corpus = Corpus(tmp_path / "source"), Corpus(tmp_path / "corpus")
    source.prepare()
    corpus.prepare()
    for kind in ("uib", "convnext", "encoder", "loss", "op_bn", "op_ln", "op_act", "op_conv"):
        for name in ("torch", "jax"):
            source.save(entry(ordinary(kind), adapter=name))
    paths = [str(p) for p in source.paths()]
    assert len(paths) == 16
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(corpus.folder), *paths[i::8], *paths[:4]], cwd=ROOT)
        for i in range(8)
    ]
    assert [w.wait(timeout=100) for w in writers] == [0] * 8
    assert [p.name for p in corpus.paths()] == [p.name for p in source.paths()]
    index = (corpus.folder / "INDEX.md").read_text()
    assert all(p.stem in index for p in corpus.paths())
    with contextlib.suppress(FileNotFoundError):
        assert not list(corpus.folder.glob(".new-*"))
