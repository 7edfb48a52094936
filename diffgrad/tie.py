"""Tying a whole net: every parameter node and every cotangent of a documented net, at its true widths.

Each framework runs the net twice: in float32, checked link by link, and in float64, checked link by link and end to
end. A node is tied when its gradient is within its bar every time. The net is driven by its own smoothed cross entropy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from diffgrad.case import Case, Dtype
from diffgrad.check import Quantity
from diffgrad.judge import Judgement, judge
from diffgrad.specs import AnySpec, CaseError, MobileNetV4Spec
from diffgrad.values import Values
from diffgrad.worker import Runner

_PASSES: tuple[Dtype, ...] = ("float32", "float64")


def _mobilenetv4_conv_m(image: int, batch: int, classes: int) -> MobileNetV4Spec:
    if image < 32:
        raise CaseError(f"--image {image}: the net halves the image five times, so it must be at least 32")
    if batch < 2:
        raise CaseError(f"--batch {batch}: the head's batch norm takes its statistics over the batch alone: at least 2")
    if classes < 2:
        raise CaseError(f"--classes {classes}: a cross entropy needs at least 2")
    return MobileNetV4Spec(n=batch, h=image, w=image, classes=classes)


NETS: dict[str, Callable[[int, int, int], AnySpec]] = {
    "mobilenetv4_conv_m": _mobilenetv4_conv_m,
}
"""Net name -> its spec for an image size, a batch and a number of classes. Raises CaseError for impossible sizes."""


class Tied(msgspec.Struct, frozen=True):
    """One framework's result: nodes tied, and everything that is not within its bar, in words."""

    tied: int
    wrong: tuple[str, ...]
    max_err_over_bar: float
    links_checked: int
    vacuous_share: float
    verdicts: dict[str, str]
    """Verdict of each pass, by dtype."""
    wall_s: float


def net_spec(name: str, image: int, batch: int, classes: int) -> AnySpec:
    """A documented net's spec. Raises CaseError for an unknown net or impossible sizes."""
    if name not in NETS:
        raise CaseError(f"{name}: no such net; known are {', '.join(NETS)}")
    spec = NETS[name](image, batch, classes)
    spec.check()
    return spec


def tie(spec: AnySpec, runner: Runner, seed: int = 0) -> Iterator[tuple[str, Tied]]:
    """Run and check the net in all of the runner's frameworks; each is yielded when both its passes are checked."""
    nodes = [t.name for t in spec.parameters()]
    abouts = runner.about()
    started = time.monotonic()
    passes: dict[str, dict[str, Judgement]] = {name: {} for name in abouts}
    # The loss itself is what is differentiated, so its cotangent is 1.
    cases = [
        Case(block=spec, dtype=dtype, values=Values("normal", seed), overrides={"dy": {"0": 1.0}}).check()
        for dtype in _PASSES
    ]
    for answer in runner.run(cases, quick=False):
        name = answer.adapter
        passes[name][answer.case.dtype] = judge(answer, abouts[name].mode)
        if len(passes[name]) == len(cases):
            yield name, _tied(nodes, passes[name], time.monotonic() - started)


def _tied(nodes: Sequence[str], passes: Mapping[str, Judgement], wall_s: float) -> Tied:
    complaints: list[str] = []
    quantities: list[Quantity] = []
    for dtype, judgement in passes.items():
        if judgement.report is None:
            complaints.append(f"{dtype}: {judgement.sentence}")
            continue
        quantities += judgement.report.quantities
        complaints += [f"{dtype}: {q.sentence()}" for q in judgement.report.quantities if q.verdict != "ok"]
    gradients: dict[str, list[str]] = {node: [] for node in nodes}
    for q in quantities:
        if q.what == "gradient" and q.name in gradients:
            gradients[q.name].append(q.verdict)
    reports = [j.report for j in passes.values() if j.report is not None]
    elements = sum(q.elements for q in quantities)
    return Tied(
        # Every pass, and in float64 both checks, must have looked at the node and found it right.
        tied=sum(len(v) == len(passes) + 1 and set(v) == {"ok"} for v in gradients.values()),
        wrong=tuple(complaints),
        max_err_over_bar=max((q.ratio for q in quantities), default=0.0),
        links_checked=sum(r.links for r in reports),
        vacuous_share=sum(q.vacuous for q in quantities) / elements if elements else 0.0,
        verdicts={dtype: j.verdict for dtype, j in passes.items()},
        wall_s=wall_s,
    )
