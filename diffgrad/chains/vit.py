"""ViT's chains: the cotangent tables of FORMULAS section 4 as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from diffgrad.chains.base import Chain, Link, fill, in_series, with_loss, with_ops
from diffgrad.ops import (
    Add,
    AddPosition,
    Attention,
    ClsSlice,
    Conv2d,
    Copy,
    Dense,
    DropPath,
    GeluTanh,
    LayerNorm,
    Op,
    PrependCls,
    Products,
    Scores,
    SmoothedCrossEntropy,
    SoftmaxRows,
    Weighted,
)
from diffgrad.specs import (
    AttentionSpec,
    EncoderSpec,
    LossSpec,
    PatchEmbedSpec,
    Spec,
    TowerSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.vit import TokenNorm

_LN = LayerNorm(kind="token")

# fmt: off
QKV = (
    #    op             reads             writes   cotangent   feeds
    Link(Dense(),       ("n1",),          "q",     "dQ",       ("Wq", "bq")),
    Link(Dense(),       ("n1",),          "k",     "dK",       ("Wk", "bk")),
    Link(Dense(),       ("n1",),          "v",     "dV",       ("Wv", "bv")),
)

COMPOSED = (
    Link(Scores(),      ("q", "k"),       "attnS", "dS"),
    Link(SoftmaxRows(), ("attnS",),       "attnP", "dP"),
    Link(Weighted(),    ("attnP", "v"),   "o",     "dConcat"),
)

FUSED = (
    Link(Attention(),   ("q", "k", "v"),  "o",     "dConcat"),
)

PROJECT = (
    Link(Dense(),       ("o",),           "ao",    "dAo",      ("Wo", "bo")),
)

ENCODER_HEAD = (
    Link(Copy(),        ("x",),           "xa",    "dxAttn"),
    Link(_LN,           ("xa",),          "n1",    "dN1",      ("ln1g", "ln1bt")),
)

ENCODER_TAIL = (
    Link(DropPath(),    ("ao",),          "ad",    "dAd",      (), ("drop_a",), slot="drop_a"),
    Link(Add(),         ("ad", "x"),      "h",     "dh"),
    Link(Copy(),        ("h",),           "hm",    "dhMlp"),
    Link(_LN,           ("hm",),          "n2",    "dN2",      ("ln2g", "ln2bt")),
    Link(Dense(),       ("n2",),          "f1",    "dF1",      ("Wfc1", "bfc1")),
    Link(GeluTanh(),    ("f1",),          "g",     "dG"),
    Link(Dense(),       ("g",),           "f2",    "dF2",      ("Wfc2", "bfc2")),
    Link(DropPath(),    ("f2",),          "md",    "dMd",      (), ("drop_m",), slot="drop_m"),
    Link(Add(),         ("md", "h"),      "out",   "dyOut"),
)

PATCH_EMBED = (
    Link(Conv2d(),      ("x",),           "pe",    "dPe",      ("peW", "peb")),
    Link(PrependCls(),  ("pe",),          "seq",   "dSeq",     ("cls",)),
    Link(AddPosition(), ("seq",),         "out",   "dyOut",    ("pos",)),
)

HEAD = (
    Link(_LN,           ("x",),           "fn",    "dFn",      ("fng", "fnbt")),
    Link(ClsSlice(),    ("fn",),          "fc",    "dCls"),
    Link(Dense(),       ("fc",),          "out",   "dyOut",    ("Wd", "bd")),
)

LOSS = (
    Link(SmoothedCrossEntropy(), ("x",),  "out",   "dyLoss",   (), ("target",)),
)
# fmt: on


def _norm(norm: TokenNorm) -> LayerNorm:
    return LayerNorm(kind="token" if norm == "vector" else "token_scalar")


def _attention(spec: AttentionSpec | EncoderSpec) -> tuple[Link, ...]:
    """Projections, core, projection; with the flag, all six products of them take rounded operands."""
    products = Products(bf16=spec.bf16)
    core = COMPOSED if spec.core == "composed" else FUSED
    ops: dict[str, Op] = {site: Dense(products) for site in ("q", "k", "v", "ao")}
    ops["attnS"] = Scores(spec.heads, products)
    ops["o"] = (Weighted if spec.core == "composed" else Attention)(spec.heads, products)
    return with_ops((*QKV, *core, *PROJECT), **ops)


def attention(spec: AttentionSpec) -> Chain:
    """Multi-head self-attention alone: three projections read the input, so its cotangent has a fan-in of three."""
    *inner, last = _attention(spec)
    links = (*inner, replace(last, writes="out", cotangent="dyOut"))
    return Chain(tuple(replace(k, reads=tuple("x" if s == "n1" else s for s in k.reads)) for k in links), "x", "CotIn")


def encoder(spec: EncoderSpec) -> Chain:
    """The encoder block: two residual sublayers, each with its own drop site."""
    dense = Dense(Products(bf16=spec.bf16))
    norms = {"n1": _norm(spec.norm), "n2": _norm(spec.norm)}
    table = (*ENCODER_HEAD, *_attention(spec), *ENCODER_TAIL)
    present = {"drop_a": spec.drop_a is not None, "drop_m": spec.drop_m is not None}
    return Chain(fill(with_ops(table, f1=dense, f2=dense, **norms), present), "x", "CotIn")


def tower(spec: TowerSpec) -> Chain:
    """Encoder blocks in series, block 1 first."""
    names = (*spec.boundaries(), "out")
    return Chain(in_series(_parts(spec.blocks(), names)), "x", "CotIn", deep=spec.depth > 1)


def patch_embed(spec: PatchEmbedSpec) -> Chain:
    """The patch embedding; its convolution takes rounded operands with both flags only."""
    products = Products(bf16=spec.bf16 and spec.bf16_conv)
    return Chain(with_ops(PATCH_EMBED, pe=Conv2d(spec.p, "valid", products)), "x", "CotIn")


def head(spec: VitHeadSpec) -> Chain:
    """Final LN, cls slice, classifier."""
    return Chain(with_ops(HEAD, fn=_norm(spec.norm)), "x", "CotIn")


def loss(spec: LossSpec) -> Chain:
    """The smoothed cross entropy alone."""
    return Chain(LOSS, "x", "CotIn")


def vit(spec: VitSpec) -> Chain:
    """The whole net, driven by the smoothed cross entropy; the input's gradient is asked for, too."""
    return with_loss(in_series(_parts(spec.blocks(), spec.boundaries())), "CotIn")


def _parts(blocks: Sequence[tuple[str, Spec]], names: Sequence[str]) -> Iterator[tuple[str, Chain, str]]:
    for (prefix, spec), last in zip(blocks, names, strict=True):
        match spec:
            case PatchEmbedSpec():
                yield prefix, patch_embed(spec), last
            case EncoderSpec():
                yield prefix, encoder(spec), last
            case VitHeadSpec():
                yield prefix, head(spec), last
            case _:
                raise TypeError(f"{spec.kind} is no part of ViT")
