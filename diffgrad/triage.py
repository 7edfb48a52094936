"""Triage: the corpus at a glance, and a finding as a bug report in the shape of the framework's own template."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from typing import NamedTuple

import msgspec
from packaging.version import Version

from diffgrad import __version__
from diffgrad.chains import chain_of
from diffgrad.check import Quantity
from diffgrad.corpus import Corpus, Entry
from diffgrad.formulas import bar_in_words, formula
from diffgrad.impact import Impact, documented, impacts
from diffgrad.judge import judge
from diffgrad.repro import ReproError, script
from diffgrad.worker import Workers

STATUSES = ("open", "convention", "fixed")
"""In the order in which they are listed."""

_NAMES = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "numpy": "NumPy"}
_MOST_LINKS = 8
_MOST_NAMES = 12


class Row(msgspec.Struct, frozen=True):
    """An entry in the table. ``short`` is the shortest readable prefix that is only its own; ``link`` may be empty."""

    id: str
    short: str
    status: str
    signature: str
    seen: tuple[str, ...]
    link: str
    date: str
    age_days: int | None
    explanation: str


class Now(NamedTuple):
    """What a run of today gave: the framework's versions, the blamed quantity if there is one, and what shows.

    ``shows`` is whether the fault is still there, ``verdict`` the run's in a sentence.
    """

    versions: dict[str, str]
    shows: bool
    verdict: str
    quantity: Quantity | None


def rows(corpus: Corpus, today: date) -> list[Row]:
    """The corpus as a table: open findings first."""
    entries = sorted(corpus.entries(), key=lambda e: (STATUSES.index(e.status), e.signature.adapter, e.id))
    ids = [e.id for e in entries]
    return [
        Row(
            id=e.id,
            short=_short(e, ids),
            status=e.status,
            signature=str(e.signature),
            seen=e.seen,
            link=next(iter(e.upstream.replace(",", " ").split()), ""),
            date=e.date,
            age_days=(today - date.fromisoformat(e.date)).days if e.date else None,
            explanation=e.explanation or e.sentence,
        )
        for e in entries
    ]


def _short(entry: Entry, ids: Sequence[str]) -> str:
    hashed, adapter = entry.case.id, entry.signature.adapter
    prefixes = (hashed, f"{hashed}-{adapter}", entry.id)
    return next(p for p in prefixes if p == entry.id or sum(other.startswith(p) for other in ids) == 1)


def version_range(seen: Sequence[str]) -> str:
    """The first version and the last."""
    return "-" if not seen else seen[0] if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def run_now(entry: Entry) -> Now:
    """Run the entry's case as an ordinary user would.

    Raises:
        WorkerError: the framework is not at hand.
    """
    name = entry.signature.adapter
    advice = "or write the report from what is stored with --no-run"
    with Workers([name], advice=advice, device=entry.case.how.device) as workers:
        (answer,) = workers.run([entry.case], [name], quick=False)
        versions = workers.about()[name].versions
    judgement = judge(answer)
    fault = judgement.fault(entry.signature)
    said = judgement.sentence or judgement.verdict
    return Now(versions, fault is not None, said, fault.quantity if fault is not None else None)


def bug_report(entry: Entry, now: Now | None = None) -> str:
    """A finding as Markdown.

    Args:
        entry: the finding.
        now: what a run of today gave; None to tell only what is stored.
    """
    parts = [f"# {_title(entry)}", *_caveats(entry, now), *_TEMPLATES[entry.signature.adapter](entry, now)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _title(entry: Entry) -> str:
    s = entry.signature
    if s.link == "run":
        return f"[{_NAMES[s.adapter]} {s.mode}] {s.dtype} backward ends with {s.verdict}: {s.condition}"
    how = f" ({s.how})" if s.how else ""
    return f"[{_NAMES[s.adapter]} {s.mode}] {s.verdict} {s.condition} of {s.link} in {s.dtype}{how}"


def _caveats(entry: Entry, now: Now | None) -> Iterator[str]:
    """What a reader must know before filing this, if anything."""
    if now is not None and not now.shows:
        yield f"> **The fault no longer shows** with {_versions(now.versions)}: the case gives {_line(now.verdict)}."
    if entry.status == "fixed":
        yield "> Recorded as fixed: the case is expected to pass, so there is nothing to file."
    if entry.status == "convention":
        yield "> Recorded as a documented difference of convention, so this is no bug to file."
    if entry.upstream:
        yield f"> Already known: {entry.upstream}"


# The frameworks' own templates.


def _torch(entry: Entry, now: Now | None) -> Iterator[str]:
    yield from ("### 🐛 Describe the bug", *_story(entry, now), "### Versions", _environment(entry, now))


def _jax(entry: Entry, now: Now | None) -> Iterator[str]:
    yield from ("### Description", *_story(entry, now))
    yield from ("### System info (python version, jaxlib version, accelerator, etc.)", _environment(entry, now))


def _tensorflow(entry: Entry, now: Now | None) -> Iterator[str]:
    device = entry.case.how.device
    fields = {
        "Issue type": "Bug",
        "Have you reproduced the bug with TensorFlow Nightly?": _nightly(entry),
        "Source": "binary",
        "TensorFlow version": _versions(now.versions if now else entry.versions),
        "Custom code": "Yes",
        "OS platform and distribution": platform.platform(),
        "Python version": platform.python_version(),
        "GPU model and memory": "not used" if device == "cpu" else "a CUDA device",
    }
    for heading, value in fields.items():
        yield f"### {heading}\n\n{value}"
    yield from ("### Current behavior?", _summary(entry), *_rest(entry, now), _environment(entry, now))
    yield from ("### Standalone code to reproduce the issue", _repro(entry, now))
    yield from ("### Relevant log output", _fenced(_sentence(entry, now), "shell"))


def _numpy(entry: Entry, now: Now | None) -> Iterator[str]:
    yield from ("### Description", *_story(entry, now), "### Versions", _environment(entry, now))


_TEMPLATES: dict[str, Callable[[Entry, Now | None], Iterator[str]]] = {
    "torch": _torch,
    "jax": _jax,
    "tensorflow": _tensorflow,
    "numpy": _numpy,
}


def _story(entry: Entry, now: Now | None) -> Iterator[str]:
    yield _summary(entry)
    yield from ("#### Minimal reproduction", _repro(entry, now), *_rest(entry, now))


def _rest(entry: Entry, now: Now | None) -> Iterator[str]:
    yield from ("#### Expected value", _expected(entry, now))
    yield from ("#### Other modes, dtypes and frameworks", _witnesses(entry))
    yield from ("#### Versions tried", _history(entry))
    yield from ("#### Impact", _impact(entry))


# The parts.


def _summary(entry: Entry) -> str:
    return entry.explanation or entry.sentence


def _sentence(entry: Entry, now: Now | None) -> str:
    return now.quantity.sentence() if now is not None and now.quantity is not None else entry.sentence


def _repro(entry: Entry, now: Now | None) -> str:
    """A script where there can be one, else what runs the case in diffgrad."""
    if now is not None and now.shows:
        try:
            return _fenced(script(entry, now.quantity), "python")
        except ReproError:
            pass  # the case itself, then
    case = msgspec.json.format(entry.case.to_json(), indent=1).decode()
    return (
        f"`diffgrad replay corpus/{entry.id}.json` (diffgrad {__version__}) runs this case:\n\n{_fenced(case, 'json')}"
    )


def _expected(entry: Entry, now: Now | None) -> str:
    s = entry.signature
    if s.link == "run":
        return f"The run should end with gradients. It ends so:\n\n{_fenced(entry.sentence)}"
    lines = [f"The formula, in real numbers: `{formula(s.link)}`.", "", _fenced(_sentence(entry, now)), ""]
    return "\n".join([*lines, f"The expected value is that formula in float64. {bar_in_words(s.dtype)}"])


def _environment(entry: Entry, now: Now | None) -> str:
    how = entry.case.how.unusual()
    lines = [
        f"- found with {_versions(entry.versions)}" + (f" on {entry.date}" if entry.date else ""),
        f"- run now with {_versions(now.versions)}" if now else "- not run again for this report",
        f"- Python {platform.python_version()}, {platform.platform()}, {platform.machine()}",
        f"- device {entry.case.how.device}, diffgrad {__version__}",
        *([f"- conditions: {', '.join(f'{k} = {v}' for k, v in how.items())}"] if how else []),
    ]
    return "\n".join(lines)


def _witnesses(entry: Entry) -> str:
    if not entry.witnesses:
        return "None recorded."
    return _table(("run", "verdict"), entry.witnesses.items())


def _history(entry: Entry) -> str:
    """The first bad and the last good version, then every version tried."""
    name = _NAMES[entry.signature.adapter]
    if not entry.history:
        return f"Only {name} {', '.join(entry.seen)} so far; `diffgrad bisect {entry.id}` tries others."
    tried = sorted(entry.history, key=Version)
    bad = [v for v in tried if entry.history[v] == "fails"]
    good = [v for v in tried if entry.history[v] == "passes"]
    head = []
    if bad:
        before = [v for v in good if Version(v) < Version(bad[0])]
        after = [v for v in good if Version(v) > Version(bad[-1])]
        head.append(f"First bad: {bad[0]}. Last good before it: {before[-1] if before else 'none of those tried'}.")
        head += [f"Good again from {after[0]} on."] if after else []
    else:
        head.append("It fails in none of them.")
    return "\n\n".join((" ".join(head), _table((name, "outcome"), ((v, entry.history[v]) for v in tried))))


def _nightly(entry: Entry) -> str:
    nightly = {v: outcome for v, outcome in entry.history.items() if Version(v).is_prerelease}
    if not nightly:
        return "No"
    version = max(nightly, key=Version)
    return f"{version}: {nightly[version]}"


def _impact(entry: Entry) -> str:
    """What else is wrong in the documents' chains."""
    link, what = entry.signature.link, entry.signature.condition.removeprefix("bare ").split(" ")[0]
    if link == "run":
        return "The run gives no gradient at all."
    if link == "sgd":
        return "Every parameter after the step."
    block = (entry.original or entry.case).block
    chains = {block.kind: chain_of(block)}
    if len(chains[block.kind].links) == 1:  # found on the op alone
        chains = documented(link)
    found = [(kind, impact) for kind, chain in chains.items() for impact in impacts(chain, link, what)]
    if not found:
        return "None of the documents' blocks has this op."
    head = ("block", "link", "reads", "activations reached", "cotangents reached", "parameter gradients reached")
    cells = [(kind, *_cells(impact)) for kind, impact in found[:_MOST_LINKS]]
    more = f"\n\nAnd {len(found) - _MOST_LINKS} more links." if len(found) > _MOST_LINKS else ""
    return f"What a wrong {what} may reach in the chain, by what reads what:\n\n{_table(head, cells)}{more}"


def _cells(impact: Impact) -> Iterator[str]:
    yield f"`{impact.link}`"
    for names in impact[1:]:
        shown = ", ".join(names[:_MOST_NAMES]) or "-"
        yield f"{shown}, ... ({len(names)} in all)" if len(names) > _MOST_NAMES else shown


# Markdown.


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in versions.items())


def _line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
