"""Processes killed for real: the next run finds what was pending, runs it and says what it is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from diffgrad.corpus import Corpus
from diffgrad.journal import recover
from tests.helpers import ROOT, entry, ordinary

FAULTY = """
import os, time
from diffgrad.adapters import numpy
from diffgrad.adapters.numpy_tape import Var

class Planted(numpy.NumpyAdapter):
    quick = True

    def add(self, a, b):
        mark = os.environ.get("PLANTED_SLEEP_QUICK" if self.quick else "PLANTED_SLEEP")
        if mark and not os.path.exists(mark):
            with open(mark + "~", "w") as f:
                f.write(str(os.getpid()))
            os.rename(mark + "~", mark)
            time.sleep(600)
        return Var(a.value + b.value, (a, b), lambda dy: (dy, 2 * dy))

def adapter(quick=False):
    planted = Planted()
    planted.quick = quick
    return planted

numpy.adapter = adapter
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
    """The environment in which NumPy's worker doubles the skip's cotangent.

    It is told to sleep once: with PLANTED_SLEEP_QUICK at the first case, with PLANTED_SLEEP when a fault is confirmed.
    """
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "planted.py").write_text(FAULTY)
    (folder / "sitecustomize.py").write_text(HOOK)
    return {**os.environ, "PYTHONPATH": str(folder)}


def fuzz(
    corpus: Path, env: dict[str, str], *more: str, first: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    """A campaign in a process of its own, which calls ``first`` before anything else."""
    command = [sys.executable, "-m", "diffgrad.cli", "fuzz", "--adapter", "numpy", "--block", "uib", "--seed", "3"]
    command += ["--seconds", "2", "--dtype", "float32", "--corpus", str(corpus), *more]
    out = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=out, stderr=out, text=True, start_new_session=True, preexec_fn=first
    )


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
    process = fuzz(corpus, {**planted, "PLANTED_SLEEP_QUICK": str(mark)})
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
    """What is pending by then is the case that the hunt began with; the other cases are done with."""
    corpus, mark = tmp_path / "corpus", tmp_path / "sleeping"
    process = fuzz(corpus, {**planted, "PLANTED_SLEEP": str(mark)}, "--seconds", "30")
    wait_for(mark)
    kill(process)
    assert len(recover(corpus)) == 1
    assert findings(corpus) == []
    after = tmp_path / "after.json"
    again = fuzz(corpus, planted, "--seconds", "1", "--json", str(after))
    again.communicate(timeout=120)
    assert findings(corpus) == [SIGNATURE]
    assert msgspec.json.decode(after.read_bytes())["recovered"] == 1
    assert recover(corpus) == []


@pytest.mark.timeout(180)
def test_a_worker_that_is_killed(tmp_path: Path, planted: dict[str, str]) -> None:
    """The campaign goes on: what it was at is a finding of its own, and the planted fault is found as well."""
    corpus, mark = tmp_path / "corpus", tmp_path / "sleeping"
    process = fuzz(corpus, {**planted, "PLANTED_SLEEP_QUICK": str(mark)}, "--seconds", "4")
    wait_for(mark)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert set(findings(corpus)) >= {SIGNATURE}
    assert {s.split("/")[4] for s in findings(corpus)} <= {"wrong", "unstable"}
    assert recover(corpus) == []


DEADLY = """
import os, sys
from diffgrad.adapters import numpy
numpy.NumpyAdapter.add = lambda self, a, b: os._exit(9)
from diffgrad.cli import app
app(sys.argv[1:])
"""


@pytest.mark.timeout(180)
def test_a_case_that_ends_every_campaign_is_given_up_and_kept(tmp_path: Path) -> None:
    """Three times in the campaign's own process; the fourth campaign says so, and goes on to cases of its own."""
    corpus, result = tmp_path / "corpus", tmp_path / "result.json"
    command = [sys.executable, "-c", DEADLY, "fuzz", "--in-process", "--adapter", "numpy", "--seed", "3"]
    command += ["--seconds", "1", "--dtype", "float32", "--corpus", str(corpus)]
    for _ in range(3):
        assert findings(corpus) == []
        assert subprocess.run([*command, "--block", "uib"], cwd=ROOT, check=False, timeout=60).returncode == 9
    done = subprocess.run(
        [*command, "--block", "op_ln", "--json", str(result)], cwd=ROOT, check=False, timeout=60, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    (found,) = Corpus(corpus).entries()
    assert str(found.signature) == "numpy/eager/float32/run/crash/uib"
    assert found.sentence == "crash: 3 campaigns ended while this case ran; it was not run again"
    assert [f["id"] for f in msgspec.json.decode(result.read_bytes())["new_findings"]] == [found.id]
    assert recover(corpus) == []


def small() -> None:
    """From here on, files of this process hold no more than 700 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))


@contextlib.contextmanager
def one_page(folder: Path) -> Iterator[bool]:
    """A disk of 4 kB, which a journal takes; says whether one may be mounted here."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "diffgrad-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def ended_in_a_sentence(process: subprocess.Popen[str], corpus: Path) -> None:
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert "No space left on device" in err or "File too large" in err
    assert findings(corpus) == []
    assert list(corpus.glob(".new-*")) == []


def goes_on(corpus: Path, planted: dict[str, str]) -> None:
    fuzz(corpus, planted).communicate(timeout=120)
    assert findings(corpus) == [SIGNATURE]
    assert SIGNATURE.split("/")[3] in (corpus / "INDEX.md").read_text()
    assert recover(corpus) == []


@pytest.mark.timeout(180)
def test_a_journal_without_room_ends_in_a_sentence_and_the_next_run_goes_on(
    tmp_path: Path, planted: dict[str, str]
) -> None:
    corpus = tmp_path / "corpus"
    clean = {k: v for k, v in planted.items() if k != "PYTHONPATH"}
    ended_in_a_sentence(fuzz(corpus, clean, "--in-process", first=small), corpus)
    goes_on(corpus, planted)


@pytest.mark.timeout(180)
def test_a_finding_without_room_ends_in_a_sentence_and_the_next_run_saves_it(
    tmp_path: Path, planted: dict[str, str]
) -> None:
    corpus = tmp_path / "corpus"
    with one_page(corpus) as mounted:
        ended_in_a_sentence(fuzz(corpus, planted, first=None if mounted else small), corpus)
        assert recover(corpus)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=4m", str(corpus)], check=True)
        goes_on(corpus, planted)


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
    env = {**planted, "PLANTED_SLEEP_QUICK": str(mark)}
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
