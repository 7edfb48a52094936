"""MobileNetV4's chains: the cotangent tables of FORMULAS section 2 as data."""

from __future__ import annotations

from dataclasses import replace

from diffgrad.chains.base import Chain, Link, fill, in_series, with_loss, with_ops
from diffgrad.ops import (
    Add,
    BatchNorm,
    Conv2d,
    Copy,
    Dense,
    Depthwise,
    DropPath,
    Flatten,
    GlobalAveragePool,
    Relu,
    Swish,
)
from diffgrad.specs import FusedSpec, HeadSpec, MobileNetV4Spec, Spec, StemSpec, UibSpec, UibStridedSpec

# fmt: off
UIB = (
    #    op                  reads         writes  cotangent  feeds
    Link(Copy(),             ("x",),       "xb",   "dxBody"),
    Link(Depthwise(),        ("xb",),      "qc",   "CotQc",   ("qW",),          slot="pre"),
    Link(BatchNorm(),        ("qc",),      "qn",   "CotQn",   ("qg", "qbt"),    slot="pre"),
    Link(Relu(),             ("qn",),      "qr",   "CotQr",                     slot="pre_act"),
    Link(Conv2d(),           ("qr",),      "ec",   "CotEc",   ("eW",)),
    Link(BatchNorm(),        ("ec",),      "en",   "CotEn",   ("eg", "ebt")),
    Link(Relu(),             ("en",),      "er",   "CotEr"),
    Link(Depthwise(),        ("er",),      "dc",   "CotDc",   ("dW",),          slot="post"),
    Link(BatchNorm(),        ("dc",),      "dn",   "CotDn",   ("dg", "dbt"),    slot="post"),
    Link(Relu(),             ("dn",),      "dr",   "CotDr",                     slot="post"),
    Link(Conv2d(),           ("dr",),      "pc",   "CotPc",   ("pW",)),
    Link(BatchNorm(),        ("pc",),      "pn",   "CotPn",   ("pg", "pbt")),
    Link(DropPath(),         ("pn",),      "pd",   "CotPd",   (), ("drop",),    slot="drop"),
    Link(Add(),              ("pd", "x"),  "out",  "dyOut"),
)

STEM = (
    Link(Conv2d(stride=2),   ("x",),       "sc",   "CotSc",   ("sW",)),
    Link(BatchNorm(),        ("sc",),      "sn",   "CotSn",   ("sg", "sbt")),
    Link(Relu(),             ("sn",),      "out",  "dyOut"),
)

FUSED = (
    Link(Conv2d(stride=2),   ("x",),       "f0cc", "CotF0cc", ("f0cW",)),
    Link(BatchNorm(),        ("f0cc",),    "f0cn", "CotF0cn", ("f0cg", "f0cbt")),
    Link(Relu(),             ("f0cn",),    "f0cr", "CotF0cr"),
    Link(Conv2d(),           ("f0cr",),    "f0pc", "CotF0pc", ("f0pW",)),
    Link(BatchNorm(),        ("f0pc",),    "out",  "dyOut",   ("f0pg", "f0pbt")),
)

HEAD = (
    Link(Conv2d(),            ("x",),      "h1c",  "CotH1c",  ("h1W",)),
    Link(BatchNorm(),         ("h1c",),    "h1n",  "CotH1n",  ("h1g", "h1bt")),
    Link(Relu(),              ("h1n",),    "h1r",  "CotH1r"),
    Link(GlobalAveragePool(), ("h1r",),    "pool", "CotPool", slot="pool_first"),
    Link(Conv2d(),            ("pool",),   "hc",   "CotHc",   ("hW",),          slot="second"),
    Link(BatchNorm(),         ("hc",),     "hn",   "CotHn",   ("hg", "hbt"),    slot="second"),
    Link(Relu(),              ("hn",),     "hr",   "CotHr",                     slot="second"),
    Link(GlobalAveragePool(), ("hr",),     "pool", "CotPool", slot="pool_last"),
    Link(Flatten(),           ("pool",),   "flat", "CotFlat"),
    Link(Dense(),             ("flat",),   "out",  "dyOut",   ("Wd", "bd")),
)
# fmt: on


def uib(spec: UibSpec) -> Chain:
    """The stride-1 UIB of ``spec``'s row (seed documents 000 and 001)."""
    return Chain(fill(UIB, {**_slots(spec), "drop": spec.drop is not None}), "x", "CotIn")


def uib_s2(spec: UibStridedSpec) -> Chain:
    """The strided UIB: the same body with the stride on its carrier and no skip (seed documents 000 and 001)."""
    carrier = {"post": "dc", "pre": "qc"}[spec.carrier]
    strided = with_ops(UIB, **{carrier: Depthwise(stride=2)})
    links = fill(strided, {**_slots(spec), "drop": False})
    body = tuple(link for link in links if not isinstance(link.op, Copy | Add))
    first = replace(body[0], reads=("x",))
    last = replace(body[-1], writes="out", cotangent="dyOut")
    return Chain((first, *body[1:-1], last), "x", "CotIn")


def _slots(spec: UibSpec | UibStridedSpec) -> dict[str, bool]:
    """The one reading of a row's k: which optional parts are there."""
    pre = spec.pre_k > 0
    return {"pre": pre, "pre_act": pre and spec.pre_act == "relu", "post": spec.post_k > 0}


def stem(spec: StemSpec) -> Chain:
    """The stem. Its chain stops at the kernel's gradient unless ``dx`` asks for more."""
    return Chain(with_ops(STEM, sc=Conv2d(2, spec.padding)), "x", "CotIn" if spec.dx else "")


def fused(spec: FusedSpec) -> Chain:
    """The fused stage, relu or swish; the upstream cotangent reaches the last batch norm unmasked."""
    return Chain(with_ops(FUSED, f0cr=Swish() if spec.act == "swish" else Relu()), "x", "CotIn")


def head(spec: HeadSpec) -> Chain:
    """The head, pooling before or after the second stage."""
    present = {"pool_first": spec.pool_first, "pool_last": not spec.pool_first, "second": spec.oc > 0}
    return Chain(fill(HEAD, present), "x", "CotIn")


def mobilenetv4(spec: MobileNetV4Spec) -> Chain:
    """The whole net, driven by the smoothed cross entropy; block k's output is the activation prefix blk{k}."""
    names = ("stem", *(f"blk{k}" for k in range(len(spec.rows) + 1)), "logits")
    return with_loss(
        in_series((prefix, _block(b), last) for (prefix, b), last in zip(spec.blocks(), names, strict=True))
    )


def _block(spec: Spec) -> Chain:
    match spec:
        case StemSpec():
            return stem(spec)
        case FusedSpec():
            return fused(spec)
        case UibSpec():
            return uib(spec)
        case UibStridedSpec():
            return uib_s2(spec)
        case HeadSpec():
            return head(spec)
    raise TypeError(f"{spec.kind} is no block of MobileNetV4")
