"""A campaign: Hypothesis draws batches of cases, frameworks run them side by side, each fault is shrunk and saved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, given, seed, settings

from diffgrad.adapters.registry import COMPILED_MODES
from diffgrad.case import Case
from diffgrad.corpus import Corpus, Entry
from diffgrad.judge import Fault, Judgement, judge
from diffgrad.strategies import Batch, batches, sample
from diffgrad.strategies.cases import DTYPES, quiet_settings
from diffgrad.worker import Answer, Runner

_ROUND = 20
"""Batches drawn at a time; a new finding ends the round."""
_MOST_DOUBTS = 5
"""How often a fault that goes away with the default compile options is shrunk and tried again."""
_SHRINK_CALLS = 300
_SHRINK_SECONDS = 60.0


class Found(Exception):
    """Tells Hypothesis that a batch shows the fault being hunted."""


@dataclass
class Tally:
    """What a campaign counted."""

    cases: int = 0
    links_checked: int = 0
    nodes_checked: int = 0
    elements: int = 0
    vacuous: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    """Verdict counts per adapter."""
    worst: dict[str, float] = field(default_factory=dict)
    """Worst error/bar per adapter, over runs without a fault."""
    framework_cpu_s: dict[str, float] = field(default_factory=dict)
    worker_cpu_s: float = 0.0
    oracle_cpu_s: float = 0.0
    own_cpu_s: float = 0.0
    wall_s: float = 0.0
    unsupported: Counter[str] = field(default_factory=Counter)
    new: list[Entry] = field(default_factory=list)
    known: Counter[str] = field(default_factory=Counter)
    unconfirmed: list[dict[str, str]] = field(default_factory=list)

    @property
    def vacuous_share(self) -> float:
        """Share of compared elements whose bar exceeds the value that it guards."""
        return self.vacuous / self.elements if self.elements else 0.0

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds of the campaign: workers and this process."""
        return self.worker_cpu_s + self.own_cpu_s


@dataclass
class _Hunt:
    """The fault being shrunk, and the smallest case that still shows it."""

    adapter: str
    fault: Fault
    origin: Batch
    case: Case
    begun: bool = False
    calls: int = 0
    started: float = field(default_factory=time.monotonic)
    seen: dict[Batch, tuple[Case, Fault] | None] = field(default_factory=dict)
    """What was found in each batch that was asked about."""

    def __post_init__(self) -> None:
        self.seen[self.origin] = self.case, self.fault

    @property
    def over(self) -> bool:
        return self.calls >= _SHRINK_CALLS or time.monotonic() - self.started > _SHRINK_SECONDS


class Campaign:
    """Fuzzing for a while, or for a number of batches.

    Args:
        runner: the frameworks, in workers or in this process.
        corpus: where findings go; signatures of its open and convention entries are known from the start.
        blocks, dtypes: what is drawn.
        adapters: which of the runner's frameworks to use; all by default.
        progress: called with the tally after every batch.
    """

    def __init__(
        self,
        runner: Runner,
        corpus: Corpus,
        blocks: Sequence[str],
        dtypes: Sequence[str] = DTYPES,
        adapters: Sequence[str] | None = None,
        progress: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.tally = Tally()
        self._runner = runner
        self._corpus = corpus
        self._strategy = batches(blocks, dtypes)
        self._adapters = tuple(adapters) if adapters else None
        self._progress = progress
        self._modes = {name: about.mode for name, about in runner.about().items()}
        self._known = corpus.known()
        self._doubted: Counter[str] = Counter()
        self._deadline = float("inf")

    def run(self, key: int, seconds: float | None = None, examples: int | None = None) -> Tally:
        """Fuzz until ``seconds`` have passed or ``examples`` batches were drawn; ``key`` is the random seed.

        A finding that is being shrunk when the time is up is still shrunk and saved.
        """
        started, cpu = time.monotonic(), time.process_time()
        self._deadline = started + seconds if seconds is not None else float("inf")
        left = examples if examples is not None else float("inf")
        try:
            rounds = 0
            while left > 0 and time.monotonic() < self._deadline:
                drawn = int(min(left, _ROUND))
                self._round(key * 1_000_003 + rounds, drawn)
                left -= drawn
                rounds += 1
        finally:
            self.tally.wall_s += time.monotonic() - started
            self.tally.own_cpu_s += time.process_time() - cpu
        return self.tally

    def _round(self, key: int, examples: int) -> None:
        """Draw some batches, run them everywhere, then shrink whatever is new."""
        drawn = sample(self._strategy, examples, key)
        for hunt in self._explore(drawn):
            self._shrink(hunt, key, examples)
            self._settle(hunt)

    def _explore(self, drawn: Sequence[Batch]) -> list[_Hunt]:
        """Run the batches in every framework; one hunt for each signature that is new."""
        origin: dict[Case, Batch] = {}
        hunts: dict[str, _Hunt] = {}

        def feed() -> Iterator[Case]:
            for batch in drawn:
                for case in batch.cases():
                    late = self.tally.cases > 0 and time.monotonic() >= self._deadline
                    if hunts or late:
                        return
                    origin[case] = batch
                    self.tally.cases += 1
                    yield case

        for answer in self._runner.run(feed(), self._adapters):
            judgement = self._judge(answer)
            self._progress(self.tally)
            for fault in judgement.faults:
                name = str(fault.signature)
                if name in self._known:
                    self.tally.known[name] += 1
                elif name not in hunts and self._doubted[name] < _MOST_DOUBTS:
                    hunts[name] = _Hunt(answer.adapter, fault, origin[answer.case], answer.case)
        return list(hunts.values())

    def _shrink(self, hunt: _Hunt, key: int, examples: int) -> None:
        """Let Hypothesis shrink the batch: the same draws again, of which only the hunt's own one fails."""

        @seed(key)
        @settings(quiet_settings(examples), phases=[Phase.generate, Phase.shrink])
        @given(self._strategy)
        def fails(batch: Batch) -> None:
            if batch == hunt.origin:
                hunt.begun = True
            if hunt.begun and self._still_fails(hunt, batch):
                raise Found

        try:
            fails()
        except Found:
            return
        raise AssertionError("the draws of a seed were not the same the second time")

    def _still_fails(self, hunt: _Hunt, batch: Batch) -> bool:
        """Is the fault there in another batch? If so, that is the hunt's case now. Only the framework at fault is
        asked, and only once about a batch: Hypothesis comes back to the smallest one at the end.
        """
        if batch not in hunt.seen:
            if hunt.over:
                return False
            hunt.calls += 1
            hunt.seen[batch] = self._failing(hunt, batch)
        found = hunt.seen[batch]
        if found is None:
            return False
        hunt.case, hunt.fault = found
        return True

    def _failing(self, hunt: _Hunt, batch: Batch) -> tuple[Case, Fault] | None:
        """The batch's last case that has the fault."""
        found = None
        for answer in self._runner.run(batch.cases(), [hunt.adapter]):
            fault = judge(answer, self._modes[answer.adapter]).fault(hunt.fault.signature)
            if fault is not None:
                found = answer.case, fault
        return found

    def _settle(self, hunt: _Hunt) -> None:
        """Confirm the shrunk fault as an ordinary user would run it, then save it."""
        signature = hunt.fault.signature
        again = next(iter(self._runner.run([hunt.case], [hunt.adapter], quick=False)))
        confirmed = judge(again, self._modes[hunt.adapter])
        explanation = ""
        if confirmed.fault(signature) is None:
            if self._modes[hunt.adapter] in COMPILED_MODES and not confirmed.faults:
                self._doubted[str(signature)] += 1
                reason = "gone with the default compile options"
                self.tally.unconfirmed.append(
                    {"signature": str(signature), "reason": reason, "sentence": hunt.fault.sentence}
                )
                return
            explanation = f"not the same on a second run, which gave: {confirmed.sentence or confirmed.verdict}"
        self._known.add(str(signature))
        entry = Entry(
            case=hunt.case,
            signature=signature,
            status="open",
            sentence=hunt.fault.sentence,
            versions=self._runner.about()[hunt.adapter].versions,
            explanation=explanation,
        )
        self._corpus.save(entry)
        self._corpus.write_index()
        self.tally.new.append(entry)

    def _judge(self, answer: Answer) -> Judgement:
        started = time.process_time()
        judgement = judge(answer, self._modes[answer.adapter])
        t, name = self.tally, answer.adapter
        t.oracle_cpu_s += time.process_time() - started
        t.verdicts.setdefault(name, Counter())[judgement.verdict] += 1
        t.framework_cpu_s[name] = t.framework_cpu_s.get(name, 0.0) + answer.outcome.cpu_s
        t.worker_cpu_s += answer.outcome.total_cpu_s
        if judgement.verdict == "unsupported":
            t.unsupported[f"{name}: {judgement.sentence}"] += 1
        report = judgement.report
        if report is not None:
            t.links_checked += report.links
            t.nodes_checked += report.nodes
            t.elements += report.elements
            t.vacuous += report.vacuous
            if judgement.verdict == "ok":
                t.worst[name] = max(t.worst.get(name, 0.0), report.worst_ratio)
        return judgement


def summary(tally: Tally, corpus: Corpus) -> dict[str, Any]:
    """The tally as the JSON of ``diffgrad fuzz``."""
    return {
        "cases": tally.cases,
        "links_checked": tally.links_checked,
        "nodes_checked": tally.nodes_checked,
        "verdicts": dict(sum(tally.verdicts.values(), Counter())),
        "adapters": {
            name: {
                "runs": counts.total(),
                "verdicts": dict(counts),
                "worst_error_over_bar": tally.worst.get(name, 0.0),
            }
            for name, counts in tally.verdicts.items()
        },
        "unsupported": dict(tally.unsupported),
        "vacuous_share": tally.vacuous_share,
        "wall_s": tally.wall_s,
        "framework_cpu_s": dict(tally.framework_cpu_s),
        "oracle_cpu_s": tally.oracle_cpu_s,
        "total_cpu_s": tally.total_cpu_s,
        "new_findings": [finding(e, corpus) for e in tally.new],
        "known_findings": [{"signature": s, "count": n} for s, n in sorted(tally.known.items())],
        "unconfirmed": tally.unconfirmed,
    }


def finding(entry: Entry, corpus: Corpus) -> dict[str, Any]:
    """A finding as it appears in a command's JSON."""
    return {
        "id": entry.id,
        "file": str(corpus.folder / f"{entry.id}.json"),
        "signature": str(entry.signature),
        "verdict": entry.signature.verdict,
        "sentence": entry.sentence,
    }
