"""A campaign from the first fault to the saved entry: found, shrunk, saved once, known afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffgrad.adapters.base import Adapter
from diffgrad.adapters.numpy import NumpyAdapter, Var
from diffgrad.adapters.registry import OFFERS, Offer
from diffgrad.campaign import Campaign, Tally, summary
from diffgrad.case import Case
from diffgrad.corpus import Corpus, Entry, Status
from diffgrad.mutants import MUTANTS
from diffgrad.replay import replay
from diffgrad.specs import ActivationOpSpec, Drop, UibSpec
from diffgrad.strategies.cases import WIDE
from diffgrad.trace import Arrays, Outcome, Trace
from diffgrad.worker import InProcess, Runner
from tests.helpers import KINDS

FAULTY = {m.name: m.adapter for m in MUTANTS}
Load = Callable[[str, bool], Adapter]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Load], Runner]:
    """runner(load): the adapter that is called numpy, in this process, made by ``load(name, quick)``."""

    def make(load: Load) -> Runner:
        monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: load(name, quick))
        return InProcess(["numpy"])

    return make


Make = Callable[[Load], Runner]


def planted(name: str) -> Load:
    return lambda _, quick: FAULTY[name]()


def healthy(_: str, quick: bool) -> Adapter:
    return NumpyAdapter()


def campaign(
    runner: Runner, folder: Path, key: int = 1, examples: int = 40, blocks: Sequence[str] = ("uib",), **options: Any
) -> tuple[Tally, Corpus]:
    corpus = Corpus(folder)
    corpus.prepare()
    options = {"dtypes": ["float32"], **options}  # in the other dtype the same fault would be another finding
    return Campaign(runner, corpus, blocks, **options).run(key, examples=examples), corpus


SMALLEST: dict[str, UibSpec] = {
    # planted fault: the smallest block that can show it
    "fan_in_doubled": UibSpec(n=1, h=1, w=1, c=1),
    "post_left_out": UibSpec(n=1, h=1, w=1, c=1, post_k=3),
    "pre_masked": UibSpec(n=1, h=1, w=2, c=1, pre_k=3),
    "pre_post_swapped": UibSpec(n=1, h=1, w=2, c=1, pre_k=3, post_k=3),
    "keep_forgotten": UibSpec(n=1, h=1, w=1, c=1, drop=Drop(0.5, (True,))),
    "batch_mean": UibSpec(n=2, h=1, w=1, c=1),
    "part_per_thousand": UibSpec(n=1, h=1, w=2, c=1),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_planted_fault_is_found_and_shrunk_to_what_it_needs(name: str, runner: Make, tmp_path: Path) -> None:
    tally, corpus = campaign(runner(planted(name)), tmp_path, dtypes=["float32"])
    assert list(corpus.entries()) == sorted(tally.new, key=lambda e: e.id)
    found = tally.new[0]  # the others are its echoes
    block = found.original or found.case
    spec, least = block.block, SMALLEST[name]
    assert isinstance(spec, UibSpec)
    assert (spec.pre_k, spec.post_k, spec.expand) == (least.pre_k, least.post_k, 1)
    assert (spec.drop is None) == (least.drop is None)
    assert spec.n <= least.n
    assert spec.n * spec.c * spec.h * spec.w <= 4
    assert (block.dtype, block.values.seed, block.overrides) == ("float32", 0, {})


OTHERS = {m.blocks[0]: m.name for m in MUTANTS if len(m.blocks) == 1 and m.blocks != ("uib",)}
"""Block -> the last planted fault that is made for it alone."""
OTHERS |= {"op_act": "relu_at_zero", "op_softmax": "softmax_alone_not_centred"}  # the last ones take rare values, sizes


@pytest.mark.parametrize("kind", OTHERS)
def test_a_fault_in_any_block_is_shrunk_to_few_numbers(kind: str, runner: Make, tmp_path: Path) -> None:
    tally, _ = campaign(runner(planted(OTHERS[kind])), tmp_path, blocks=[kind], dtypes=["float32"])
    assert tally.new
    for found in tally.new:
        assert (found.original or found.case).block.kind == kind
        # Two encoder blocks whose tokens are 2 wide, as a layer norm needs, are 82.
        assert sum((v != 0).sum() for v in found.case.tensors().values()) <= 82


OF_ONE_OP: dict[str, tuple[str, ...]] = {
    # planted fault: the op of its first case; the block is the first one that it is made for
    "batch_mean": ("op_conv",),
    "depthwise_same": ("op_conv",),
    "bias_mean": ("op_conv",),
    "frozen_statistics": ("op_bn",),
    "part_per_thousand": ("op_bn",),
    "ln_frozen": ("op_ln",),
    "vit_tokens_frozen": ("op_ln",),
    "gelu_form": ("op_act",),
    "mask_forgotten": ("op_act",),
    "scale_skipped": ("op_scale",),
    "softmax_not_centred": ("op_softmax", "op_sdpa"),
    "dense_bias_mean": ("op_dense",),
    "keys_unscaled": ("op_sdpa",),
}
MADE_FOR = {m.name: (m.blocks or ("uib",))[0] for m in MUTANTS}


@pytest.mark.parametrize("name", OF_ONE_OP)
def test_an_op_s_fault_ends_as_a_case_of_that_op_on_a_handful_of_numbers(
    name: str, runner: Make, tmp_path: Path
) -> None:
    block = MADE_FOR[name]
    tally, corpus = campaign(runner(planted(name)), tmp_path, blocks=[block])
    assert tally.new
    for found in corpus.entries():
        assert (found.original or found.case).block.kind == block
        assert found.case.block.kind in OF_ONE_OP[name]
        assert sum((v != 0).sum() for v in found.case.tensors().values()) <= 6
        again = next(iter(replay([found], runner(planted(name)))))
        assert again.as_expected
        assert found.witnesses["numpy float32"] == "ok"  # the healthy one
        assert found.date


@pytest.mark.parametrize("name", ["fan_in_doubled", "pre_post_swapped"])
def test_a_wiring_fault_stays_a_block_s(name: str, runner: Make, tmp_path: Path) -> None:
    tally, _ = campaign(runner(planted(name)), tmp_path)
    (found,) = tally.new
    assert (found.case.block.kind, found.original) == ("uib", None)


class FaultyRelu(NumpyAdapter):
    """At fault where the input is a view with steps, or without ``stepping`` everywhere."""

    stepping = False

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        self.faulty = case.how.x == "step" or not self.stepping
        return super().trace(case, tensors)

    def relu(self, x: Var) -> Var:
        y = super().relu(x)
        return Var(y.value, (x,), lambda dy: (2 * y.pull(dy)[0],)) if self.faulty else y


class FaultyReluOfStep(FaultyRelu):
    stepping = True


@pytest.mark.parametrize(("adapter", "mode", "how"), [(FaultyReluOfStep, "eager", "x=step"), (FaultyRelu, "jit", "")])
def test_a_fault_is_reduced_under_the_conditions_that_it_takes(
    adapter: type[NumpyAdapter], mode: str, how: str, runner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OFFERS, "numpy", CONDITIONS if mode == "eager" else Offer(modes=(mode,)))
    tally, _ = campaign(runner(lambda _, quick: adapter()), tmp_path, key=2, examples=120)
    (found,) = tally.new
    assert (found.case.block.kind, found.signature.mode, found.case.how.label()) == ("op_act", mode, how)
    assert sum((v != 0).sum() for v in found.case.tensors().values()) == 2
    assert found.original is not None


def test_a_fault_that_comes_and_goes_is_unstable_and_says_how_often(runner: Make, tmp_path: Path) -> None:
    class Moody(NumpyAdapter):
        runs = 0

        def add(self, a: Var, b: Var) -> Var:
            type(self).runs += 1
            wrong = 1 + self.runs % 3 % 2  # every third time
            return Var(a.value + b.value, (a, b), lambda dy: (dy, wrong * dy))

    tally, corpus = campaign(runner(lambda _, quick: Moody()), tmp_path)
    (found,) = corpus.entries()
    assert str(found.signature) == "numpy/eager/float32/copy+add/unstable/cotangent"
    assert "of 3 runs: wrong at copy@xb+add@out" in found.sentence
    assert "of 3 runs: ok" in found.sentence
    assert set(tally.known) <= {str(found.signature)}
    again, _ = campaign(runner(lambda _, quick: Moody()), tmp_path, key=2)
    assert (again.new, set(again.known)) == ([], {str(found.signature)})


def test_a_finding_is_saved_whole(runner: Make, tmp_path: Path) -> None:
    tally, corpus = campaign(runner(planted("fan_in_doubled")), tmp_path)
    (found,) = tally.new
    assert str(found.signature) == "numpy/eager/float32/copy+add/wrong/cotangent"
    assert found.sentence.startswith("wrong at copy@xb+add@out: cotangent CotIn[0,0,0,0]: got ")
    assert (found.status, found.explanation, found.upstream) == ("open", "", "")
    assert set(found.versions) == {"numpy"}
    assert f"[{found.id}]({found.id}.json)" in (tmp_path / "INDEX.md").read_text()
    assert summary(tally, corpus)["new_findings"] == [
        {
            "id": found.id,
            "file": str(tmp_path / f"{found.id}.json"),
            "signature": str(found.signature),
            "verdict": "wrong",
            "sentence": found.sentence,
        }
    ]


def test_a_signature_is_reported_once_and_counted_afterwards(runner: Make, tmp_path: Path) -> None:
    """Each dtype is a signature of its own; a round of batches ends at a new finding, so more than one is needed."""
    faulty = runner(planted("fan_in_doubled"))
    tally, corpus = campaign(faulty, tmp_path, examples=80, dtypes=WIDE)
    found = {str(e.signature) for e in tally.new}
    assert found == {f"numpy/eager/{d}/copy+add/wrong/cotangent" for d in ("float32", "float64")}
    assert len(list(corpus.entries())) == len(found)
    assert set(tally.known) <= found
    again, _ = campaign(faulty, tmp_path, key=2, examples=8, dtypes=WIDE)
    assert (again.new, set(again.known)) == ([], found)
    assert again.known.total() == again.verdicts["numpy"]["wrong"] == again.cases
    assert summary(again, corpus)["known_findings"] == [
        {"signature": s, "count": again.known[s]} for s in sorted(found)
    ]


@pytest.mark.parametrize(("status", "new"), [("open", 0), ("convention", 0), ("fixed", 1)])
def test_what_was_fixed_is_new_when_it_comes_back(status: Status, new: int, runner: Make, tmp_path: Path) -> None:
    faulty = runner(planted("fan_in_doubled"))
    (found,) = campaign(faulty, tmp_path / "first", dtypes=["float32"])[0].new
    Corpus(tmp_path).save(msgspec.structs.replace(found, status=status))
    assert len(campaign(faulty, tmp_path, dtypes=["float32"], examples=4)[0].new) == new


def test_replay_of_a_finding(runner: Make, tmp_path: Path) -> None:
    _, corpus = campaign(runner(planted("fan_in_doubled")), tmp_path)
    (found,) = corpus.entries()
    (again,) = replay([found], runner(planted("fan_in_doubled")))
    assert (again.as_expected, again.got) == (True, str(found.signature))
    (mended,) = replay([found], runner(healthy))
    assert (mended.as_expected, mended.got, mended.expected) == (False, "ok", str(found.signature))


def test_an_exception_is_a_finding_of_its_own(runner: Make, tmp_path: Path) -> None:
    class Raises(NumpyAdapter):
        def relu(self, x: Any) -> Any:
            if x.value.shape[-1] > 2:
                raise NotImplementedError("no kernel for this width")
            return super().relu(x)

    tally, _ = campaign(runner(lambda _, quick: Raises()), tmp_path)
    (found,) = tally.new
    assert str(found.signature).endswith("/run/error/NotImplementedError no-kernel-for-this-width")
    assert found.sentence == "error: NotImplementedError: no kernel for this width"
    assert found.case.block == ActivationOpSpec(n=1, size=3, act="relu")
    assert found.original is not None
    assert isinstance(found.original.block, UibSpec)
    assert (found.original.block.w, found.original.block.c) == (3, 1)


# Compiled modes: explored with cheap compilation, confirmed with the default one.


class FaultyAdd(NumpyAdapter):
    def add(self, a: Var, b: Var) -> Var:
        return Var(a.value + b.value, (a, b), lambda dy: (dy, 2 * dy))


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter that is called numpy is taken for a compiler."""
    monkeypatch.setitem(OFFERS, "numpy", Offer(modes=("jit",), compiled=("jit",)))


@pytest.mark.usefixtures("jitted")
def test_a_fault_of_the_quick_compilation_only_is_no_finding(runner: Make, tmp_path: Path) -> None:
    quickly = runner(lambda _, quick: FaultyAdd() if quick else NumpyAdapter())
    tally, corpus = campaign(quickly, tmp_path, dtypes=["float32"])
    assert (tally.new, list(corpus.entries())) == ([], [])
    gone = tally.unconfirmed[0]  # it is tried again whenever it shows, a few times
    assert all(other["signature"] == gone["signature"] for other in tally.unconfirmed)
    assert gone["signature"] == "numpy/jit/float32/copy+add/wrong/cotangent"
    assert gone["reason"] == "gone with the default compile options"
    assert gone["sentence"].startswith("wrong at copy@xb+add@out")


@pytest.mark.usefixtures("jitted")
def test_a_fault_of_both_compilations_is_one(runner: Make, tmp_path: Path) -> None:
    tally, _ = campaign(runner(lambda _, quick: FaultyAdd()), tmp_path, dtypes=["float32"])
    assert [str(e.signature) for e in tally.new] == ["numpy/jit/float32/copy+add/wrong/cotangent"]
    assert tally.unconfirmed == []


# Conditions: a fault is filed under the plainest ones that show it.


class FaultyStep(FaultyAdd):
    """At fault where the input is a view with steps."""

    stepped = False

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        self.stepped = case.how.x == "step"
        return super().trace(case, tensors)

    def add(self, a: Var, b: Var) -> Var:
        return super().add(a, b) if self.stepped else NumpyAdapter.add(self, a, b)


CONDITIONS = Offer(modes=("eager", "func"), layouts=("channels_last",), flavours=("x", "dy", "params", "deterministic"))


@pytest.mark.parametrize(("adapter", "how"), [(FaultyAdd, ""), (FaultyStep, "x=step")])
def test_a_fault_is_filed_under_the_plainest_conditions_that_show_it(
    adapter: type[NumpyAdapter], how: str, runner: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OFFERS, "numpy", CONDITIONS)
    tally, _ = campaign(runner(lambda _, quick: adapter()), tmp_path, examples=120, dtypes=["float32"])
    (found,) = tally.new
    assert (found.signature.mode, found.signature.how, found.case.how.label()) == ("eager", how, how)
    # Under other conditions it is known, be it the plain ones or with others on top.
    assert set(tally.known) <= {str(found.signature)}
    again, _ = campaign(runner(lambda _, quick: adapter()), tmp_path, key=7, examples=120, dtypes=["float32"])
    assert (again.new, set(again.known)) == ([], {str(found.signature)})


# Counting.


def test_a_clean_campaign_counts_everything_and_finds_nothing(runner: Make, tmp_path: Path) -> None:
    steps: list[int] = []
    corpus = Corpus(tmp_path)
    c = Campaign(runner(healthy), corpus, KINDS, progress=lambda tally: steps.append(tally.cases))
    tally = c.run(key=1, examples=10)
    assert (tally.new, tally.known, tally.unconfirmed, list(corpus.entries())) == ([], {}, [], [])
    assert sum(tally.verdicts["numpy"].values()) == tally.cases == len(steps) == steps[-1]
    assert tally.cases >= 10
    assert tally.links_checked > tally.cases < tally.nodes_checked
    assert 0 <= tally.vacuous_share < 1
    assert 0 < tally.worst["numpy"] <= 1
    assert tally.total_cpu_s >= tally.worker_cpu_s >= tally.framework_cpu_s["numpy"] > 0
    assert tally.own_cpu_s >= tally.oracle_cpu_s > 0


def cases_of(runner: Runner, folder: Path, key: int) -> list[Case]:
    seen: list[Case] = []
    run = runner.run

    def spy(cases: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for answer in run(cases, *args, **kwargs):
            seen.append(answer.case)
            yield answer

    runner.run = spy  # type: ignore[method-assign]
    campaign(runner, folder, key, examples=5)
    return seen


def test_a_seed_gives_the_same_cases_again(runner: Make, tmp_path: Path) -> None:
    one, again, other = (cases_of(runner(healthy), tmp_path, key) for key in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("budget", [{"examples": 0}, {"seconds": 0.0}], ids=str)
def test_no_budget_no_cases(budget: dict[str, Any], runner: Make, tmp_path: Path) -> None:
    assert Campaign(runner(healthy), Corpus(tmp_path), ["uib"]).run(1, **budget).cases == 0


def test_a_time_budget_ends_a_campaign(runner: Make, tmp_path: Path) -> None:
    tally = Campaign(runner(healthy), Corpus(tmp_path), ["uib"]).run(1, seconds=0.5)
    assert tally.cases > 0
    assert tally.wall_s >= 0.5


def test_what_a_framework_does_not_support_is_counted_with_its_reason(runner: Make, tmp_path: Path) -> None:
    class Refuses(NumpyAdapter):
        def run(self, case: Case) -> Outcome:
            return Outcome("unsupported", reason="a documented limit")

    tally, _ = campaign(runner(lambda _, quick: Refuses()), tmp_path)
    assert tally.new == []
    assert tally.unsupported == {"numpy: a documented limit": tally.cases}


def test_a_damaged_corpus_is_noticed_before_the_search(runner: Make, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RuntimeError, match=r"x.json: not a corpus entry"):
        campaign(runner(healthy), tmp_path)


def test_entries_have_the_versions_of_the_run(runner: Make, tmp_path: Path) -> None:
    faulty = runner(planted("fan_in_doubled"))
    found: list[Entry] = campaign(faulty, tmp_path)[0].new
    assert found[0].versions == faulty.about()["numpy"].versions
