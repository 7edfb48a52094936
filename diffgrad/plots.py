"""The plots of the HTML page: inline SVG that takes its colours and fonts from the page's style sheet."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _ACCENT, _WARN = "#010203", "#010204", "#010205"
_COLOURS = {_INK: "currentColor", _ACCENT: "var(--accent)", _WARN: "var(--warn)"}
"""Colours that stand for those of the page."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diffgrad",  # the same page for the same numbers
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_WIDTH = 8.0


def ratios(runs: Mapping[str, Sequence[tuple[float, int]]], width: float) -> str:
    """Histograms of the runs' worst error/bar, one a framework; what lies beyond 1 stands out.

    Args:
        runs: framework -> (lower end of a bin in decades, runs).
        width: of a bin, in decades.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.5 + 1.3 * len(runs)), layout="constrained")
        shared = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, bins) in zip(shared, runs.items(), strict=True):
            colours = [_WARN if low >= 0 else _ACCENT for low, _ in bins]
            axes.bar([low for low, _ in bins], [n for _, n in bins], width * 0.9, color=colours, align="edge")
            axes.axvline(0, color=_INK, linewidth=1, linestyle="--")
            axes.annotate("the bar", (0, 1), (4, -9), xycoords=("data", "axes fraction"), textcoords="offset points")
            axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
            axes.set_ylabel("runs")
            axes.locator_params(axis="y", nbins=3, integer=True)
        _decades(shared[-1], [low for bins in runs.values() for low, _ in bins])
        peaks = "; ".join(f"{name}: {sum(n for _, n in bins)} runs" for name, bins in runs.items())
        return _svg(figure, "ratios", "Worst error over bar of each run, by framework", peaks)


def _decades(axes: Axes, lows: Iterable[float]) -> None:
    """Powers of ten along x, as far as there are runs."""
    first, last = int(min([*lows, -1.0]) // 1), 1
    last = max(last, int(max([*lows, 0.0]) // 1) + 1)
    step = max(1, (last - first) // 8)
    places = range(0, first - 1, -step)
    ticks = sorted({*places, *range(0, last + 1, step)})
    axes.set_xticks(ticks, ["1" if t == 0 else f"1e{t}" for t in ticks])
    axes.set_xlim(first, last)
    axes.set_xlabel("worst error/bar of a run")


def kills(cases: Sequence[int]) -> str:
    """How many planted faults are caught after so many cases."""
    done = sorted(cases)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        last = max([2, *done])
        counts = [0, *range(1, len(done) + 1), len(done)]
        axes.step([0.8, *done, last], counts, where="post", color=_ACCENT, linewidth=2)
        axes.set_xscale("log")
        ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 400) if t <= last]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(0.8, last * 1.1)
        axes.set_ylim(0, None)
        axes.set_xlabel("generated cases")
        axes.set_ylabel("planted faults caught")
        half = done[len(done) // 2] if done else 0
        return _svg(figure, "kills", "Planted faults caught", f"{len(done)} are caught; half of them by case {half}")


def seconds(spent: Mapping[str, float]) -> str:
    """Where the CPU time went: who -> seconds."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.7 + 0.35 * len(spent)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(spent), list(spent.values()), 0.7, color=_ACCENT)
        axes.bar_label(bars, [f"{s:.1f} s" for s in spent.values()], padding=4)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_xlabel("CPU seconds")
        said = "; ".join(f"{who} {s:.1f} s" for who, s in spent.items())
        return _svg(figure, "seconds", "Where the CPU time went", said)


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    """A figure as an element of a page: no prolog, no metadata, names of its own, and a title that is read aloud."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", text)
    for stand_in, colour in _COLOURS.items():
        text = text.replace(stand_in, colour)
    label = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    head = re.sub(r'(width|height)="[^"]*" ?', "", text[: text.index(">")])
    return f'{head} role="img" aria-labelledby="{name}-title {name}-desc">{label}{text[text.index(">") + 1 :]}'
