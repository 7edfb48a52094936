"""The HTML page: everything in it, nothing from elsewhere, and one sentence for what is not a command's JSON."""

from __future__ import annotations

import re
import sys
from collections import Counter
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import diffgrad
from diffgrad.campaign import BINS, Campaign, Tally, summary
from diffgrad.commands.report import report
from diffgrad.corpus import Corpus, Entry
from diffgrad.errors import UsageError
from diffgrad.mutants import MUTANTS
from diffgrad.report import page
from diffgrad.results import Fuzz, Mutants
from diffgrad.triage import rows
from diffgrad.worker import InProcess
from tests.helpers import CORPUS, SMALLEST, entry

NOW = datetime(2026, 12, 1, 12, 30, tzinfo=UTC)
EVIL = "<script>alert('&')</script>"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a short campaign writes."""
    corpus = Corpus(tmp_path_factory.mktemp("corpus"))
    tally = Campaign(InProcess(["numpy"]), corpus, ["op_act", "uib"]).run(1, examples=6)
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({"seed": 7, **summary(tally, corpus)}))
    return result


def fuzzed(result: dict[str, Any], **changes: Any) -> Fuzz:
    return msgspec.convert(result | changes, Fuzz)


def planted(**changes: Any) -> Mutants:
    """Three mutants: caught, caught at the wrong link, survived."""
    names = [m.name for m in MUTANTS[:3]]
    sentences = (
        "wrong at batchnorm@pn: gradient pg[0]: got 1, expected 2",
        "wrong at relu@er: cotangent CotEr[0]: x",
        "",
    )
    raw = {
        "mutants": 3,
        "killed": 2,
        "survivors": names[2:],
        "misblamed": names[1:2],
        "median_cases_to_kill": 3.5,
        "clean_cases": 400,
        "false_alarms": 0,
        "kills": {n: {"cases": c, "fault": f} for n, c, f in zip(names, (1, 6, 0), sentences, strict=True)},
    }
    return msgspec.convert(raw | changes, Mutants)


def shown(*entries: Entry, fuzz: Fuzz | None = None, mutants: Mutants | None = None, folder: Path) -> str:
    corpus = Corpus(folder)
    for one in entries:
        corpus.save(one)
    return page(rows(corpus, NOW.date()), fuzz, mutants, NOW)


class Parsed(HTMLParser):
    """Checks that elements are closed in order, and gathers ids, attributes and words."""

    VOID = ("meta", "br", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data

    def named(self, name: str) -> list[str]:
        return [value for _, n, value in self.attributes if n == name]


@pytest.fixture(scope="module")
def whole(campaign: dict[str, Any]) -> str:
    """The project's corpus, a campaign and planted faults."""
    return page(rows(Corpus(CORPUS), NOW.date()), fuzzed(campaign), planted(), NOW)


def test_the_page_holds_every_finding(whole: str) -> None:
    words = Parsed(whole).words
    for saved in Corpus(CORPUS).entries():
        assert saved.id in words
        assert str(saved.signature) in words
        assert (saved.explanation or saved.sentence) in words


def test_nothing_comes_from_elsewhere(whole: str) -> None:
    parsed = Parsed(whole)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(parsed.tags)
    assert not parsed.named("src")
    assert all(value.startswith("#") for tag, name, value in parsed.attributes if "href" in name)
    assert "http://" not in whole
    assert "@import" not in whole
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", whole))


def test_ids_are_unique_and_references_lead_somewhere(whole: str) -> None:
    parsed = Parsed(whole)
    ids = Counter(parsed.named("id"))
    assert [name for name, n in ids.items() if n > 1] == []
    wanted = {v[1:] for v in parsed.named("href")} | set(re.findall(r"url\(#([^)]*)\)", whole))
    wanted |= {name for value in parsed.named("aria-labelledby") for name in value.split()}
    assert wanted - set(ids) == set()


def test_plots_are_read_aloud_and_take_the_page_s_colours(whole: str) -> None:
    drawn = re.findall(r"<svg.*?</svg>", whole, re.DOTALL)
    assert len(drawn) == 3
    for svg in drawn:
        assert 'role="img" aria-labelledby=' in svg[: svg.index(">")]
        assert re.search(r"<title [^>]*>\w", svg)
        assert re.search(r"<desc [^>]*>\w", svg)
        assert not re.search(r"(fill|stroke): #", svg)
    assert "prefers-color-scheme: dark" in whole


def test_tables_scroll_by_keyboard_too(whole: str) -> None:
    assert whole.count("<table") == whole.count("<div class=scroll role=region tabindex=0 aria-label=")


def test_verdicts_are_counted_by_block_framework_and_mode(campaign: dict[str, Any], tmp_path: Path) -> None:
    blocks = [
        {"block": "uib", "adapter": "torch", "mode": "eager", "dtype": d, "verdicts": {"ok": 1000, "wrong": 2}}
        for d in ("float32", "float64")
    ]
    blocks += [{"block": "vit", "adapter": "jax", "mode": "jit", "dtype": "float32", "verdicts": {"lossy:fft": 3}}]
    text = shown(fuzz=fuzzed(campaign, blocks=blocks), folder=tmp_path)
    assert "<td class=poor>2,004<small>4 wrong</small></td>" in text
    assert "<td class=warn>3<small>3 fft</small></td>" in text


def test_a_campaign_s_own_findings_are_marked(campaign: dict[str, Any], tmp_path: Path) -> None:
    here, there = entry(), "000000000000-torch-relu-cotangent"
    new = [{"id": i, "signature": "a/b/c", "sentence": EVIL} for i in (here.id, there)]
    known = [{"signature": str(here.signature), "count": 31}]
    doubts = [{"signature": "d/e/f", "reason": "gone & lost", "sentence": EVIL}]
    fuzz = fuzzed(campaign, new_findings=new, known_findings=known, unconfirmed=doubts)
    text = shown(here, fuzz=fuzz, folder=tmp_path)
    assert text.count('<span class="mark poor">new</span>') == 1
    assert "<td class=number>31</td>" in text
    words = Parsed(text).words
    assert there in words
    assert words.count(EVIL) == 2
    assert "gone & lost" in words


def test_text_is_escaped(tmp_path: Path) -> None:
    text = shown(msgspec.structs.replace(entry(), explanation=EVIL, upstream=f'"{EVIL}'), folder=tmp_path)
    assert "<script" not in text
    assert EVIL in Parsed(text).words


def test_a_link_leads_to_the_framework_s_issue(tmp_path: Path) -> None:
    text = shown(msgspec.structs.replace(entry(), upstream="https://example.org/1?a&b"), folder=tmp_path)
    assert 'href="https://example.org/1?a&amp;b"' in text


def test_the_planted_faults_form_a_matrix(tmp_path: Path) -> None:
    words = Parsed(text := shown(mutants=planted(), folder=tmp_path)).words
    assert all(m.trap in words for m in MUTANTS[:3])
    assert "2 of 3 planted faults" in words
    assert text.count("●") == 2
    assert text.count("the wrong link</span>") == 1
    assert text.count("survived") == 1


def test_findings_alone_make_a_page(tmp_path: Path) -> None:
    text = shown(entry(), folder=tmp_path)
    parsed = Parsed(text)
    assert parsed.tags["section"] == 1
    assert "<svg" not in text
    assert Parsed(shown(folder=tmp_path / "none")).tags["table"] == 0


def test_a_campaign_of_nothing_makes_a_page(tmp_path: Path) -> None:
    result = {"seed": 1, **summary(Tally(), Corpus(tmp_path))}
    fuzz = msgspec.json.decode(msgspec.json.encode(result), type=Fuzz)
    Parsed(shown(fuzz=fuzz, mutants=planted(kills={}, mutants=0, killed=0), folder=tmp_path))


def test_runs_are_counted_by_their_worst_error_over_bar(campaign: dict[str, Any]) -> None:
    bins = campaign["ratios"]["numpy"]
    assert sum(b["runs"] for b in bins) == sum(n for k, n in campaign["verdicts"].items() if k != "unsupported")
    assert all(b["decades"] * BINS == int(b["decades"] * BINS) for b in bins)
    assert all(b["decades"] < 0 for b in bins)  # the reference lies within its bars
    runs = sum(n for row in campaign["blocks"] for n in row["verdicts"].values())
    assert runs == sum(campaign["verdicts"].values())


# The command.


def test_the_command_writes_page_and_json(
    campaign: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Corpus(tmp_path / "corpus")
    corpus.prepare()
    corpus.save(entry(SMALLEST))
    fuzz, mutants, html, file = (tmp_path / name for name in ("f", "m", "page.html", "out"))
    fuzz.write_bytes(msgspec.json.encode(campaign))
    mutants.write_bytes(msgspec.json.encode(planted()))
    report(html, fuzz, mutants, corpus.folder, file)
    text = html.read_text()
    assert Parsed(text).tags["section"] == 5
    assert msgspec.json.decode(file.read_bytes()) == {"file": str(html), "findings": 1, "bytes": len(text.encode())}
    assert "1 findings, a campaign, the planted faults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Input data was truncated"),
        ("\xff", "malformed"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field"),
        ('{"seed": "x"}', r"\$.seed"),
        (None, "cannot be read"),
    ],
)
@pytest.mark.parametrize("option", ["fuzz", "mutants"])
def test_what_is_no_result_is_one_sentence(option: str, text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    if option == "mutants" and text and "seed" in text:
        words = "missing required field"  # which has no seed
    with pytest.raises(UsageError, match=rf"^--{option} .*{words}") as e:
        report(tmp_path / "page.html", corpus=tmp_path / "none", **{option: file})
    assert "\n" not in str(e.value)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--html .*: cannot be written \(No such file or directory\)"):
        report(tmp_path / "no" / "page.html", corpus=tmp_path)


def test_without_matplotlib_the_sentence_says_what_to_install(
    campaign: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "diffgrad.plots", raising=False)
    monkeypatch.delattr(diffgrad, "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "f").write_bytes(msgspec.json.encode(campaign))
    with pytest.raises(UsageError, match=r"pip install 'diffgrad\[report\]'"):
        report(tmp_path / "page.html", tmp_path / "f", corpus=tmp_path / "none")
