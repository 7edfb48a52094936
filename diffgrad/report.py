"""The HTML page: findings, verdicts, distances, planted faults and throughput, in one file that needs no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files

from diffgrad import __version__
from diffgrad.campaign import BINS
from diffgrad.judge import FAULTY
from diffgrad.mutants import MUTANTS
from diffgrad.results import Condition, Fuzz, Mutants
from diffgrad.triage import STATUSES, Row, version_range

_TITLES = {"open": "Open", "convention": "Differences of convention", "fixed": "Fixed"}


class Markup(str):
    """Text that is HTML already."""


def page(findings: Sequence[Row], fuzz: Fuzz | None, mutants: Mutants | None, made: datetime) -> str:
    """The whole page.

    Args:
        findings: the corpus as a table.
        fuzz: a campaign's result, if there is one.
        mutants: the planted faults' result, if there is one.
        made: the time to state.

    Raises:
        ImportError: there is something to plot, and matplotlib is not installed.
    """
    sections = {"findings": ("Findings", list(_findings(findings, fuzz)))}
    if fuzz is not None:
        sections["verdicts"] = ("Verdicts", list(_verdicts(fuzz)))
        sections["distances"] = ("Error over bar", list(_distances(fuzz)))
        sections["throughput"] = ("Throughput", list(_throughput(fuzz)))
    if mutants is not None:
        sections["mutants"] = ("Planted faults", list(_mutants(mutants)))
    style = files("diffgrad").joinpath("report.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, (title, _) in sections.items())
    body = "\n".join(
        f'<section id="{key}" aria-labelledby="{key}-title">\n<h2 id="{key}-title">{escape(title)}</h2>\n'
        + "\n".join(parts)
        + "\n</section>"
        for key, (title, parts) in sections.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>diffgrad report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header>\n"
        "<h1>diffgrad report</h1>\n<p>The backward passes of PyTorch, JAX and TensorFlow, held against closed forms in "
        f"float64 with derived error bars.</p>\n<nav aria-label='Sections'>{links}</nav>\n"
        f"{_tiles(findings, fuzz, mutants)}\n</header>\n<main>\n{body}\n</main>\n"
        f"<footer>Written by diffgrad {escape(__version__)} on {made:%Y-%m-%d at %H:%M} UTC.</footer>\n"
        "</body>\n</html>\n"
    )


def _tiles(findings: Sequence[Row], fuzz: Fuzz | None, mutants: Mutants | None) -> str:
    count = Counter(row.status for row in findings)
    tiles = [("open findings", str(count["open"]), count["open"] > 0)]
    tiles += [("conventions", str(count["convention"]), False), ("fixed", str(count["fixed"]), False)]
    if fuzz is not None:
        new = len(fuzz.new_findings)
        tiles += [
            ("new in this campaign", str(new), new > 0),
            ("cases", f"{fuzz.cases:,}", False),
            ("links checked", f"{fuzz.links_checked:,}", False),
            ("prove nothing", f"{fuzz.vacuous_share:.2%}", False),
        ]
    if mutants is not None:
        survived = mutants.killed < mutants.mutants
        tiles.append(("planted faults caught", f"{mutants.killed} of {mutants.mutants}", survived))
    cells = "".join(
        f"<div{' class=bad' if bad else ''}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value, bad in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


# Findings.


def _findings(findings: Sequence[Row], fuzz: Fuzz | None) -> Iterator[str]:
    seen = {k.signature: k.count for k in fuzz.known_findings} if fuzz else {}
    fresh = {n.id for n in fuzz.new_findings} if fuzz else set()
    for status in STATUSES:
        rows = [row for row in findings if row.status == status]
        table = _finding_table(rows, seen, fresh, fuzz is not None) if rows else "<p class=quiet>None.</p>"
        title = f"{_TITLES[status]} ({len(rows)})"
        if status == "fixed":
            yield f"<details><summary>{escape(title)}</summary>{table}</details>"
        else:
            yield f"<h3>{escape(title)}</h3>{table}"
    if fuzz is None:
        return
    lost = [n for n in fuzz.new_findings if n.id not in {row.id for row in findings}]
    if lost:
        yield "<h3>Found by the campaign, and in another corpus</h3>"
        yield _table(("id", "signature", "in words"), ((_id(n.id), _code(n.signature), n.sentence) for n in lost), ())
    if fuzz.unconfirmed:
        yield "<h3>Not confirmed</h3>"
        cells = ((_code(u.signature), u.reason, u.sentence) for u in fuzz.unconfirmed)
        yield _table(("signature", "why not", "in words"), cells, ())


def _finding_table(rows: Iterable[Row], seen: dict[str, int], fresh: set[str], counted: bool) -> str:
    head = ("finding", "in words", "seen in", "link", "days old", *(("runs hit",) if counted else ()))
    body = []
    for row in rows:
        new = ' <span class="mark poor">new</span>' if row.id in fresh else ""
        name = Markup(f"{_id(row.id)}{new}<br>{_code(row.signature)}")
        link = Markup(f'<a href="{escape(row.link)}">{escape(row.link)}</a>') if _is_link(row.link) else row.link or "-"
        age = "-" if row.age_days is None else str(row.age_days)
        hits = (str(seen.get(row.signature, 0)),) if counted else ()
        body.append((name, row.explanation, version_range(row.seen), link, age, *hits))
    return _table(head, body, ("days old", "runs hit"))


def _is_link(text: str) -> bool:
    return text.startswith(("https://", "http://"))


def _id(text: str) -> Markup:
    return Markup(f'<span class="id">{escape(text)}</span>')


def _code(text: str) -> Markup:
    return Markup(f"<code>{escape(text).replace('/', '/<wbr>')}</code>")


# Verdicts.


def _verdicts(fuzz: Fuzz) -> Iterator[str]:
    kinds = "; ".join(f"{n:,} {kind}" for kind, n in sorted(fuzz.verdicts.items(), key=lambda item: -item[1]))
    yield f"<p>Runs by verdict: {escape(kinds)}.</p>"
    if fuzz.blocks:
        yield _matrix(fuzz)
        yield (
            '<p class=quiet>Runs of every block, and those that are not ok by verdict. <span class="mark poor">a '
            'fault</span> <span class="mark warn">lossy: within the bars of a named cheaper algorithm</span> '
            '<span class="mark good">all ok</span></p>'
        )
    if fuzz.unsupported:
        yield "<h3>Not run</h3>"
        cells = ((reason, str(n)) for reason, n in sorted(fuzz.unsupported.items()))
        yield _table(("reason", "runs"), cells, ("runs",))


def _matrix(fuzz: Fuzz) -> str:
    """Blocks by framework and mode."""
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    for row in fuzz.blocks:
        cells.setdefault((row.block, row.adapter, row.mode), Counter()).update(row.verdicts)
    columns = sorted({(adapter, mode) for _, adapter, mode in cells})
    modes = Counter(adapter for adapter, _ in columns)
    groups = "".join(f"<th class=group scope=colgroup colspan={n}>{escape(a)}</th>" for a, n in modes.items())
    heads = "".join(f"<th class=number scope=col>{escape(mode)}</th>" for _, mode in columns)
    lines = []
    for block in sorted({block for block, _, _ in cells}):
        row_cells = "".join(_cell(cells.get((block, *column))) for column in columns)
        lines.append(f"<tr><th scope=row>{escape(block)}</th>{row_cells}</tr>")
    head = f"<thead><tr><th rowspan=2 scope=col>block</th>{groups}</tr><tr>{heads}</tr></thead>"
    return _scrolling(f"<table class=matrix>{head}<tbody>{''.join(lines)}</tbody></table>", "Verdicts by block")


def _cell(counts: Counter[str] | None) -> str:
    if not counts:
        return "<td>-</td>"
    bad = any(kind in FAULTY for kind in counts)
    tone = "poor" if bad else "warn" if any(kind.startswith("lossy") for kind in counts) else "good"
    if set(counts) <= {"unsupported", "vacuous"}:
        tone = "quiet"
    notes = "".join(
        f"<small>{n:,} {escape(kind.removeprefix('lossy:').replace('_', ' '))}</small>"
        for kind, n in sorted(counts.items())
        if kind != "ok"
    )
    return f"<td class={tone}>{counts.total():,}{notes}</td>"


# Distances.


def _distances(fuzz: Fuzz) -> Iterator[str]:
    yield (
        "<p>How far a run lies from the closed form, in units of what the error bar allows. Runs beyond 1 are faults, "
        "or are explained by a named cheaper algorithm.</p>"
    )
    if fuzz.ratios:
        from diffgrad import plots

        runs = {name: [(b.decades, b.runs) for b in bins] for name, bins in sorted(fuzz.ratios.items())}
        caption = "Runs by their worst error/bar. Exact runs are in the leftmost bar."
        yield _figure(plots.ratios(runs, 1 / BINS), caption)
    head = ("framework", "mode", "dtype", "runs", "ok", "lossy", "faults", "worst error/bar of an ok run")
    yield _table((*head, "prove nothing"), map(_condition, fuzz.conditions), (*head[3:], "prove nothing"))
    yield (
        f"<p class=quiet>{fuzz.vacuous_share:.2%} of all compared elements prove nothing, for their bar exceeds the "
        "value that it guards.</p>"
    )


def _condition(c: Condition) -> Sequence[str]:
    lossy = sum(n for kind, n in c.verdicts.items() if kind.startswith("lossy"))
    faults = sum(c.verdicts.get(kind, 0) for kind in FAULTY)
    shown = Markup(f'<span class="mark poor">{faults}</span>') if faults else "0"
    counts = (f"{c.runs:,}", f"{c.verdicts.get('ok', 0):,}", f"{lossy:,}", shown)
    return (c.adapter, c.mode, c.dtype, *counts, f"{c.worst_error_over_bar:.3f}", f"{c.vacuous_share:.2%}")


# Throughput.


def _throughput(fuzz: Fuzz) -> Iterator[str]:
    from diffgrad import plots

    wall = fuzz.wall_s or float("nan")
    yield (
        f"<p>{fuzz.cases:,} cases in {fuzz.wall_s:,.0f} s, {fuzz.cases / wall:.1f} a second: {fuzz.links_checked:,} "
        f"links and {fuzz.nodes_checked:,} parameter gradients held against their formulas. Seed {fuzz.seed}.</p>"
    )
    counted = sum(fuzz.framework_cpu_s.values()) + fuzz.oracle_cpu_s
    spent = {**fuzz.framework_cpu_s, "oracle": fuzz.oracle_cpu_s, "all else": max(fuzz.total_cpu_s - counted, 0.0)}
    yield _figure(plots.seconds(spent), "CPU seconds in each framework, in the oracle, and in all else.")


# Planted faults.


def _mutants(mutants: Mutants) -> Iterator[str]:
    from diffgrad import plots

    yield (
        f"<p>{mutants.killed} of {mutants.mutants} planted faults are caught, after {mutants.median_cases_to_kill:g} "
        f"cases in the median. Blamed on the wrong link: {len(mutants.misblamed)}. False alarms of the unmutated "
        f"adapter: {mutants.false_alarms} in {mutants.clean_cases:,} cases.</p>"
    )
    caught = [k.cases for k in mutants.kills.values() if k.cases]
    if caught:
        yield _figure(plots.kills(caught), "Planted faults caught after so many generated cases.")
    traps = {m.name: m.trap for m in MUTANTS}
    parsed = {name: _blame(kill.fault) for name, kill in mutants.kills.items()}
    results = tuple(r for r in _RESULTS if any(what == r for _, what in parsed.values()))
    body = []
    for name, kill in mutants.kills.items():
        link, what = parsed[name]
        marks = [Markup(f'<span aria-label="{what}">●</span>') if what == r else "" for r in results]
        note = ' <span class="mark warn">the wrong link</span>' if name in mutants.misblamed else ""
        blamed = Markup(_code(link) + note) if link else Markup('<span class="mark poor">survived</span>')
        body.append((traps.get(name, name), blamed, *marks, str(kill.cases) if kill.cases else "-"))
    yield _table(("planted fault", "caught at", *results, "cases"), body, ("cases",))


_RESULTS = ("activation", "cotangent", "gradient", "update", "tangent")


def _blame(sentence: str) -> tuple[str, str]:
    """Link and result of a quantity's sentence: ``wrong at batchnorm@pn: gradient pg[0]: ...``."""
    link, _, rest = sentence.partition(" at ")[2].partition(": ")
    return link, rest.split(" ")[0]


# Pieces.


def _table(head: Sequence[str], body: Iterable[Sequence[str]], numbers: Sequence[str]) -> str:
    """A table; the columns in ``numbers`` are set to the right, and the one of words gets room."""
    classes = {**dict.fromkeys(numbers, " class=number"), "in words": " class=words", "finding": " class=finding"}
    tops = "".join(f"<th scope=col{classes.get(h, '')}>{escape(h)}</th>" for h in head)
    lines = "".join(
        f"<tr>{''.join(f'<td{classes.get(h, str())}>{_safe(c)}</td>' for h, c in zip(head, cells, strict=True))}</tr>"
        for cells in body
    )
    return _scrolling(f"<table><thead><tr>{tops}</tr></thead><tbody>{lines}</tbody></table>", ", ".join(head))


def _scrolling(table: str, label: str) -> str:
    """Wide tables scroll on their own, by keyboard too."""
    return f'<div class=scroll role=region tabindex=0 aria-label="{escape(label)}">{table}</div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _safe(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape(cell)
