"""MobileNetV4's chains: the cotangent tables of FORMULAS section 2 as data."""

from __future__ import annotations

from diffgrad.chains.base import Chain, Link, fill
from diffgrad.ops import Add, BatchNorm, Conv2d, Copy, Depthwise, DropPath, Relu
from diffgrad.specs import UibSpec

# fmt: off
UIB = (
    #    op           reads         writes  cotangent  feeds
    Link(Copy(),      ("x",),       "xb",   "dxBody"),
    Link(Depthwise(), ("xb",),      "qc",   "CotQc",   ("qW",),        slot="pre"),
    Link(BatchNorm(), ("qc",),      "qn",   "CotQn",   ("qg", "qbt"),  slot="pre"),
    Link(Conv2d(),    ("qn",),      "ec",   "CotEc",   ("eW",)),
    Link(BatchNorm(), ("ec",),      "en",   "CotEn",   ("eg", "ebt")),
    Link(Relu(),      ("en",),      "er",   "CotEr"),
    Link(Depthwise(), ("er",),      "dc",   "CotDc",   ("dW",),        slot="post"),
    Link(BatchNorm(), ("dc",),      "dn",   "CotDn",   ("dg", "dbt"),  slot="post"),
    Link(Relu(),      ("dn",),      "dr",   "CotDr",                   slot="post"),
    Link(Conv2d(),    ("dr",),      "pc",   "CotPc",   ("pW",)),
    Link(BatchNorm(), ("pc",),      "pn",   "CotPn",   ("pg", "pbt")),
    Link(DropPath(),  ("pn",),      "pd",   "CotPd",   (), ("drop",),  slot="drop"),
    Link(Add(),       ("pd", "x"),  "out",  "dyOut"),
)
# fmt: on


def uib(spec: UibSpec) -> Chain:
    """The stride-1 UIB of ``spec``'s row (seed documents 000 and 001)."""
    present = {"pre": spec.pre_k > 0, "post": spec.post_k > 0, "drop": spec.drop is not None}
    return Chain(fill(UIB, present), "x", "CotIn")
