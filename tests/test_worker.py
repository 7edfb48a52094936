"""Worker processes for real: answers, crashes, hangs, missing frameworks, and silence."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from diffgrad import worker
from diffgrad.adapters.registry import ADAPTERS, FRAMEWORKS
from diffgrad.campaign import Campaign
from diffgrad.case import Case
from diffgrad.corpus import Corpus
from diffgrad.how import How
from diffgrad.specs import ConvNeXtDownSpec
from diffgrad.trace import is_large
from diffgrad.values import Values
from diffgrad.worker import ENVIRONMENT, Answer, InProcess, Worker, WorkerError, Workers
from tests.conftest import GetWorkers
from tests.helpers import KINDS, SMALLEST, ordinary, run_numpy

CASES = [msgspec.structs.replace(SMALLEST, values=Values(seed=s)) for s in range(12)]
Statuses = list[tuple[int, str]]


def statuses(answers: Iterable[Answer]) -> Statuses:
    return [(a.case.values.seed, a.outcome.status) for a in answers]


def pid_of(workers: Workers, name: str = "numpy") -> int:
    return workers._first[name].pid


def ended(pid: int) -> bool:
    """Whether our child is gone, within ten seconds; reaped here if nobody else has."""
    for _ in range(100):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
                continue
        return True
    return False


@pytest.fixture
def numpy_workers() -> Iterator[Workers]:
    with Workers(["numpy"]) as workers:
        yield workers


def test_a_large_trace_arrives_whole_and_leaves_no_file(numpy_workers: Workers) -> None:
    case = Case(block=ConvNeXtDownSpec(n=1, h=256, w=256, ic=8, oc=1))
    here, small = run_numpy(case), SMALLEST
    large, after = (a.outcome.trace for a in numpy_workers.run([case, small]))
    assert large is not None
    assert after is not None
    assert is_large(large)
    for part in ("acts", "cots", "grads"):
        sent, got = getattr(here, part), getattr(large, part)
        assert {k: v.tobytes() for k, v in got.items()} == {k: v.tobytes() for k, v in sent.items()}
    assert [f.suffix for f in Path(numpy_workers._tmp.name).iterdir()] == [".log"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_answers_as_the_adapter_would_here(kind: str, workers: GetWorkers) -> None:
    case = ordinary(kind)
    (answer,) = workers("numpy").run([case])
    assert (answer.adapter, answer.case, answer.outcome.status) == ("numpy", case, "ok")
    assert answer.outcome.trace is not None
    for part in ("acts", "cots", "grads"):
        here, there = getattr(run_numpy(case), part), getattr(answer.outcome.trace, part)
        assert {k: v.tobytes() for k, v in here.items()} == {k: v.tobytes() for k, v in there.items()}
    assert answer.outcome.total_cpu_s >= answer.outcome.cpu_s > 0


def test_every_case_is_answered_once_in_every_framework(workers: GetWorkers) -> None:
    many = CASES * 20
    answers = list(workers("numpy").run(many))
    assert statuses(answers) == [(c.values.seed, "ok") for c in many]


def test_workers_side_by_side_answer_every_case_and_can_be_asked_singly() -> None:
    with Workers(["numpy", "torch"]) as both:
        assert {a: p.modes[0] for a, p in both.about().items()} == {"numpy": "eager", "torch": "eager"}
        answers = list(both.run(CASES))
        assert sorted((a.adapter, a.case.values.seed) for a in answers) == sorted(
            (name, c.values.seed) for name in ("numpy", "torch") for c in CASES
        )
        assert {a.adapter for a in both.run(CASES, ["torch"])} == {"torch"}


def test_leaving_a_run_half_way_does_not_mix_up_the_next_one(numpy_workers: Workers) -> None:
    assert statuses([next(iter(numpy_workers.run(CASES)))]) == [(0, "ok")]
    assert statuses(numpy_workers.run([CASES[5]])) == [(5, "ok")]


# Crashes and hangs.


def interrupted(pid: int, before: int, *signals: int) -> Iterator[Case]:
    """The cases; the worker is stopped before the first, and gets the signals before that number."""
    os.kill(pid, signal.SIGSTOP)
    for i, case in enumerate(CASES):
        if i == before:
            for s in signals:
                os.kill(pid, s)
            time.sleep(0.2)  # until its pipes are closed
        yield case


@pytest.mark.parametrize("before", [1, 3, 7])
def test_a_killed_worker_costs_one_case_and_the_rest_goes_on(before: int, numpy_workers: Workers) -> None:
    answers = list(numpy_workers.run(interrupted(pid_of(numpy_workers), before, signal.SIGKILL)))
    assert statuses(answers) == [(0, "crash"), *((s, "ok") for s in range(1, len(CASES)))]
    assert answers[0].outcome.reason.startswith("the worker process died; it ")
    assert statuses(numpy_workers.run(CASES[:1])) == [(0, "ok")]


def test_a_crash_leaves_the_last_words_of_the_process(numpy_workers: Workers) -> None:
    answers = list(numpy_workers.run(interrupted(pid_of(numpy_workers), 4, signal.SIGSEGV, signal.SIGCONT)))
    crashed = [a for a in answers if a.outcome.status == "crash"]
    assert len(crashed) == 1
    assert len(answers) == len(CASES)
    assert "it last printed: Fatal Python error: Segmentation fault" in crashed[0].outcome.reason


def test_a_worker_that_does_not_answer_is_a_hang_and_the_rest_goes_on(
    numpy_workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CASE_TIMEOUT", 3.0)
    pid = pid_of(numpy_workers)
    answers = list(numpy_workers.run(interrupted(pid, 99)))
    assert statuses(answers) == [(0, "hang"), *((s, "ok") for s in range(1, len(CASES)))]
    assert answers[0].outcome.reason == "no answer within 3 s"
    assert ended(pid)


def test_a_campaign_survives_a_crash_and_reports_it_once(
    numpy_workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pids = numpy_workers.run, [pid_of(numpy_workers)]

    def once(cases: Iterable[Case], adapters: Sequence[str] | None = None, quick: bool = True) -> Iterator[Answer]:
        def feed() -> Iterator[Case]:
            for case in cases:
                if pids:
                    os.kill(pids[0], signal.SIGSTOP)
                yield case
                if pids:
                    os.kill(pids.pop(), signal.SIGKILL)

        return run(feed(), adapters, quick)

    monkeypatch.setattr(numpy_workers, "run", once)
    corpus = Corpus(tmp_path)
    tally = Campaign(numpy_workers, corpus, ["uib"]).run(key=3, examples=60)
    assert tally.verdicts["numpy"]["crash"] == 1
    assert tally.verdicts["numpy"]["ok"] == tally.cases - 1 > 50
    (found,) = corpus.entries()
    assert str(found.signature).endswith("/run/unstable/uib")
    assert found.sentence.endswith("; then 3 of 3 runs: ok")


def test_closing_ends_the_processes() -> None:
    with Workers(["numpy"]) as workers:
        pid = pid_of(workers)
        os.kill(pid, 0)  # it is there
    assert ended(pid)


# Who is to blame.


KILLER = """
import os, signal
from diffgrad.adapters import numpy

class Deadly(numpy.NumpyAdapter):
    seen = 0
    poisoned = False

    def trace(self, case, tensors):
        type(self).seen += 1
        at_once = case.values.seed == {at_once}
        type(self).poisoned |= case.values.seed == {poison}
        if at_once or self.poisoned and self.seen >= {late}:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().trace(case, tensors)

numpy.adapter = lambda quick=False: Deadly()
"""


def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **when: int) -> None:
    """Worker processes that start from now on crash as told."""
    text = KILLER.format(**{"at_once": -1, "poison": -1, "late": 3} | when)
    (tmp_path / "deadly.py").write_text(text)
    hook = "import importlib.abc, sys\n"
    hook += "class Late(importlib.abc.MetaPathFinder):\n"
    hook += "    def find_spec(self, name, path=None, target=None):\n"
    hook += "        if name == 'diffgrad.serve':\n"
    hook += "            sys.meta_path.remove(self)\n"
    hook += "            import deadly\n"
    hook += "sys.meta_path.insert(0, Late())\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def crashes(answers: Iterable[Answer]) -> list[int]:
    return [a.case.values.seed for a in answers if a.outcome.status == "crash"]


def test_a_case_that_crashes_on_its_own_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly(tmp_path, monkeypatch, at_once=6)
    with Workers(["numpy"]) as workers:
        answers = list(workers.run(CASES))
    assert crashes(answers) == [6]
    assert sorted(statuses(answers)) == [(s, "crash" if s == 6 else "ok") for s in range(12)]


def test_a_case_that_poisons_the_process_is_blamed_for_a_later_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run alone, three times over, it crashes; the case that tripped over it does not."""
    deadly(tmp_path, monkeypatch, poison=4, late=3)
    with Workers(["numpy"]) as workers:
        answers = list(workers.run(CASES[2:5] + CASES[7:]))
    assert crashes(answers) == [4]
    assert (7, "ok") in statuses(answers)


def test_other_conditions_get_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Case(block=SMALLEST.block)
    two = msgspec.structs.replace(usual, how=How(threads=2))
    with Workers(["torch"]) as workers:
        answers = list(workers.run([usual, two, usual, two]))
        assert [a.outcome.status for a in answers] == ["ok"] * 4
        assert sorted(len(w.environment) for w in workers._workers.values()) == [0, len(two.how.flavour())]
        for how in (How(isa="AVX2"), How(threads=2, isa="AVX2"), How(onednn=False)):
            list(workers.run([msgspec.structs.replace(usual, how=how)]))  # torch does not know of the last one
        assert len(workers._workers) <= 1 + worker._MOST_FLAVOURED


def test_a_framework_is_not_asked_for_conditions_that_it_does_not_have(workers: GetWorkers) -> None:
    case = msgspec.structs.replace(SMALLEST, how=How(mode="compile"))
    assert list(workers("numpy").run([case])) == []


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkerError, match=r"^torch sees no CUDA device \(it has cpu\): use --device cpu or auto$"):
        Workers(["torch"], device="cuda").__enter__()


# What cannot start.


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """without(package): worker processes that start from now on cannot import it."""

    def hide(package: str) -> None:
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return hide


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_is_named_with_what_to_type(name: str, without: Callable[[str], None]) -> None:
    without(ADAPTERS[name].package)
    with pytest.raises(WorkerError) as e, Workers([name]):
        pass
    assert str(e.value) == (
        f"{name} cannot be imported (No module named '{ADAPTERS[name].package}'): pip install 'diffgrad[{name}]'"
    )


def test_what_else_to_do_is_added_and_nothing_stays_behind(without: Callable[[str], None]) -> None:
    without("jax")
    workers = Workers(["numpy", "jax"], advice="or name the frameworks")
    with pytest.raises(WorkerError, match=r"pip install 'diffgrad\[jax\]'; or name the frameworks"):
        workers.__enter__()
    assert [w.name for w in workers._workers.values() if getattr(w, "pid", 0)] == []
    assert not workers._first["numpy"].logs.exists()


def test_an_interpreter_without_our_dependencies_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    with pytest.raises(WorkerError, match=r"numpy: its process did not start .*No module named 'msgspec'"):
        Workers(["numpy"], python=str(tmp_path / "bare" / "bin" / "python")).__enter__()


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(WorkerError, match=r"^numpy: there is no interpreter /nonexistent/python$"):
        Workers(["numpy"], python="/nonexistent/python").__enter__()


# Start-up.


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_framework_starts_says_what_it_is_and_is_otherwise_silent(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Workers([name]) as workers:
        about = workers.about()[name]
        (answer,) = workers.run([SMALLEST])
    assert name in about.versions
    assert about.devices
    assert answer.outcome.status == "ok"
    assert capfd.readouterr() == ("", "")


def test_the_environment_is_there_before_the_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it (MALLOC_PERTURB_) is read by the C library before Python runs: to set it afterwards does nothing."""
    seen = tmp_path / "seen.json"
    (tmp_path / "sitecustomize.py").write_text(
        f"import json, os, pathlib\npathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Workers(["numpy"]):
        pass
    assert ENVIRONMENT.items() <= msgspec.json.decode(seen.read_bytes()).items()


def test_in_process_is_the_same_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcess(["numpy"]) as runner:
        assert runner.about()["numpy"].modes == ("eager",)
        assert statuses(runner.run(CASES)) == [(c.values.seed, "ok") for c in CASES]
        assert statuses(runner.run(CASES[:1], ["numpy"], quick=False)) == [(0, "ok")]
    monkeypatch.setitem(sys.modules, "diffgrad.adapters.jax", None)
    with pytest.raises(WorkerError, match=r"jax cannot be imported \(.*\): pip install 'diffgrad\[jax\]'"):
        InProcess(["jax"])


def test_an_exception_where_a_result_is_due_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *args: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("diffgrad.adapters.numpy.NumpyAdapter.uib", fail)
    with InProcess(["numpy"]) as runner:
        (answer,) = runner.run(CASES[:1])
    assert (answer.outcome.status, answer.outcome.reason) == ("error", "RuntimeError: no kernel")


def test_a_worker_is_an_entity_and_not_a_value(tmp_path: Path) -> None:
    one, other = (Worker("numpy", queue.Queue(), tmp_path) for _ in range(2))
    assert len({one, other}) == 2
