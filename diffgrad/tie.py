"""Tying a whole net: every parameter node and every cotangent of a documented net, at its true widths.

Each framework runs the net twice: in float32, checked link by link, and in float64, checked link by link and end to
end. A node is tied when its gradient is within its bar every time. The net is driven by its own smoothed cross entropy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from diffgrad.case import Case, Dtype
from diffgrad.check import Quantity
from diffgrad.judge import judge
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
    """Run and check the net in each of the runner's frameworks, one after the other."""
    nodes = [t.name for t in spec.parameters()]
    for name, about in runner.about().items():
        started = time.monotonic()
        quantities: list[Quantity] = []
        verdicts: dict[str, str] = {}
        complaints: list[str] = []
        links = 0
        for dtype in _PASSES:
            # The loss itself is what is differentiated, so its cotangent is 1.
            case = Case(block=spec, dtype=dtype, values=Values("normal", seed), overrides={"dy": {"0": 1.0}})
            judgement = judge(next(iter(runner.run([case.check()], [name], quick=False))), about.mode)
            verdicts[dtype] = judgement.verdict
            if judgement.report is None:
                complaints.append(f"{dtype}: {judgement.sentence}")
                continue
            links += judgement.report.links
            quantities += judgement.report.quantities
            complaints += [f"{dtype}: {q.sentence()}" for q in judgement.report.quantities if q.verdict != "ok"]
        yield name, _tied(nodes, quantities, complaints, links, verdicts, time.monotonic() - started)


def _tied(
    nodes: Sequence[str],
    quantities: Sequence[Quantity],
    complaints: Sequence[str],
    links: int,
    verdicts: dict[str, str],
    wall_s: float,
) -> Tied:
    seen: dict[str, set[str]] = {}
    for q in quantities:
        if q.what == "gradient":
            seen.setdefault(q.name, set()).add(q.verdict)
    complete = len(verdicts) == sum(
        v in ("ok", "wrong", "nonfinite") or v.startswith("lossy") for v in verdicts.values()
    )
    elements = sum(q.elements for q in quantities)
    return Tied(
        tied=sum(complete and seen.get(node) == {"ok"} for node in nodes),
        wrong=tuple(complaints),
        max_err_over_bar=max((q.ratio for q in quantities), default=0.0),
        links_checked=links,
        vacuous_share=sum(q.vacuous for q in quantities) / elements if elements else 0.0,
        verdicts=verdicts,
        wall_s=wall_s,
    )
