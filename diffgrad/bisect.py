"""Between which two releases of its framework a saved finding appeared or went away.

Every release that is tried gets an environment of its own, which is kept; the case runs there in a worker process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from packaging.version import Version

from diffgrad.adapters.registry import ADAPTERS, offers
from diffgrad.corpus import Corpus, Entry
from diffgrad.judge import judge
from diffgrad.releases import BisectError as BisectError
from diffgrad.releases import Environments, one_line
from diffgrad.worker import Answer, WorkerError, Workers

Verdict = Literal["fails", "passes", "skipped"]

PACKAGES = {"torch": ("torch",), "jax": ("jax",), "tensorflow": ("tensorflow-cpu", "tensorflow")}
"""Adapter -> the packages that bring its framework, the usual one first."""

# What a worker imports beside the framework; pip picks the releases that go with it.
_NEEDS = ("numpy", "ml_dtypes", "msgspec")
# What an adapter imports beside its framework for some cases.
_BESIDE = {"jax": ("flax",)}

CACHE = Path("~/.cache/diffgrad/envs")

# What the adapters say where an old release lacks what they use.
_LACKING = re.compile(
    r"^(AttributeError|ImportError|ModuleNotFoundError)\b|unexpected keyword argument|No such compile option"
)

_OUTSIDE = "; what was tried of the releases beyond cannot run it"


class Tried(msgspec.Struct, frozen=True):
    """One release: whether it has the finding, or why that cannot be said."""

    version: str
    verdict: Verdict
    reason: str = ""
    framework: str = ""
    """The version that the framework itself gave."""


class Bisection(msgspec.Struct, frozen=True):
    """What came out.

    Attributes:
        id: the finding.
        package: what was bisected.
        change: ``regression`` (older releases pass), ``fix`` (older ones fail) or ``none``.
        good, bad: the neighbouring releases that pass and fail; without a change, the newest that runs, as one of them.
        unsure: releases between the two that cannot run the case.
        sentence: the same in words.
        tried: every release tried, in that order.
    """

    id: str
    package: str
    change: Literal["regression", "fix", "none"]
    good: str
    bad: str
    unsure: tuple[str, ...]
    sentence: str
    tried: tuple[Tried, ...]


class Ends(NamedTuple):
    """The outermost releases that run or, after the search, two neighbours with a change between them."""

    low: int
    high: int


def search(count: int, probe: Callable[[int], Verdict]) -> Ends | None:
    """Bisect releases 0 to ``count - 1``; those that are skipped are passed over for their neighbours.

    Returns:
        The two nearest releases that differ, the outermost two that run if these do not differ (equal numbers if only
        one runs), or None if none runs.
    """
    low = _outermost(range(count), probe)
    if low is None:
        return None
    high = _outermost(range(count - 1, low, -1), probe)
    if high is None:
        return Ends(low, low)
    return Ends(low, high) if probe(low) == probe(high) else _narrowed(Ends(low, high), probe)


def _narrowed(ends: Ends, probe: Callable[[int], Verdict]) -> Ends:
    """Two that differ, brought together."""
    before, skipped = probe(ends.low), set[int]()
    while rest := [i for i in range(ends.low + 1, ends.high) if i not in skipped]:
        middle = rest[len(rest) // 2]
        verdict = probe(middle)
        if verdict == "skipped":
            skipped.add(middle)
        elif verdict == before:
            ends = Ends(middle, ends.high)
        else:
            ends = Ends(ends.low, middle)
    return ends


def _outermost(order: Sequence[int], probe: Callable[[int], Verdict]) -> int | None:
    """The first of ``order`` that runs, where those before it that do not lie together.

    An install takes a minute, so by strides that double, then halve; one by one where they find none.
    """
    skipped, at = -1, 0
    while at < len(order) and probe(order[at]) == "skipped":
        skipped, at = at, 2 * at + 1
    if at >= len(order):
        return next((i for i in order if probe(i) != "skipped"), None)
    while at - skipped > 1:
        middle = (skipped + at) // 2
        if probe(order[middle]) == "skipped":
            skipped = middle
        else:
            at = middle
    return order[at]


def verdict_of(entry: Entry, answer: Answer) -> tuple[Verdict, str]:
    """Whether an answer has the finding, and why it cannot be said if it cannot."""
    now = judge(answer)
    if now.report is not None:
        found = now.fault(entry.signature)
        if found is not None:
            return "fails", found.sentence
        return "passes", f"another fault: {now.sentence}" if now.faults else ""
    said, before = _message(now.sentence), _message(entry.sentence)
    if said == before and entry.signature.verdict == answer.outcome.status:
        return "fails", now.sentence  # whatever the exception's class is called there
    if _LACKING.search(now.sentence.removeprefix("error: ")) or now.fault(entry.signature) is None:
        return "skipped", f"{now.verdict}: {one_line(now.sentence.removeprefix(f'{now.verdict}: '))}"
    return "fails", now.sentence


def _message(sentence: str) -> list[str]:
    """The words of what an error says, without its class; names and numbers may differ from release to release."""
    return re.findall(r"[A-Za-z]+", re.sub(r"^error: \w+: ", "", sentence).split("\n")[0])


def package_of(entry: Entry, package: str | None) -> str:
    """The package to bisect.

    Raises:
        BisectError: the finding is not that package's, or needs another machine.
    """
    adapter = entry.signature.adapter
    known = PACKAGES.get(adapter, ())
    if not known:
        raise BisectError(f"{entry.id}: a finding of {adapter}, which has no releases to bisect")
    if package is not None and package not in known:
        raise BisectError(
            f"--package {package}: the finding is one of {adapter}, which comes with {' or '.join(known)}"
        )
    if entry.case.how.device != "cpu":
        raise BisectError(f"{entry.id}: it shows on {entry.case.how.device}, and releases are compared on a CPU only")
    if not offers(adapter, entry.case.how):
        raise BisectError(f"{entry.id}: {adapter} is not run under its conditions any more")
    return package or known[0]


class Trial:
    """The case in one release after another. Each is tried once, and told of when it is."""

    def __init__(self, entry: Entry, package: str, places: Environments, tell: Callable[[Tried], None]) -> None:
        self.tried: dict[str, Tried] = {}
        self._entry = entry
        self._package = package
        self._places = places
        self._tell = tell

    def __call__(self, version: str) -> Verdict:
        """What a release gives."""
        if version not in self.tried:
            self.tried[version] = self._try(version)
            self._tell(self.tried[version])
        return self.tried[version].verdict

    def _try(self, version: str) -> Tried:
        adapter = self._entry.signature.adapter
        python, reason = self._places.get(self._package, version, (*_NEEDS, *_BESIDE.get(adapter, ())))
        if python is None:
            return Tried(version, "skipped", reason)
        try:
            with Workers([adapter], python=str(python)) as workers:
                about = workers.about()[adapter]
                ran = about.versions[ADAPTERS[adapter].package]
                # Where this program is installed beside a framework, that one may come first on the path.
                if Version(ran).base_version != Version(version).base_version:
                    raise BisectError(f"{python}: {adapter} {ran} runs there instead of {version}")
                (answer,) = workers.run([self._entry.case], quick=False)
        except WorkerError as e:
            return Tried(version, "skipped", one_line(str(e)))
        return Tried(version, *verdict_of(self._entry, answer), framework=ran)


def bisect(entry: Entry, package: str, versions: Sequence[str], trial: Trial) -> Bisection:
    """Bisect a finding over some releases, the oldest first.

    Raises:
        BisectError: no release can run the case.
    """
    ends = search(len(versions), lambda i: trial(versions[i]))
    if ends is None:
        reason = next(iter(trial.tried.values())).reason
        raise BisectError(f"{entry.id}: none of the {len(trial.tried)} releases tried can run it; the first: {reason}")
    low, high = (trial.tried[versions[i]] for i in ends)
    unchanged = low.verdict == high.verdict
    unsure = () if unchanged else tuple(versions[ends.low + 1 : ends.high])
    outside = unchanged and (ends.low > 0 or ends.high < len(versions) - 1)
    by = {low.verdict: low.version, high.verdict: high.version}
    return Bisection(
        id=entry.id,
        package=package,
        change="none" if unchanged else "fix" if low.verdict == "fails" else "regression",
        good=by.get("passes", ""),
        bad=by.get("fails", ""),
        unsure=unsure,
        sentence=_sentence(package, low, high, unsure) + (_OUTSIDE if outside else ""),
        tried=tuple(trial.tried.values()),
    )


def _sentence(package: str, low: Tried, high: Tried, unsure: Sequence[str]) -> str:
    if low is high:
        return f"only {package} {low.version} can run it, and there it {low.verdict}"
    if low.verdict == high.verdict:
        return f"no change between {package} {low.version} and {high.version}: it {low.verdict} in both"
    last, first = ("good", "bad") if low.verdict == "passes" else ("bad", "good")
    between = f"; between them {', '.join(unsure)} cannot run it" if unsure else ""
    return f"last {last} release {package} {low.version}, first {first} release {package} {high.version}{between}"


def remember(store: Corpus, identity: str, tried: Sequence[Tried]) -> None:
    """Add what was found to the entry's history, as it is in the corpus by now.

    Raises:
        CorpusError: the file cannot be read or written; it is as it was.
    """
    store.remember(identity, {t.framework: str(t.verdict) for t in tried if t.verdict != "skipped"})
