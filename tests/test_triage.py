"""Triage: the table, the bug reports in the frameworks' own templates, and what a wrong op reaches in a chain."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diffgrad.adapters.registry import ADAPTERS
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.check import Quantity
from diffgrad.commands.triage import triage
from diffgrad.corpus import Corpus, CorpusError, Entry, Status
from diffgrad.errors import UsageError
from diffgrad.formulas import FORMULAS, bar_in_words
from diffgrad.impact import documented, impacts
from diffgrad.mutants import MUTANTS
from diffgrad.specs.ops import ActivationOpSpec
from diffgrad.strategies.cases import DTYPES
from diffgrad.triage import Now, Row, bug_report, rows, run_now
from diffgrad.values import Values
from tests.helpers import CORPUS, KINDS, SMALLEST, entry, ordinary, run_numpy, specs

TODAY = date(2026, 12, 1)
SAVED = list(Corpus(CORPUS).entries())
GELU = Case(block=ActivationOpSpec(n=1, size=2, act="gelu_tanh"), values=Values(seed=1))


def dated(seed: int, status: Status = "open", **fields: Any) -> Entry:
    one = entry(msgspec.structs.replace(SMALLEST, values=Values(seed=seed)), status)
    return msgspec.structs.replace(one, **fields)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.save(dated(1, "fixed", date="2026-11-01"))
    corpus.save(dated(2, upstream="https://example.org/1, https://example.org/2", date="2026-11-29"))
    corpus.save(dated(3, "convention"))
    corpus.save(dated(4, history={"1.9": "passes", "1.10": "fails", "2.1": "fails"}))
    return corpus


# The table.


def test_the_table_lists_open_findings_first(corpus: Corpus) -> None:
    listed = rows(corpus, TODAY)
    assert [row.status for row in listed] == ["open", "open", "convention", "fixed"]
    assert {(row.link, row.age_days) for row in listed} == {
        ("https://example.org/1", 2),
        ("", None),
        ("", 30),
    }
    assert {row.seen for row in listed} == {("2.0",), ("1.10", "2.0", "2.1")}


def test_a_short_id_is_its_own_entry_s() -> None:
    corpus = Corpus(CORPUS)
    for row in rows(corpus, TODAY):
        assert corpus.find(row.short).id == row.id


def test_the_command_prints_what_its_json_says(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "rows.json"
    file.parent.mkdir()
    triage(corpus=corpus.folder, json=file)
    shown = capsys.readouterr().out
    said = msgspec.json.decode(file.read_bytes())
    assert {k: said[k] for k in ("open", "convention", "fixed")} == {"open": 2, "convention": 1, "fixed": 1}
    assert msgspec.convert(said["entries"], list[Row]) == rows(corpus, datetime.now(UTC).date())
    for row in said["entries"]:
        assert row["short"] in shown
        assert row["signature"] in shown
    assert "1.10 to 2.1" in shown
    assert "4 in " in shown


def test_an_empty_corpus_is_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    triage(corpus=tmp_path)
    assert "0 open, 0 convention, 0 fixed" in capsys.readouterr().out


# Which finding.


@pytest.mark.parametrize(("prefix", "words"), [("zzz", "no entry of"), ("", "an empty id"), ("e", "say more")])
def test_an_id_that_names_no_entry_or_several_is_one_sentence(prefix: str, words: str, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    for name in ("e1", "e2"):
        (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(CorpusError, match=words) as e:
        triage(prefix, corpus=corpus.folder, run=False)
    assert "\n" not in str(e.value)


def test_only_a_bug_report_goes_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a finding"):
        triage(out=tmp_path / "x.md")


def test_a_report_that_cannot_be_written_is_one_sentence(corpus: Corpus) -> None:
    (first, *_) = rows(corpus, TODAY)
    with pytest.raises(UsageError, match=r"--out .*: cannot be written"):
        triage(first.short, out=corpus.folder / "no" / "x.md", run=False, corpus=corpus.folder)


def test_the_command_writes_the_report(corpus: Corpus, tmp_path: Path) -> None:
    (first, *_) = rows(corpus, TODAY)
    out, file = tmp_path / "x.md", tmp_path / "x.out"
    triage(first.short, out=out, run=False, corpus=corpus.folder, json=file)
    text = out.read_text()
    assert text == bug_report(corpus.find(first.short))
    assert msgspec.json.decode(file.read_bytes()) == {"id": first.id, "shows": None, "report": text}


# The report.

HEADINGS = {
    "torch": ("### 🐛 Describe the bug", "### Versions"),
    "jax": ("### Description", "### System info (python version, jaxlib version, accelerator, etc.)"),
    "tensorflow": (
        "### Issue type",
        "### Have you reproduced the bug with TensorFlow Nightly?",
        "### TensorFlow version",
        "### Current behavior?",
        "### Standalone code to reproduce the issue",
        "### Relevant log output",
    ),
    "numpy": ("### Description", "### Versions"),
}
PARTS = ("#### Expected value", "#### Other modes, dtypes and frameworks", "#### Versions tried", "#### Impact")


def test_every_framework_has_a_template() -> None:
    assert set(HEADINGS) == set(ADAPTERS)
    assert {e.signature.adapter for e in SAVED} >= set(ADAPTERS) - {"numpy"}


@pytest.mark.parametrize("saved", SAVED, ids=lambda e: e.id)
def test_a_saved_finding_has_every_section_of_its_template(saved: Entry) -> None:
    text = bug_report(saved)
    lines = text.splitlines()
    assert lines[0].startswith("# [")
    places = [lines.index(h) for h in HEADINGS[saved.signature.adapter]]
    assert places == sorted(places)
    assert all(part in lines for part in PARTS)
    assert saved.sentence in text
    assert f"diffgrad replay corpus/{saved.id}.json" in text
    assert "not run again" in text
    assert sum(line.startswith("```") for line in lines) % 2 == 0
    assert all(FORMULAS[op] in text for op in saved.signature.link.split("+") if op != "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "fixed"}, "nothing to file"),
        ({"status": "convention"}, "no bug to file"),
        ({"upstream": "https://example.org/7"}, "Already known: https://example.org/7"),
    ],
)
def test_what_must_not_be_filed_says_so_at_the_top(changes: dict[str, Any], words: str) -> None:
    text = bug_report(msgspec.structs.replace(entry(), **changes))
    assert words in text.split("###")[0]
    assert words not in bug_report(entry())


def test_a_fault_that_no_longer_shows_is_said_at_the_top() -> None:
    one = entry()  # of NumPy, which has no such fault
    now = run_now(one)
    assert (now.shows, now.quantity, now.verdict) == (False, None, "ok")
    assert "**The fault no longer shows** with numpy" in bug_report(one, now).split("###")[0]


def fault(what: str = "cotangent", defect: str = "") -> Now:
    q = Quantity("gelutanh@out", what, "CotIn", "wrong", defect, index=(0, 1), got=1.0, expected=0.25, bar=0.125)
    return Now({"torch": "9.9"}, True, q.sentence(), q)


def gelu(**fields: Any) -> Entry:
    return msgspec.structs.replace(entry(GELU, adapter="torch", link="gelutanh", condition="cotangent"), **fields)


def test_a_single_op_s_fault_has_a_script() -> None:
    text = bug_report(gelu(), fault())
    assert "no longer shows" not in text
    script = text.split("```python\n")[1].split("```")[0]
    compile(script, "script", "exec")
    assert "expected, bar = 0.25, 0.125" in script
    assert "run now with torch 9.9" in text
    assert "diffgrad replay" not in text


def test_where_no_script_can_be_there_is_the_case() -> None:
    missing = bug_report(gelu(), fault(defect="missing"))  # nothing to index
    net = bug_report(entry(adapter="torch"), fault())
    for text, case in ((missing, GELU), (net, SMALLEST)):
        shown = text.split("```json\n")[1].split("```")[0]
        assert msgspec.json.decode(shown) == msgspec.json.decode(case.to_json())


def test_witnesses_are_a_table() -> None:
    text = bug_report(gelu(witnesses={"torch compile": "ok", "jax jit": "a | b"}))
    assert "| torch compile | ok |\n| jax jit | a \\| b |" in text
    assert "None recorded." in bug_report(gelu())


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ({"2.9": "passes", "2.10": "fails", "2.11": "fails"}, "First bad: 2.10. Last good before it: 2.9."),
        ({"2.10": "fails", "2.11": "passes"}, "Last good before it: none of those tried. Good again from 2.11 on."),
        ({"2.10": "passes"}, "It fails in none of them."),
        ({}, "Only PyTorch 2.13 so far"),
    ],
)
def test_versions_tried_are_told_in_order(history: dict[str, str], words: str) -> None:
    text = bug_report(gelu(history=history, versions={"torch": "2.13"}))
    assert words in text
    assert all(f"| {version} | {outcome} |" in text for version, outcome in history.items())


def test_the_impact_is_that_on_the_block_the_fault_was_found_in() -> None:
    within = bug_report(gelu(original=ordinary("encoder")))
    assert "| encoder | `gelutanh@g` |" in within
    assert "| convnext |" not in within
    alone = bug_report(gelu())
    assert "| encoder | `gelutanh@g` |" in alone
    assert "| convnext | `gelutanh@g` |" in alone


# Formulas and bars in words.


def links() -> Iterator[str]:
    for kind in KINDS:
        for spec in specs(kind):
            yield from (link.op.name for link in chain_of(spec).links)


def test_every_op_has_its_line() -> None:
    assert set(FORMULAS) == set(links()) | {"sgd"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bar_is_told_in_powers_of_two(dtype: str) -> None:
    assert f"any correct {dtype} evaluation" in bar_in_words(dtype)
    assert "u = 2^-24 of its result" in bar_in_words("float32")
    assert "below 2^-14 may lose 2^-25" in bar_in_words("float16")


# Impact, held against what a planted fault really changes.


@pytest.mark.parametrize(
    ("name", "kind", "ops", "what"),
    [
        ("mask_forgotten", "uib", "relu", "cotangent"),
        ("conv_at_bn", "uib", "batchnorm", "cotangent"),
        ("bn_nodes_at_conv", "uib", "batchnorm", "gradient"),
        ("eps_outside", "uib", "batchnorm", "activation"),
        ("fan_in_doubled", "uib", "copy+add", "cotangent"),
        ("gelu_form", "convnext", "geluerf", "activation"),
        ("gelu_form_vit", "encoder", "gelutanh", "activation"),
    ],
)
def test_a_planted_fault_changes_what_its_impact_says(name: str, kind: str, ops: str, what: str) -> None:
    case = ordinary(kind)
    chain = chain_of(case.block)
    adapter = next(m.adapter for m in MUTANTS if m.name == name)()
    right, wrong = run_numpy(case), adapter.trace(case, case.tensors())[0]
    found = impacts(chain, ops, what)
    assert found
    names = chain.cotangents()
    pairs = (
        ({k: right.acts[k] for k in wrong.acts}, wrong.acts, {s for i in found for s in i.activations}),
        (
            {names[k]: v for k, v in right.cots.items()},
            {names[k]: v for k, v in wrong.cots.items()},
            {c for i in found for c in i.cotangents},
        ),
        (right.grads, wrong.grads, {n for i in found for n in i.nodes}),
    )
    for before, after, reached in pairs:
        assert {k for k in after if not np.array_equal(before[k], after[k])} == reached


def test_a_gradient_reaches_nothing_but_itself() -> None:
    (impact,) = impacts(chain_of(ordinary("convnext").block), "layernorm", "gradient")
    assert (impact.activations, impact.cotangents, impact.nodes) == ((), (), ("lng", "lnbt"))


def test_forward_mode_reaches_what_is_behind() -> None:
    (impact,) = impacts(chain_of(ordinary("convnext").block), "geluerf", "tangent")
    assert impact.activations[0] == "g"
    assert impact.activations[-1] == "out"
    assert (impact.cotangents, impact.nodes) == ((), ())


def test_the_documents_blocks_are_found_by_their_ops() -> None:
    assert set(documented("attention")) == {"attention", "encoder"}
    assert set(documented("prependcls")) == {"patch_embed"}
    assert all(impacts(chain, "attention", "gradient")[0].cotangents for chain in documented("attention").values())
