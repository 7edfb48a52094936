"""What commands print for people: rich tables and progress. The same facts, for programs, are in ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from diffgrad.campaign import Tally
from diffgrad.certify import Certificate
from diffgrad.judge import FAULTY
from diffgrad.mutants import Kill
from diffgrad.replay import Replayed
from diffgrad.strategies.cases import DTYPES
from diffgrad.tie import Tied
from diffgrad.worker import About


def console() -> Console:
    """Where people read. A pipe has no width of its own; tables keep theirs."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


_out = console()

_MOST_COMPLAINTS = 10


@contextmanager
def fuzzing(seconds: float) -> Iterator[Callable[[Tally], None]]:
    """A live line while a campaign runs."""
    columns = (SpinnerColumn(), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=_out, transient=True) as bar:
        task = bar.add_task("starting", total=seconds)

        def update(tally: Tally) -> None:
            passed = bar.tasks[0].elapsed or 0.0
            faults = len(tally.new) + sum(tally.known.values())
            worst = "  ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(tally.worst.items()))
            text = (
                f"{tally.cases} cases ({tally.cases / max(passed, 1e-9):.0f}/s), {tally.links_checked} links, "
                f"{faults} faults; worst error/bar: {worst}"
            )
            bar.update(task, completed=min(passed, seconds), description=text)

        yield update


def _lossy(result: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Runs whose first fault a cheaper algorithm explains: verdict -> framework -> how many."""
    out: dict[str, dict[str, int]] = {}
    for name, stats in result["adapters"].items():
        for verdict, count in stats["verdicts"].items():
            if verdict.startswith("lossy"):
                out.setdefault(verdict, {})[name] = count
    return dict(sorted(out.items()))


def _conditions(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Framework and mode by dtype: runs, faulty ones if any, and the worst error/bar."""
    dtypes = [d for d in DTYPES if any(row["dtype"] == d for row in rows)]
    table = Table(box=None, pad_edge=False)
    for column in ("framework", "mode"):
        table.add_column(column)
    for dtype in dtypes:
        table.add_column(f"{dtype}: runs, worst error/bar", justify="right")
    cells = {(row["adapter"], row["mode"], row["dtype"]): row for row in rows}
    for name, mode in dict.fromkeys((row["adapter"], row["mode"]) for row in rows):
        shown = [_cell(cells.get((name, mode, dtype))) for dtype in dtypes]
        table.add_row(name, mode, *shown)
    return table


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    faults = sum(row["verdicts"].get(kind, 0) for kind in FAULTY)
    note = f" [bold red]{faults} faulty[/]" if faults else ""
    return f"{row['runs']}{note}  {row['worst_error_over_bar']:.3f}"


def fuzz(result: Mapping[str, Any], abouts: Mapping[str, About], interrupted: bool) -> None:
    """The end of a campaign, for someone who sees it for the first time."""
    table = Table(box=None, pad_edge=False)
    for column in ("framework", "version"):
        table.add_column(column)
    for column in ("runs", "ok", "lossy", "faults", "other", "worst error/bar", "CPU s"):
        table.add_column(column, justify="right")
    for name, about in abouts.items():
        stats = result["adapters"].get(name, {"runs": 0, "verdicts": {}, "worst_error_over_bar": 0.0})
        v = stats["verdicts"]
        ok, lossy = v.get("ok", 0), sum(n for k, n in v.items() if k.startswith("lossy"))
        faults = sum(v.get(k, 0) for k in FAULTY)
        cells = (stats["runs"], ok, lossy, faults, stats["runs"] - ok - lossy - faults)
        version = escape(about.versions.get(name, ""))
        cpu = result["framework_cpu_s"].get(name, 0.0)
        table.add_row(name, version, *map(str, cells), f"{stats['worst_error_over_bar']:.3f}", f"{cpu:.1f}")
    _out.print()
    _out.print(table)
    _out.print()
    if len(result["conditions"]) > len(result["adapters"]):
        _out.print(_conditions(result["conditions"]))
        _out.print()
    if result["unusual"]:
        _out.print("unusual conditions: " + ", ".join(f"{name} {n}x" for name, n in result["unusual"].items()))
    rate = result["cases"] / result["wall_s"] if result["wall_s"] else 0.0
    _out.print(
        f"{result['cases']} cases in {result['wall_s']:.0f} s ({rate:.1f}/s): {result['links_checked']} links and "
        f"{result['nodes_checked']} parameter gradients held against their formulas; "
        f"{100 * result['vacuous_share']:.2f}% of the elements prove nothing (bar above value)."
    )
    for reason, count in sorted(result["unsupported"].items()):
        _out.print(f"not run, {count}x: {escape(reason)}")
    lossy = _lossy(result)
    for model, counts in lossy.items():
        _out.print(f"{model}, {sum(counts.values())}x: " + ", ".join(f"{n} in {name}" for name, n in counts.items()))
    for row in result["unconfirmed"]:
        _out.print(f"not confirmed ({row['reason']}): {escape(row['sentence'])}")
    for row in result["known_findings"]:
        _out.print(f"known, {row['count']}x: {escape(row['signature'])}")
    for row in result["new_findings"]:
        _out.print(f"[bold red]NEW[/] {escape(row['signature'])}\n    {escape(row['sentence'])}")
        _out.print(f"    diffgrad replay {escape(row['file'])}")
    if interrupted:
        _out.print("Interrupted; what was found until then is saved.")
    elif result["new_findings"]:
        count = len(result["new_findings"])
        _out.print(f"[bold red]{count} new finding{'s' if count > 1 else ''}[/], minimized and saved.")
    elif result["known_findings"]:
        _out.print("[bold green]Nothing new[/]: every fault seen is in the corpus already.")
    elif result["cases"]:
        bars = "its derived error bar" + (", or within that of a named cheaper algorithm" if lossy else "")
        _out.print(f"[bold green]No fault found[/]: every link of every run lies within {bars}.")
    _out.print(f"Again with the same cases: --seed {result['seed']}")


def tied(net: str, nodes: int, name: str, result: Tied) -> None:
    """One framework's net."""
    colour = "green" if result.tied == nodes and not result.wrong else "bold red"
    _out.print(
        f"{net} in {name}: [{colour}]{result.tied} of {nodes} nodes tied[/], {result.links_checked} links, worst "
        f"error/bar {result.max_err_over_bar:.3f}, {100 * result.vacuous_share:.2f}% vacuous, {result.wall_s:.0f} s"
    )
    for model, count in result.lossy.items():
        _out.print(f"    {count} arrays are {model}: within the bars of that cheaper algorithm, outside the tight ones")
    if result.known:
        _out.print(f"    {len(result.known)} links with a known fault, such as {escape(result.known[0])}")
    for complaint in result.wrong[:_MOST_COMPLAINTS]:
        _out.print(f"    {escape(complaint)}")
    if len(result.wrong) > _MOST_COMPLAINTS:
        _out.print(f"    and {len(result.wrong) - _MOST_COMPLAINTS} more (all are in --json)")


def doctor(report: Mapping[str, Any]) -> None:
    """Which frameworks can run."""
    table = Table(box=None, pad_edge=False)
    for column in ("framework", "runs", "modes", "version", "devices, or why not"):
        table.add_column(column)
    for name, row in report["adapters"].items():
        if row["runs"]:
            versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
            table.add_row(name, "yes", ", ".join(row["modes"]), escape(versions), escape(", ".join(row["devices"])))
        else:
            table.add_row(name, "[red]no[/]", "", "", escape(row["why"]))
    _out.print(f"diffgrad {report['diffgrad']}")
    _out.print(table)


def replay(results: Sequence[Replayed], path: Path) -> None:
    """What became of the saved cases."""
    for r in results:
        if not r.as_expected:
            _out.print(f"[bold red]changed[/] {r.id} ({r.status}): expected {escape(r.expected)}, got {escape(r.got)}")
            _out.print(f"    {escape(r.sentence)}")
    same = sum(r.as_expected for r in results)
    _out.print(f"{len(results)} saved cases in {escape(str(path))}: {same} as expected, {len(results) - same} changed.")


def certify(certificates: Sequence[Certificate]) -> None:
    """Residuals per op and block."""
    table = Table(box=None, pad_edge=False)
    for column in ("op or block", "identities", "worst residual", "worst mismatch/bar", ""):
        table.add_column(column, justify="left" if column in ("op or block", "") else "right")
    for c in certificates:
        verdict = "[green]holds[/]" if c.holds else "[bold red]FAILS[/]"
        table.add_row(c.subject, str(c.checks), f"{c.residual:.1e}", f"{c.worst_over_bar:.3f}", verdict)
    _out.print(table)


def mutants(kills: Sequence[Kill], cases: int, alarms: Sequence[str]) -> None:
    """Which planted faults were caught, and where they were blamed."""
    table = Table(box=None, pad_edge=False)
    for column in ("planted fault", "cases to kill", "blamed on"):
        table.add_column(column, justify="right" if column == "cases to kill" else "left")
    for k in kills:
        if k.fault is None:
            table.add_row(k.mutant.trap, "[bold red]SURVIVED[/]", "")
        else:
            note = "" if k.blamed else " [bold red](the wrong link)[/]"
            table.add_row(k.mutant.trap, str(k.cases), f"{k.fault.link} {k.fault.what}{note}")
    _out.print(table)
    _out.print(
        f"{sum(k.killed for k in kills)} of {len(kills)} killed; {cases} clean cases, {len(alarms)} false alarms."
    )
    for alarm in alarms:
        _out.print(f"[bold red]false alarm[/] {escape(alarm)}")
