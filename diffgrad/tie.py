"""Tying a whole net: every parameter node and every cotangent of a documented net, at its true widths.

Each framework runs the net twice: in float32, checked link by link, and in float64, checked link by link and end to
end. A node is tied when its gradient is within its bar every time. The net is driven by its own smoothed cross entropy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from diffgrad.case import Case, Dtype
from diffgrad.check import Quantity
from diffgrad.corpus import Signature
from diffgrad.judge import Judgement, judge, signature_of
from diffgrad.specs import AnySpec, CaseError, ConvNeXtNetSpec, MobileNetV4Spec
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


def _convnext_t(image: int, batch: int, classes: int) -> ConvNeXtNetSpec:
    if image < 32:
        raise CaseError(f"--image {image}: patches of 4 and three downsamplings need at least 32")
    if batch < 1:
        raise CaseError(f"--batch {batch}: must be at least 1")
    if classes < 2:
        raise CaseError(f"--classes {classes}: a cross entropy needs at least 2")
    return ConvNeXtNetSpec(n=batch, h=image, w=image, classes=classes)


NETS: dict[str, Callable[[int, int, int], AnySpec]] = {
    "mobilenetv4_conv_m": _mobilenetv4_conv_m,
    "convnext_t": _convnext_t,
}
"""Net name -> its spec for an image size, a batch and a number of classes. Raises CaseError for impossible sizes."""


class Tied(msgspec.Struct, frozen=True):
    """One framework's result: nodes tied, and everything that is not within its bar, in words.

    ``known`` holds the faults whose signature is in the corpus already, ``wrong`` the others. A link that is at fault
    ends the end-to-end check of its pass; the nodes are then tied link by link only.
    """

    tied: int
    wrong: tuple[str, ...]
    known: tuple[str, ...]
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


def tie(spec: AnySpec, runner: Runner, seed: int = 0, known: Collection[str] = ()) -> Iterator[tuple[str, Tied]]:
    """Run and check the net in all of the runner's frameworks; each is yielded when both its passes are checked.

    ``known`` are signatures, as strings, of faults that need no alarm.
    """
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
            signed = partial(signature_of, name, abouts[name].mode)
            yield name, _tied(nodes, passes[name], signed, known, time.monotonic() - started)


def _tied(
    nodes: Sequence[str],
    passes: Mapping[str, Judgement],
    signed: Callable[[str, Quantity], Signature],
    known: Collection[str],
    wall_s: float,
) -> Tied:
    wrong: list[str] = []
    expected: list[str] = []
    quantities: list[Quantity] = []
    for dtype, judgement in passes.items():
        if judgement.report is None:
            wrong.append(f"{dtype}: {judgement.sentence}")
            continue
        quantities += judgement.report.quantities
        for q in judgement.report.quantities:
            if q.verdict != "ok":
                listed = expected if str(signed(dtype, q)) in known else wrong
                listed.append(f"{dtype}: {q.sentence()}")
    gradients: dict[str, list[str]] = {node: [] for node in nodes}
    for q in quantities:
        if q.what == "gradient" and q.name in gradients:
            gradients[q.name].append(q.verdict)
    reports = [j.report for j in passes.values() if j.report is not None]
    elements = sum(q.elements for q in quantities)
    return Tied(
        # Every pass must have looked at the node, and every look must have found it right.
        tied=sum(len(v) >= len(_PASSES) and set(v) == {"ok"} for v in gradients.values()),
        wrong=tuple(wrong),
        known=tuple(expected),
        max_err_over_bar=max((q.ratio for q in quantities), default=0.0),
        links_checked=sum(r.links for r in reports),
        vacuous_share=sum(q.vacuous for q in quantities) / elements if elements else 0.0,
        verdicts={dtype: j.verdict for dtype, j in passes.items()},
        wall_s=wall_s,
    )
