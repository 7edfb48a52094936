"""A campaign: Hypothesis draws batches of cases, frameworks run them side by side, each fault is shrunk and saved."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from diffgrad.adapters.registry import compiled, mode_of, offers
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.check import Quantity
from diffgrad.corpus import Corpus, Entry
from diffgrad.how import PLAIN, Device
from diffgrad.journal import Journal, forget, ownerless, recover
from diffgrad.judge import Fault, Judgement, judge
from diffgrad.reduce import MOST_EXPLICIT, explicit, fewer, single_op
from diffgrad.strategies import Batch, batches, sample
from diffgrad.strategies.cases import DTYPES, hows, quiet_settings
from diffgrad.trace import Outcome, Trace
from diffgrad.witness import reference, witnesses
from diffgrad.worker import Answer, Runner

_ROUND = 20
"""Batches drawn at a time; a new finding ends the round."""
_REPEATS = 3
"""Runs that confirm a fault."""
_KINDS = 7
"""Blocks that a round draws from."""
_MOST_CAMPAIGNS = 3
"""How many campaigns a case may end before it is believed to end the next one, too."""
_MOST_DOUBTS = 5
"""How often a fault that goes away with the default compile options is shrunk and tried again."""
BINS = 4
"""Bins of error/bar in a decade."""
_RATIOS = (-8.0, 4.0)
"""Decades of error/bar that are told apart; a run beyond them counts in the outermost bin."""
_SHRINK_CALLS = 300
_SHRINK_SECONDS = 60.0


class Found(Exception):
    """Tells Hypothesis that a batch shows the fault being hunted."""


@dataclass
class Cell:
    """What was counted of one framework in one mode and dtype."""

    runs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    """Worst error/bar over runs without a fault."""
    elements: int = 0
    vacuous: int = 0


@dataclass
class Tally:
    """What a campaign counted."""

    cases: int = 0
    recovered: int = 0
    """Cases that killed campaigns had begun."""
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
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    """Counts by (adapter, mode, dtype)."""
    blocks: dict[tuple[str, str, str, str], Counter[str]] = field(default_factory=dict)
    """Verdict counts by (block, adapter, mode, dtype)."""
    ratios: dict[str, Counter[float]] = field(default_factory=dict)
    """Per adapter: runs by their worst error/bar, as the lower end of its bin in decades."""
    conditions: Counter[str] = field(default_factory=Counter)
    """Runs by unusual condition, such as ``layout=channels_last``."""

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
    origin: Batch | None
    case: Case
    begun: bool = False
    calls: int = 0
    started: float = field(default_factory=time.monotonic)
    seen: dict[Batch, tuple[Case, Fault] | None] = field(default_factory=dict)
    """What was found in each batch that was asked about."""

    def __post_init__(self) -> None:
        self.begun_with = self.case
        if self.origin is not None:
            self.seen[self.origin] = self.case, self.fault

    @property
    def over(self) -> bool:
        return self.calls >= _SHRINK_CALLS or time.monotonic() - self.started > _SHRINK_SECONDS


class Campaign:
    """Fuzzing for a while, or for a number of batches.

    Args:
        runner: the frameworks, in workers or in this process.
        corpus: where findings go; signatures of its open and convention entries are known from the start.
        blocks, dtypes, modes, device: what is drawn.
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
        modes: Sequence[str] | None = None,
        device: Device = "cpu",
    ) -> None:
        self.tally = Tally()
        self._runner = runner
        self._corpus = corpus
        self._adapters = tuple(adapters or runner.about())
        self._blocks = tuple(blocks)
        self._draw = partial(batches, dtypes=dtypes, conditions=hows(self._adapters, modes, device))
        self._progress = progress
        self._known = corpus.known()
        self._aliases: dict[str, str] = {}
        """Signatures under unusual conditions -> the one of the same fault under plainer ones."""
        self._doubted: Counter[str] = Counter()
        self._deadline = float("inf")

    def run(self, key: int, seconds: float | None = None, examples: int | None = None) -> Tally:
        """Fuzz until ``seconds`` have passed or ``examples`` batches were drawn; ``key`` is the random seed.

        A finding that is being shrunk when the time is up is still shrunk and saved.
        """
        started, cpu = time.monotonic(), time.process_time()
        self._deadline = started + seconds if seconds is not None else float("inf")
        left = examples if examples is not None else float("inf")
        self._journal = Journal(self._corpus.folder)
        try:
            self._recover()
            rounds = 0
            while left > 0 and time.monotonic() < self._deadline:
                drawn = int(min(left, _ROUND))
                # Hypothesis varies what it drew before, so some blocks would not come for long: they take turns.
                kinds = [self._blocks[(rounds * _KINDS + i) % len(self._blocks)] for i in range(_KINDS)]
                self._round(self._draw(tuple(dict.fromkeys(kinds))), key * 1_000_003 + rounds, drawn)
                left -= drawn
                rounds += 1
        except BaseException:
            self._journal.abandon()
            raise
        else:
            self._journal.close()
        finally:
            self.tally.wall_s += time.monotonic() - started
            self.tally.own_cpu_s += time.process_time() - cpu
        return self.tally

    def _recover(self) -> None:
        """First of all, run what campaigns that were killed had begun."""
        gone = ownerless(self._corpus.folder)  # a campaign that is killed from here on is left to the next one
        for adapter, case, campaigns in recover(self._corpus.folder):
            self._journal.begin(adapter, case)
            if adapter not in self._adapters or not offers(adapter, case.how):
                continue  # it stays pending
            self.tally.recovered += 1
            if campaigns >= _MOST_CAMPAIGNS:
                self._give_up(adapter, case, campaigns)
                self._journal.done(adapter, case)
                continue
            for answer in self._runner.run([case], [adapter]):
                self.tally.cases += 1
                for fault in self._judge(answer).faults:
                    if self._is_known(fault):
                        continue  # found on the way, or before
                    hunt = _Hunt(adapter, fault, None, case)
                    self._plainer(hunt)
                    self._settle_if_new(hunt)
                self._journal.done(adapter, answer.case)
        forget(gone)

    def _give_up(self, adapter: str, case: Case, campaigns: int) -> None:
        """A case that has ended several campaigns is not run once more, but kept as what it is."""
        reason = f"{campaigns} campaigns ended while this case ran; it was not run again"
        (fault,) = judge(Answer(adapter, case, Outcome("crash", reason=reason))).faults
        if self._is_known(fault):
            self.tally.known[str(fault.signature)] += 1
        else:
            self._save(_Hunt(adapter, fault, None, case))

    def _save(self, hunt: _Hunt, original: Case | None = None, seen: dict[str, str] | None = None) -> None:
        """Keep a finding, with the case that it was reduced from and what witnesses have ``seen``."""
        self._known.add(str(hunt.fault.signature))
        entry = Entry(
            case=hunt.case,
            signature=hunt.fault.signature,
            status="open",
            sentence=hunt.fault.sentence,
            versions=self._runner.about()[hunt.adapter].versions,
            date=datetime.now(UTC).date().isoformat(),
            original=original,
            witnesses=seen or {},
        )
        self._corpus.save(entry)
        self._corpus.write_index()
        self.tally.new.append(entry)

    def _settle_if_new(self, hunt: _Hunt) -> None:
        if self._is_known(hunt.fault):
            self.tally.known[str(hunt.fault.signature)] += 1
        else:
            self._settle(hunt)

    def _round(self, strategy: st.SearchStrategy[Batch], key: int, examples: int) -> None:
        """Draw some batches, run them everywhere, then shrink whatever is new."""
        drawn = sample(strategy, examples, key)
        hunts = self._explore(drawn)
        for i, hunt in enumerate(hunts):
            asked = str(hunt.fault.signature)
            self._plainer(hunt)
            if hunt.origin is not None and not self._is_known(hunt.fault) and self._is_its_own(hunt):
                self._shrink(hunt, strategy, key, examples)
                self._plainer(hunt)
            if str(hunt.fault.signature) != asked:
                self._aliases[asked] = str(hunt.fault.signature)
            self._settle_if_new(hunt)
            # The case may have faults that are still to be hunted.
            if not any((h.adapter, h.begun_with) == (hunt.adapter, hunt.begun_with) for h in hunts[i + 1 :]):
                self._journal.done(hunt.adapter, hunt.begun_with)

    def _is_known(self, fault: Fault) -> bool:
        return str(fault.signature) in self._known

    def _is_its_own(self, hunt: _Hunt) -> bool:
        """Whether a crash or a hang comes again; what ended a process once is not worth shrinking."""
        signature = hunt.fault.signature
        if signature.verdict not in ("crash", "hang"):
            return True
        return any(judge(again).alike(signature) for again in self._runner.run([hunt.case], [hunt.adapter]))

    def _plainer(self, hunt: _Hunt) -> None:
        """Take back every unusual condition that the fault does not need, so that its signature says what it takes."""
        for name in hunt.case.how.unusual():
            plain = replace(hunt.case.how, **{name: getattr(PLAIN, name)})
            if name == "device" or not offers(hunt.adapter, plain):
                continue
            case = replace(hunt.case, how=plain)
            for answer in self._runner.run([case], [hunt.adapter]):
                fault = judge(answer).alike(hunt.fault.signature)
                if fault is not None:
                    hunt.case, hunt.fault = case, fault

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
                    for name in self._adapters:
                        if offers(name, case.how):
                            self._journal.begin(name, case)
                    yield case

        for answer in self._runner.run(feed(), self._adapters):
            judgement = self._judge(answer)
            self._progress(self.tally)
            for fault in judgement.faults:
                name = str(fault.signature)
                name = self._aliases.get(name, name)
                if name in self._known:
                    self.tally.known[name] += 1
                elif name not in hunts and self._doubted[name] < _MOST_DOUBTS:
                    hunts[name] = _Hunt(answer.adapter, fault, origin.get(answer.case), answer.case)
            if not any(h.begun_with == answer.case and h.adapter == answer.adapter for h in hunts.values()):
                self._journal.done(answer.adapter, answer.case)
        return list(hunts.values())

    def _shrink(self, hunt: _Hunt, strategy: st.SearchStrategy[Batch], key: int, examples: int) -> None:
        """Let Hypothesis shrink the batch: the same draws again, of which only the hunt's own one fails."""

        @seed(key)
        @settings(quiet_settings(examples), phases=[Phase.generate, Phase.shrink])
        @given(strategy)
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
            fault = judge(answer).alike(hunt.fault.signature)
            if fault is not None:
                found = answer.case, fault
        return found

    def _settle(self, hunt: _Hunt) -> None:
        """Confirm the shrunk fault as an ordinary user would run it, several times over, then save it."""
        signature = hunt.fault.signature
        runs = [a for _ in range(_REPEATS) for a in self._runner.run([hunt.case], [hunt.adapter], quick=False)]
        judged = [judge(a) for a in runs]
        shown = [j.fault(signature) for j in judged]
        if not any(shown) and compiled(hunt.adapter, hunt.case.how) and not any(j.faults for j in judged):
            self._doubted[str(signature)] += 1
            reason = "gone with the default compile options"
            self.tally.unconfirmed.append(
                {"signature": str(signature), "reason": reason, "sentence": hunt.fault.sentence}
            )
            return
        stable = all(shown)
        if not stable:
            hunt.fault = unstable(hunt.fault, judged)
            signature = hunt.fault.signature
            if self._is_known(hunt.fault):
                self.tally.known[str(signature)] += 1
                return
        original = hunt.case
        if stable and shown[0] is not None:
            self._reduce(hunt, runs[0], shown[0])
        seen = witnesses(self._runner, hunt.case, hunt.fault.signature)
        self._save(hunt, original if original != hunt.case else None, seen)

    def _reduce(self, hunt: _Hunt, answer: Answer, fault: Fault) -> None:
        """Shrink on past Hypothesis: to the op that is at fault, on few and simple numbers."""
        until = time.monotonic() + _SHRINK_SECONDS

        def fails(case: Case) -> bool:
            if time.monotonic() > until:
                return False
            for again in self._runner.run([case], [hunt.adapter], quick=False):
                same = judge(again).fault(hunt.fault.signature)
                if same is not None:
                    hunt.case, hunt.fault = case, same
                    return True
            return False

        alone = hunt.case if len(chain_of(hunt.case.block).links) == 1 else None
        if alone is None:
            alone = next(filter(fails, _ops_of(hunt.case, answer.outcome.trace, fault.quantity)), None)
            if alone is None:
                return
        written_out = explicit(alone.block, alone.tensors(), alone)
        if sum(v.size for v in alone.tensors().values()) <= MOST_EXPLICIT and fails(written_out):
            fewer(written_out, fails)

    def _judge(self, answer: Answer) -> Judgement:
        started = time.process_time()
        judgement = judge(answer)
        t, name = self.tally, answer.adapter
        how = answer.case.how
        cell = t.cells.setdefault((name, mode_of(name, how), answer.case.dtype), Cell())
        cell.runs += 1
        cell.verdicts[judgement.verdict] += 1
        row = (answer.case.block.kind, name, mode_of(name, how), answer.case.dtype)
        t.blocks.setdefault(row, Counter())[judgement.verdict] += 1
        t.conditions.update(how.label().split(",") if how.label() else ())
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
            cell.elements += report.elements
            cell.vacuous += report.vacuous
            t.ratios.setdefault(name, Counter())[_bin(report.worst_ratio)] += 1
            if judgement.verdict == "ok":
                cell.worst = max(cell.worst, report.worst_ratio)
                t.worst[name] = max(t.worst.get(name, 0.0), report.worst_ratio)
        return judgement


def _ops_of(case: Case, trace: Trace | None, blamed: Quantity | None) -> Iterator[Case]:
    """The op that is to blame as a case of its own; every op of the block, on a reference run, where none is."""
    sites = [blamed.link.partition("@")[2]] if blamed is not None else [k.writes for k in chain_of(case.block).links]
    if blamed is None:
        trace = reference(case).outcome.trace
    if trace is None:
        return
    for site in sites:
        alone = single_op(case, trace, site)
        if alone is not None:
            yield alone


def _bin(ratio: float) -> float:
    """The lower end, in decades, of the bin of an error/bar; one that is no number counts as too large."""
    low, high = _RATIOS
    if not math.isfinite(ratio):
        return high
    decades = math.log10(ratio) if ratio > 0.0 else low
    return min(max(math.floor(decades * BINS) / BINS, low), high)


def unstable(fault: Fault, runs: Sequence[Judgement]) -> Fault:
    """The fault of a case whose result changes from run to run: its own verdict, with what each run gave."""
    said = Counter(j.sentence or j.verdict for j in runs)
    spread = "; ".join(f"{count} of {len(runs)} runs: {what}" for what, count in said.most_common())
    sentence = f"unstable: first {fault.sentence}; then {spread}"
    return Fault(replace(fault.signature, verdict="unstable"), sentence)


def summary(tally: Tally, corpus: Corpus) -> dict[str, Any]:
    """The tally as the JSON of ``diffgrad fuzz``."""
    return {
        "cases": tally.cases,
        "recovered": tally.recovered,
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
        "conditions": [
            {
                "adapter": adapter,
                "mode": mode,
                "dtype": dtype,
                "runs": cell.runs,
                "verdicts": dict(cell.verdicts),
                "worst_error_over_bar": cell.worst,
                "vacuous_share": cell.vacuous / cell.elements if cell.elements else 0.0,
            }
            for (adapter, mode, dtype), cell in sorted(tally.cells.items())
        ],
        "blocks": [
            {"block": block, "adapter": adapter, "mode": mode, "dtype": dtype, "verdicts": dict(counts)}
            for (block, adapter, mode, dtype), counts in sorted(tally.blocks.items())
        ],
        "ratios": {
            name: [{"decades": low, "runs": runs} for low, runs in sorted(bins.items())]
            for name, bins in sorted(tally.ratios.items())
        },
        "unusual": dict(tally.conditions.most_common()),
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
