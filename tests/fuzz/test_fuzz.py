"""The property test: whatever is drawn, every link of every framework lies within its derived error bar.

A few batches with a fixed seed by default; ``--fuzz-seconds S`` gives each framework S seconds, ``--fuzz-seed K``
another seed. A new finding in a framework is saved in the corpus as ``open`` and is an expected failure, since it is
the framework's; a finding in our own reference is a failure, and so is one that the reference shows as well.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from diffgrad.adapters.registry import ADAPTERS
from diffgrad.campaign import Campaign
from diffgrad.case import Case
from diffgrad.corpus import Corpus, Entry
from diffgrad.mutants import MUTANTS
from diffgrad.specs import UibSpec
from diffgrad.values import Values
from diffgrad.worker import InProcess
from tests.conftest import GetWorkers
from tests.fuzz.rules import Ruling, rule
from tests.helpers import CORPUS, KINDS, SMALLEST, entry

BATCHES = 30
"""Drawn for each framework by default: some hundreds of cases."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_link_is_within_its_bar(
    name: str, workers: GetWorkers, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    # Nothing is known of our own reference: every fault there is new, and fails.
    corpus = Corpus(tmp_path if name == "numpy" else CORPUS)
    seconds = pytestconfig.getoption("--fuzz-seconds")
    campaign = Campaign(workers(name), corpus, KINDS)
    tally = campaign.run(
        pytestconfig.getoption("--fuzz-seed"), seconds=seconds, examples=BATCHES if seconds is None else None
    )
    ruling = rule(tally.new, corpus, workers("numpy"))
    assert not ruling.fail, ruling.fail
    if ruling.xfail:
        pytest.xfail(ruling.xfail)
    counts = tally.verdicts[name]
    assert sum(counts.values()) == tally.cases > 0
    assert tally.links_checked >= tally.cases - counts["unsupported"]
    if not tally.known and not tally.unconfirmed:
        assert not any(counts[fault] for fault in ("wrong", "nonfinite", "crash", "hang", "error"))


# The rules themselves.


def finding(adapter: str, case: Case = SMALLEST) -> Entry:
    return entry(case, adapter=adapter)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def saved(corpus: Corpus, *entries: Entry) -> list[Entry]:
    for e in entries:
        corpus.save(e)
    corpus.write_index()
    return list(entries)


def test_no_finding_is_no_failure(corpus: Corpus) -> None:
    with InProcess(["numpy"]) as healthy:
        assert rule([], corpus, healthy) == Ruling()


def test_a_framework_s_own_fault_is_an_expected_failure_and_stays_in_the_corpus(corpus: Corpus) -> None:
    new = saved(corpus, finding("torch"))
    with InProcess(["numpy"]) as healthy:
        ruling = rule(new, corpus, healthy)
    assert ruling == Ruling(xfail=f"{new[0].sentence} ({corpus.folder / new[0].id}.json)")
    assert list(corpus.entries()) == new


def test_a_fault_that_the_reference_shows_as_well_is_ours(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is faulty where the block has a post-depthwise: only that finding is ours."""
    faulty = next(m.adapter for m in MUTANTS if m.name == "post_left_out")
    monkeypatch.setattr("diffgrad.worker.load", lambda name, quick=False: faulty())
    with_post = Case(block=UibSpec(n=1, h=2, w=2, c=1, post_k=3), values=Values(seed=1))
    ours, theirs = saved(corpus, finding("torch", with_post), finding("torch"))
    with InProcess(["numpy"]) as reference:
        ruling = rule([ours, theirs], corpus, reference)
    assert ruling.fail.startswith(with_post.to_json().decode())
    assert "(numpy: wrong at depthwise@dc: activation dc: not delivered" in ruling.fail
    assert ruling.xfail.startswith(theirs.sentence)
    assert list(corpus.entries()) == [theirs]
    assert ours.id not in (corpus.folder / "INDEX.md").read_text()


def test_any_finding_in_the_reference_is_ours(corpus: Corpus) -> None:
    new = saved(corpus, finding("numpy"), msgspec.structs.replace(finding("jax"), status="open"))
    with InProcess(["numpy"]) as healthy:
        ruling = rule(new, corpus, healthy)
    assert "(numpy: ok)" in ruling.fail
    assert [e.signature.adapter for e in corpus.entries()] == ["jax"]
