"""ConvNeXt's chains: the cotangent tables of FORMULAS section 3 as data."""

from __future__ import annotations

from diffgrad.chains.base import Chain, Link, fill, in_series, with_loss, with_ops
from diffgrad.ops import (
    Add,
    Conv2d,
    Copy,
    Dense,
    Depthwise,
    DropPath,
    Flatten,
    GeluErf,
    GeluTanh,
    GlobalAveragePool,
    LayerNorm,
    LayerScale,
)
from diffgrad.specs import (
    ConvNeXtDownSpec,
    ConvNeXtHeadSpec,
    ConvNeXtNetSpec,
    ConvNeXtSpec,
    ConvNeXtStemSpec,
    Spec,
)

# fmt: off
BLOCK = (
    #    op                   reads         writes  cotangent  feeds
    Link(Copy(),              ("x",),       "xb",   "dxBody"),
    Link(Depthwise(),         ("xb",),      "d",    "CotD",    ("dW", "db")),
    Link(LayerNorm(),         ("d",),       "nl",   "CotN",    ("lng", "lnbt")),
    Link(Conv2d(),            ("nl",),      "e",    "CotE",    ("exW", "exb")),
    Link(GeluTanh(),          ("e",),       "g",    "CotG"),
    Link(Conv2d(),            ("g",),       "p",    "CotP",    ("prW", "prb")),
    Link(LayerScale(),        ("p",),       "ls",   "CotLs",   ("lsg",)),
    Link(DropPath(),          ("ls",),      "pd",   "CotPd",   (), ("drop",),  slot="drop"),
    Link(Add(),               ("pd", "x"),  "out",  "dyOut"),
)

STEM = (
    Link(Conv2d(),            ("x",),       "st",   "StemCot", ("stW", "stb")),
    Link(LayerNorm(),         ("st",),      "out",  "dyOut",   ("stng", "stnbt")),
)

DOWN = (
    Link(LayerNorm(),         ("x",),       "dsn",  "CotDsn",  ("dsng", "dsnbt")),
    Link(Conv2d(2, "valid"),  ("dsn",),     "out",  "dyOut",   ("dsW", "dsb")),
)

HEAD = (
    Link(GlobalAveragePool(), ("x",),       "pool", "CotPool"),
    Link(LayerNorm(),         ("pool",),    "hn",   "CotHn",   ("hng", "hnbt")),
    Link(Flatten(),           ("hn",),      "flat", "CotFlat"),
    Link(Dense(),             ("flat",),    "out",  "dyOut",   ("Wd", "bd")),
)
# fmt: on


def block(spec: ConvNeXtSpec) -> Chain:
    """The block, with its variants of LN, layer scale and GELU."""
    act = GeluTanh() if spec.act == "gelu_tanh" else GeluErf()
    table = with_ops(BLOCK, nl=LayerNorm(kind=spec.norm), g=act)
    return Chain(fill(table, {"drop": spec.drop is not None}), "x", "CotXin")


def stem(spec: ConvNeXtStemSpec) -> Chain:
    """The stem; its chain stops at the kernel's gradient unless ``dx`` asks for more."""
    table = with_ops(STEM, st=Conv2d(spec.k, "valid"), out=LayerNorm(kind=spec.norm))
    return Chain(table, "x", "CotIn" if spec.dx else "")


def down(spec: ConvNeXtDownSpec) -> Chain:
    """Downsampling between stages."""
    return Chain(with_ops(DOWN, dsn=LayerNorm(kind=spec.norm)), "x", "CotIn")


def head(spec: ConvNeXtHeadSpec) -> Chain:
    """The head."""
    return Chain(with_ops(HEAD, hn=LayerNorm(kind=spec.norm)), "x", "CotIn")


def net(spec: ConvNeXtNetSpec) -> Chain:
    """The whole net, driven by the smoothed cross entropy: stages are recursions over their blocks."""
    stem_part, *inner, head_part = spec.blocks()
    named = [(*stem_part, "stem"), *((prefix, b, f"{prefix}out") for prefix, b in inner), (*head_part, "logits")]
    return with_loss(in_series((prefix, _part(b), last) for prefix, b, last in named))


def _part(spec: Spec) -> Chain:
    match spec:
        case ConvNeXtStemSpec():
            return stem(spec)
        case ConvNeXtSpec():
            return block(spec)
        case ConvNeXtDownSpec():
            return down(spec)
        case ConvNeXtHeadSpec():
            return head(spec)
    raise TypeError(f"{spec.kind} is no part of ConvNeXt")
