"""Tying a whole net: every parameter node and every cotangent of a documented net, at its true widths.

Each framework runs the net twice: in float32, checked link by link, and in float64, checked link by link and end to
end. A node is tied when its gradient is within its bar every time. The net is driven by its own smoothed cross entropy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from diffgrad.case import Case, Dtype
from diffgrad.check import Quantity
from diffgrad.corpus import Signature
from diffgrad.judge import Judgement, judge, signature_of
from diffgrad.specs import CaseError, ConvNeXtNetSpec, Drop, MobileNetV4Spec, Sites, VitSpec
from diffgrad.values import Bits, Values
from diffgrad.worker import Runner

_PASSES: tuple[Dtype, ...] = ("float32", "float64")


NetSpec = MobileNetV4Spec | ConvNeXtNetSpec | VitSpec


class Sizes(NamedTuple):
    """What a user may choose of a documented net. ``drop`` and ``bf16`` are ViT's."""

    image: int = 64
    batch: int = 0
    """0: the net's own default."""
    classes: int = 1000
    drop: bool = False
    bf16: bool = False


def _mobilenetv4_conv_m(s: Sizes) -> NetSpec:
    return MobileNetV4Spec(n=s.batch, h=s.image, w=s.image, classes=s.classes)


def _convnext_t(s: Sizes) -> NetSpec:
    return ConvNeXtNetSpec(n=s.batch, h=s.image, w=s.image, classes=s.classes)


def _vit_tiny(s: Sizes) -> NetSpec:
    spec = VitSpec(n=s.batch, h=s.image, w=s.image, classes=s.classes, bf16=s.bf16, bf16_conv=s.bf16)
    if not s.drop:
        return spec
    return msgspec.structs.replace(spec, drops=tuple(_sites(i, spec.depth, s.batch) for i in range(1, spec.depth + 1)))


def _sites(block: int, depth: int, batch: int) -> Sites:
    """Block ``block``'s two masks; the survival probability falls with depth, to 0.9."""

    def mask(site: str) -> Drop:
        kept = Bits(block, site).chance(2, 3, (batch,))
        return Drop(1.0 - 0.1 * block / depth, tuple(bool(k) for k in kept))

    return Sites(mask("a"), mask("m"))


class Net(NamedTuple):
    """A documented net: its spec, the batch by default, and the least sizes with the reason for each."""

    spec: Callable[[Sizes], NetSpec]
    batch: int
    image_least: int
    image_why: str
    batch_least: int = 1
    batch_why: str = "a batch has examples"
    flags: bool = False


NETS: dict[str, Net] = {
    "mobilenetv4_conv_m": Net(
        _mobilenetv4_conv_m,
        8,
        32,
        "the net halves the image five times",
        2,
        "the head's batch norm takes its statistics over the batch alone",
    ),
    "convnext_t": Net(_convnext_t, 4, 32, "it takes patches of 4 and three downsamplings"),
    "vit_tiny": Net(_vit_tiny, 4, 16, "its patches are 16 wide", flags=True),
}
"""The documented nets by name."""


class Tied(msgspec.Struct, frozen=True):
    """One framework's result: nodes tied, and everything that is not within its bar, in words.

    ``known`` holds the faults whose signature is in the corpus already, ``wrong`` the others. A link that is at fault
    ends the end-to-end check of its pass; the nodes are then tied link by link only. A node that a named cheaper
    algorithm explains is tied, and ``lossy`` counts what each such name explains.
    """

    tied: int
    wrong: tuple[str, ...]
    known: tuple[str, ...]
    lossy: dict[str, int]
    max_err_over_bar: float
    links_checked: int
    vacuous_share: float
    verdicts: dict[str, str]
    """Verdict of each pass, by dtype."""
    wall_s: float


def net_spec(name: str, sizes: Sizes) -> NetSpec:
    """A documented net's spec. Raises CaseError for an unknown net or impossible sizes."""
    if name not in NETS:
        raise CaseError(f"{name}: no such net; known are {', '.join(NETS)}")
    net = NETS[name]
    sizes = sizes if sizes.batch else sizes._replace(batch=net.batch)
    if sizes.image < net.image_least:
        raise CaseError(f"--image {sizes.image}: {net.image_why}, so it must be at least {net.image_least}")
    if sizes.batch < net.batch_least:
        raise CaseError(f"--batch {sizes.batch}: {net.batch_why}, so it must be at least {net.batch_least}")
    if sizes.classes < 2:
        raise CaseError(f"--classes {sizes.classes}: a cross entropy needs at least 2")
    for flag in ("drop", "bf16"):
        if getattr(sizes, flag) and not net.flags:
            having = ", ".join(n for n, other in NETS.items() if other.flags)
            raise CaseError(f"--{flag}: {name} has no such variant; it is for {having}")
    spec = net.spec(sizes)
    spec.check()
    return spec


def tie(spec: NetSpec, runner: Runner, seed: int = 0, known: Collection[str] = ()) -> Iterator[tuple[str, Tied]]:
    """Run and check the net in all of the runner's frameworks; each is yielded when both its passes are checked.

    ``known`` are signatures, as strings, of faults that need no alarm.
    """
    nodes = [t.name for t in spec.parameters()]
    started = time.monotonic()
    passes: dict[str, dict[str, Judgement]] = {name: {} for name in runner.about()}
    # The loss itself is what is differentiated, so its cotangent is 1.
    cases = [
        Case(block=_at(spec, dtype), dtype=dtype, values=Values("normal", seed), overrides={"dy": {"0": 1.0}}).check()
        for dtype in _PASSES
    ]
    for answer in runner.run(cases, quick=False):
        name = answer.adapter
        passes[name][answer.case.dtype] = judge(answer)
        if len(passes[name]) == len(cases):
            signed = {str(case.dtype): partial(signature_of, name, case) for case in cases}
            yield name, _tied(nodes, passes[name], signed, known, time.monotonic() - started)


def _at(spec: NetSpec, dtype: Dtype) -> NetSpec:
    """The net as it runs in a pass: in float64 there is nothing that bf16 could round, and the chain is the same."""
    if isinstance(spec, VitSpec) and dtype == "float64":
        return msgspec.structs.replace(spec, bf16=False)
    return spec


def _tied(
    nodes: Sequence[str],
    passes: Mapping[str, Judgement],
    signed: Mapping[str, Callable[[Quantity], Signature]],
    known: Collection[str],
    wall_s: float,
) -> Tied:
    wrong: list[str] = []
    expected: list[str] = []
    quantities: list[Quantity] = []
    lossy: Counter[str] = Counter()
    for dtype, judgement in passes.items():
        if judgement.report is None:
            wrong.append(f"{dtype}: {judgement.sentence}")
            continue
        quantities += judgement.report.quantities
        for q in judgement.report.quantities:
            if q.verdict.startswith("lossy"):
                lossy[q.verdict] += 1
            elif q.verdict != "ok":
                listed = expected if str(signed[dtype](q)) in known else wrong
                listed.append(f"{dtype}: {q.sentence()}")
    gradients: dict[str, list[str]] = {node: [] for node in nodes}
    for q in quantities:
        if q.what == "gradient" and q.name in gradients:
            gradients[q.name].append("ok" if q.verdict.startswith("lossy") else q.verdict)
    reports = [j.report for j in passes.values() if j.report is not None]
    elements = sum(q.elements for q in quantities)
    return Tied(
        # Every pass must have looked at the node, and every look must have found it right.
        tied=sum(len(v) >= len(_PASSES) and set(v) == {"ok"} for v in gradients.values()),
        wrong=tuple(wrong),
        known=tuple(expected),
        lossy=dict(lossy),
        max_err_over_bar=max((q.ratio for q in quantities if not q.verdict.startswith("lossy")), default=0.0),
        links_checked=sum(r.links for r in reports),
        vacuous_share=sum(q.vacuous for q in quantities) / elements if elements else 0.0,
        verdicts={dtype: j.verdict for dtype, j in passes.items()},
        wall_s=wall_s,
    )
