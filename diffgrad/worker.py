"""Frameworks in processes of their own: a crash or a hang is a finding about a framework, not the end of a campaign.

execnet carries the messages; it ships with pytest-xdist and speaks to other interpreters and environments.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import execnet
import msgspec
from threadpoolctl import threadpool_limits

from diffgrad.adapters.base import Adapter
from diffgrad.adapters.registry import ADAPTERS, OFFERS, load, offers
from diffgrad.case import Case
from diffgrad.how import Device, How
from diffgrad.serve import spool_of
from diffgrad.trace import Outcome, unpack

START_TIMEOUT = 180.0
CASE_TIMEOUT = 120.0

# Cases queued ahead in each worker, so that a fast one never waits; and the most that a slow one may fall behind.
_AHEAD = 8
_BEHIND = 64
# What a case counts for in a queue, by mode, where it takes much longer than others.
_COSTS = {"compile": 16, "xla": 4, "eager": 2}
# Cases before a crash that may have caused it, each run again in a process of its own.
_SUSPECTS = 12
# Processes beside each framework's own, for other environments.
_MOST_FLAVOURED = 3

ENVIRONMENT: dict[str, str] = {
    # One thread a worker: several workers share the machine, and small cases gain nothing from more.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    # Freed memory is overwritten, so that a read of uninitialised memory shows.
    "MALLOC_PERTURB_": "165",
}


class WorkerError(RuntimeError):
    """A worker could not be had; the message says which, why, and what to type."""


class Answer(msgspec.Struct, frozen=True):
    """One adapter's outcome for one case."""

    adapter: str
    case: Case
    outcome: Outcome


@dataclass(frozen=True)
class About:
    """What a framework said of itself when it started."""

    versions: dict[str, str]
    devices: tuple[str, ...]
    modes: tuple[str, ...]


class Runner(Protocol):
    """Runs cases in frameworks: in worker processes, or in this process for debugging."""

    def about(self) -> dict[str, About]:
        """What each adapter is, by name."""

    def run(self, cases: Iterable[Case], adapters: Sequence[str] | None = None, quick: bool = True) -> Iterator[Answer]:
        """Run every case in every adapter (or in those named) that offers its conditions.

        Answers come as they are ready, in any order. ``cases`` is drawn from as the workers need more, so that none
        waits for another.
        """

    def close(self) -> None:
        """Stop everything."""


def _remote(channel, root, name, log):  # type: ignore[no-untyped-def]
    """Sent as source text to the worker's interpreter; everything else is imported there."""
    import sys

    # An installed diffgrad lies beside the campaign's own frameworks, which are not to hide the interpreter's.
    sys.path.insert(len(sys.path) if root.endswith("-packages") else 0, root)
    from diffgrad.serve import serve

    serve(channel, name, log)


@dataclass(frozen=True)
class _Job:
    case: Case
    quick: bool


@dataclass
class Worker:
    """One framework's process: started on demand, restarted after a crash or a hang."""

    name: str
    answers: queue.Queue[tuple[Worker, int, bytes | None]]
    logs: Path
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    about: About | None = None
    jobs: deque[_Job] = field(default_factory=deque)
    past: deque[_Job] = field(default_factory=lambda: deque(maxlen=_SUSPECTS))
    """The last jobs that the present process has answered."""
    deadline: float = 0.0
    generation: int = 0
    answered: int = 0
    """Answers of the present process."""

    def __hash__(self) -> int:
        return id(self)

    def begin(self) -> None:
        """Start the process; ``ready`` waits for it."""
        self.generation += 1
        self.answered = 0
        self.past.clear()
        self.about = None
        self.log = self.logs / f"{self.name}-{uuid.uuid4().hex[:12]}.log"
        # Through env(1): libraries read some of these when the process starts, before execnet could set them.
        env = [f"{k}={v}" for k, v in {**ENVIRONMENT, **self.environment}.items()]
        command = shlex.join(["env", *env, self.python])
        self._group = execnet.Group()
        if shutil.which(self.python) is None:
            raise WorkerError(f"{self.name}: there is no interpreter {self.python}")
        gateway = self._group.makegateway(f"popen//python={command}//execmodel=main_thread_only")
        self._channel = gateway.remote_exec(
            _remote, root=str(Path(__file__).resolve().parent.parent), name=self.name, log=str(self.log)
        )

    def ready(self) -> None:
        """Wait until the framework is imported.

        Raises:
            WorkerError: the framework is missing, or does not start.
        """
        if self.about is not None:
            return
        try:
            hello = msgspec.json.decode(self._channel.receive(START_TIMEOUT))
        except (EOFError, execnet.RemoteError, execnet.TimeoutError) as e:
            self.kill()
            reason = str(e).strip().splitlines()[-1] if str(e).strip() else "it ended at once"
            raise WorkerError(f"{self.name}: its process did not start ({reason}); {self.last_words()}") from None
        if "missing" in hello:
            self.kill()
            raise WorkerError(f"{self.name} cannot be imported ({hello['missing']}): {ADAPTERS[self.name].install}")
        self.pid = int(hello["pid"])
        self.about = About(hello["versions"], tuple(hello["devices"]), OFFERS[self.name].modes)
        generation = self.generation
        self._channel.setcallback(lambda data: self.answers.put((self, generation, data)), endmarker=None)

    def send(self, jobs: Sequence[_Job]) -> None:
        """Queue jobs in the worker; the first one's time starts now if it was idle."""
        if not self.jobs:
            self.deadline = time.monotonic() + CASE_TIMEOUT
        self.jobs.extend(jobs)
        for job in jobs:
            self._post(job)

    def _post(self, job: _Job) -> None:
        # A process that died meanwhile says so through the queue, where its first job is counted as lost.
        with contextlib.suppress(OSError):
            self._channel.send(msgspec.json.encode({"case": msgspec.Raw(job.case.to_json()), "quick": job.quick}))

    def done(self, data: bytes) -> Answer:
        """The oldest job has its answer; the next one's time starts."""
        self.deadline = time.monotonic() + CASE_TIMEOUT
        spool = spool_of(str(self.log), self.answered)
        self.answered += 1
        job = self.jobs.popleft()
        self.past.append(job)
        return Answer(self.name, job.case, unpack(data, spool))

    @property
    def load(self) -> int:
        """What is queued, in units of an ordinary case."""
        return sum(_COSTS.get(job.case.how.mode, 1) for job in self.jobs)

    def alone(self, job: _Job) -> Outcome:
        """Run one job in a process of its own, three times over: a corrupted heap may take a while to show."""
        twin = Worker(self.name, queue.Queue(), self.logs, self.python, self.environment)
        twin.begin()
        try:
            twin.ready()
            twin.send([job] * 3)
            outcome = Outcome("ok")
            while twin.jobs:
                _, _, data = twin.answers.get(timeout=CASE_TIMEOUT)
                if data is None:
                    return Outcome("crash", reason=f"the worker process died; {twin.last_words()}")
                outcome = twin.done(data).outcome
            return outcome
        except queue.Empty:
            return Outcome("hang", reason=f"no answer within {CASE_TIMEOUT:.0f} s")
        finally:
            twin.kill()

    def restart(self) -> None:
        """After a crash or a hang: a new process, with what was still to do."""
        rest = list(self.jobs)
        self.jobs.clear()
        self.kill()
        self.begin()
        self.ready()
        self.send(rest)

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        pid = getattr(self, "pid", 0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.pid = 0
        self._group.terminate(timeout=1.0)

    def last_words(self) -> str:
        """The end of what the process printed."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it printed nothing"
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        words = fatal[-1:] or lines[-2:]
        return "it last printed: " + " / ".join(words) if words else "it printed nothing"


Flavour = tuple[tuple[str, str], ...]


class Workers:
    """Worker processes for several frameworks, side by side. Use as a context manager.

    A case whose conditions ask for another environment gets a process of its own kind, started when it is needed.

    Args:
        names: adapters to run.
        python: the interpreter to run them under.
        advice: what else a user may do when a framework is missing, added to the error.
        device: where the frameworks' first processes are to run.

    Raises:
        WorkerError: on entering, when a framework is missing, does not start, or has no such device.
    """

    def __init__(
        self, names: Sequence[str], python: str = sys.executable, advice: str = "", device: Device = "cpu"
    ) -> None:
        self._advice = advice
        self._python = python
        self._device = device
        self._queue: queue.Queue[tuple[Worker, int, bytes | None]] = queue.Queue()
        self._tmp = tempfile.TemporaryDirectory(prefix="diffgrad-")
        usual = How(device=device).flavour()
        self._workers: dict[tuple[str, Flavour], Worker] = {(n, usual): self._worker(n, usual) for n in names}
        self._first = {n: self._workers[n, usual] for n in names}

    def _worker(self, name: str, flavour: Flavour) -> Worker:
        return Worker(name, self._queue, Path(self._tmp.name), self._python, dict(flavour))

    def __enter__(self) -> Workers:
        # The workers have the other cores; BLAS threads that wait for each other on shared ones only cost.
        self._one_thread = threadpool_limits(1)
        try:
            for w in self._first.values():
                w.begin()
            for w in self._first.values():
                w.ready()
                self._check_device(w)
        except WorkerError as e:
            self.close()
            raise WorkerError(f"{e}; {self._advice}" if self._advice else str(e)) from None
        except BaseException:
            self.close()
            raise
        return self

    def _check_device(self, w: Worker) -> None:
        devices = w.about.devices if w.about is not None else ()
        if self._device == "cuda" and not sees_cuda(devices):
            raise WorkerError(f"{w.name} sees no CUDA device (it has {', '.join(devices)}): use --device cpu or auto")

    def __exit__(self, *exc: object) -> None:
        self.close()

    def about(self) -> dict[str, About]:
        return {n: w.about for n, w in self._first.items() if w.about is not None}

    def run(self, cases: Iterable[Case], adapters: Sequence[str] | None = None, quick: bool = True) -> Iterator[Answer]:
        names = tuple(adapters or self._first)
        while any(w.jobs for w in self._workers.values()):  # left over from a run that was not read to its end
            for _ in self._next():
                pass
        source = iter(cases)
        more = True
        while True:
            while more and self._hungry(names):
                case = next(source, None)
                if case is None:
                    more = False
                    break
                for name in names:
                    if offers(name, case.how):
                        self._worker_for(name, case.how.flavour()).send([_Job(case, quick)])
            if not any(w.jobs for w in self._workers.values()):
                if more:
                    continue
                return
            yield from self._next()

    def _hungry(self, names: Sequence[str]) -> bool:
        """Whether some framework's own process may soon have nothing to do, and none is far behind."""
        loads = [self._first[n].load for n in names]
        return min(loads) < _AHEAD and max(w.load for w in self._workers.values()) < _BEHIND

    def _worker_for(self, name: str, flavour: Flavour) -> Worker:
        key = (name, flavour)
        if key not in self._workers:
            self._make_room()
            worker = self._worker(name, flavour)
            worker.begin()
            worker.ready()
            self._workers[key] = worker
        self._workers[key] = self._workers.pop(key)  # the last one used is the last one to go
        return self._workers[key]

    def _make_room(self) -> None:
        """End the environment that was not used for the longest time, if there are many."""
        others = [key for key, w in self._workers.items() if w is not self._first[key[0]]]
        idle = [key for key in others if not self._workers[key].jobs]
        if len(others) >= _MOST_FLAVOURED and idle:
            self._workers.pop(idle[0]).kill()

    def _next(self) -> Iterator[Answer]:
        waiting = [w for w in self._workers.values() if w.jobs]
        patience = min(w.deadline for w in waiting) - time.monotonic()
        try:
            worker, generation, data = self._queue.get(timeout=max(patience, 0.0))
        except queue.Empty:
            for w in waiting:
                if time.monotonic() >= w.deadline:
                    yield self._lost(w, "hang", f"no answer within {CASE_TIMEOUT:.0f} s")
            return
        if generation != worker.generation:
            return  # the end marker of a process that is gone already
        if data is None:
            yield from self._crashed(worker)
        else:
            yield worker.done(data)

    def _crashed(self, worker: Worker) -> Iterator[Answer]:
        """Blame the case that was running, or an earlier one that crashes a fresh process on its own.

        A heap may have been corrupted long before a later, innocent case trips over it.
        """
        suspects = list(dict.fromkeys(reversed(worker.past)))
        lost = None
        if worker.jobs:
            lost = self._lost(worker, "crash", f"the worker process died; {worker.last_words()}")
            suspects = [job for job in suspects if job.case != lost.case]
            again = worker.alone(_Job(lost.case, False))
            if again.status in ("crash", "hang"):
                yield lost
                return
        else:
            worker.restart()  # it died of something that it had answered already
        for job in suspects:
            outcome = worker.alone(job)
            if outcome.status in ("crash", "hang"):
                yield Answer(worker.name, job.case, outcome)
                if lost is not None:
                    yield Answer(worker.name, lost.case, again)
                return
        if lost is not None:
            reason = f"{lost.outcome.reason} (not on its own: only after {len(suspects)} others)"
            yield Answer(worker.name, lost.case, Outcome("crash", reason=reason))

    def _lost(self, worker: Worker, status: str, reason: str) -> Answer:
        job = worker.jobs.popleft()
        worker.restart()
        return Answer(worker.name, job.case, Outcome(status, reason=reason))

    def close(self) -> None:
        for w in self._workers.values():
            if w.generation:
                w.kill()
        self._tmp.cleanup()
        self._one_thread.restore_original_limits()


def sees_cuda(devices: Iterable[str]) -> bool:
    """Whether any of a framework's devices is a CUDA one, as torch, JAX and TensorFlow write it."""
    return any(word in d.lower() for d in devices for word in ("cuda", "gpu"))


class InProcess:
    """The same interface in this process, for debugging: no time-out, and a crash is yours."""

    def __init__(self, names: Sequence[str]) -> None:
        self._loaded: dict[tuple[str, bool], Adapter] = {}
        for n in names:
            try:
                self._loaded[n, False] = load(n)
            except ImportError as e:
                raise WorkerError(f"{n} cannot be imported ({e}): {ADAPTERS[n].install}") from None
        self._names = tuple(names)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def about(self) -> dict[str, About]:
        return {
            n: About(a.versions(), a.devices(), OFFERS[n].modes) for (n, quick), a in self._loaded.items() if not quick
        }

    def run(self, cases: Iterable[Case], adapters: Sequence[str] | None = None, quick: bool = True) -> Iterator[Answer]:
        for case in cases:
            for n in adapters or self._names:
                if not offers(n, case.how):
                    continue
                if (n, quick) not in self._loaded:
                    self._loaded[n, quick] = load(n, quick)
                started = time.process_time()
                outcome = self._loaded[n, quick].run(case)
                spent: Any = time.process_time() - started
                yield Answer(n, case, msgspec.structs.replace(outcome, total_cpu_s=spent))

    def close(self) -> None:
        self._loaded.clear()
