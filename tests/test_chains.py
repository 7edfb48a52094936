"""Chains against the documents' tables, and the rules that any chain must keep."""

from __future__ import annotations

from typing import Any

import pytest

from diffgrad.chains import Chain, Link, chain_of
from diffgrad.chains.base import fill
from diffgrad.ops import (
    EXACT,
    Add,
    Attention,
    Conv2d,
    Copy,
    LayerNorm,
    Op,
    Relu,
    Scores,
    SmoothedCrossEntropy,
    Weighted,
)
from diffgrad.specs import (
    AttentionSpec,
    Drop,
    EncoderSpec,
    FusedSpec,
    HeadSpec,
    LossSpec,
    MobileNetV4Spec,
    PatchEmbedSpec,
    Sites,
    Spec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.base import MapSpec
from tests.helpers import KINDS, specs

# FORMULAS section 2, UIB stride 1: cotangent, the site it is at, the links that read the site, what it feeds.
UIB_TABLE = {
    (3, 5): (
        ("dyOut", "out", "", ()),
        ("CotPn", "pn", "add", ("pg", "pbt")),
        ("CotPc", "pc", "batchnorm", ("pW",)),
        ("CotDr", "dr", "conv2d", ()),
        ("CotDn", "dn", "relu", ("dg", "dbt")),
        ("CotDc", "dc", "batchnorm", ("dW",)),
        ("CotEr", "er", "depthwise", ()),
        ("CotEn", "en", "relu", ("eg", "ebt")),
        ("CotEc", "ec", "batchnorm", ("eW",)),
        ("CotQn", "qn", "conv2d", ("qg", "qbt")),
        ("CotQc", "qc", "batchnorm", ("qW",)),
        ("dxBody", "xb", "depthwise", ()),
        ("CotIn", "x", "copy add", ()),
    ),
    (0, 0): (
        ("dyOut", "out", "", ()),
        ("CotPn", "pn", "add", ("pg", "pbt")),
        ("CotPc", "pc", "batchnorm", ("pW",)),
        ("CotEr", "er", "conv2d", ()),
        ("CotEn", "en", "relu", ("eg", "ebt")),
        ("CotEc", "ec", "batchnorm", ("eW",)),
        ("dxBody", "xb", "conv2d", ()),
        ("CotIn", "x", "copy add", ()),
    ),
}


def rows(chain: Chain) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
    feeds = {link.writes: link.feeds for link in chain.links}
    return tuple(
        (name, site, " ".join(link.op.name for link in chain.links if site in link.reads), feeds.get(site, ()))
        for site, name in reversed(chain.cotangents().items())
    )


@pytest.mark.parametrize("ks", UIB_TABLE)
def test_the_uib_is_the_documents_table(ks: tuple[int, int]) -> None:
    chain = chain_of(UibSpec(n=1, h=2, w=2, c=1, pre_k=ks[0], post_k=ks[1]))
    assert rows(chain) == UIB_TABLE[ks]


@pytest.mark.parametrize(("pre_k", "post_k"), [(0, 0), (3, 0), (0, 3), (3, 3)])
@pytest.mark.parametrize("drop", [None, Drop(0.5, (True,))])
def test_an_absent_slot_is_the_identity(pre_k: int, post_k: int, drop: Drop | None) -> None:
    links = chain_of(UibSpec(n=1, h=2, w=2, c=1, pre_k=pre_k, post_k=post_k, drop=drop)).links
    reads = {link.writes: link.reads for link in links}
    assert reads["ec"] == ("qn" if pre_k else "xb",)
    assert reads["pc"] == ("dr" if post_k else "er",)
    assert reads["out"] == ("pd" if drop else "pn", "x")
    assert ("qc" in reads, "dc" in reads, "pd" in reads) == (pre_k > 0, post_k > 0, drop is not None)


# FORMULAS section 2, the other blocks: op, what it reads and writes, what it feeds.
BN, RELU, DW = "batchnorm", "relu", "depthwise"
SIZES: dict[str, Any] = {"n": 2, "h": 4, "w": 4}
FORWARD: dict[str, tuple[Spec, tuple[tuple[str, str, str, str], ...]]] = {
    "uib_s2, the post-depthwise carries": (
        UibStridedSpec(**SIZES, ic=2, oc=3, pre_k=3, post_k=5),
        (
            (DW, "x", "qc", "qW"),
            (BN, "qc", "qn", "qg qbt"),
            ("conv2d", "qn", "ec", "eW"),
            (BN, "ec", "en", "eg ebt"),
            (RELU, "en", "er", ""),
            (DW + "/2", "er", "dc", "dW"),
            (BN, "dc", "dn", "dg dbt"),
            (RELU, "dn", "dr", ""),
            ("conv2d", "dr", "pc", "pW"),
            (BN, "pc", "out", "pg pbt"),
        ),
    ),
    "uib_s2, the pre-depthwise carries": (
        UibStridedSpec(**SIZES, ic=2, oc=3, pre_k=3, carrier="pre", pre_act="relu"),
        (
            (DW + "/2", "x", "qc", "qW"),
            (BN, "qc", "qn", "qg qbt"),
            (RELU, "qn", "qr", ""),
            ("conv2d", "qr", "ec", "eW"),
            (BN, "ec", "en", "eg ebt"),
            (RELU, "en", "er", ""),
            ("conv2d", "er", "pc", "pW"),
            (BN, "pc", "out", "pg pbt"),
        ),
    ),
    "stem": (
        StemSpec(**SIZES),
        (("conv2d/2", "x", "sc", "sW"), (BN, "sc", "sn", "sg sbt"), (RELU, "sn", "out", "")),
    ),
    "fused": (
        FusedSpec(**SIZES, act="swish"),
        (
            ("conv2d/2", "x", "f0cc", "f0cW"),
            (BN, "f0cc", "f0cn", "f0cg f0cbt"),
            ("swish", "f0cn", "f0cr", ""),
            ("conv2d", "f0cr", "f0pc", "f0pW"),
            (BN, "f0pc", "out", "f0pg f0pbt"),
        ),
    ),
    "head": (
        HeadSpec(**SIZES),
        (
            ("conv2d", "x", "h1c", "h1W"),
            (BN, "h1c", "h1n", "h1g h1bt"),
            (RELU, "h1n", "h1r", ""),
            ("globalaveragepool", "h1r", "pool", ""),
            ("conv2d", "pool", "hc", "hW"),
            (BN, "hc", "hn", "hg hbt"),
            (RELU, "hn", "hr", ""),
            ("flatten", "hr", "flat", ""),
            ("dense", "flat", "out", "Wd bd"),
        ),
    ),
    "head, pooled last": (
        HeadSpec(**SIZES, oc=0, pool_first=False),
        (
            ("conv2d", "x", "h1c", "h1W"),
            (BN, "h1c", "h1n", "h1g h1bt"),
            (RELU, "h1n", "h1r", ""),
            ("globalaveragepool", "h1r", "pool", ""),
            ("flatten", "pool", "flat", ""),
            ("dense", "flat", "out", "Wd bd"),
        ),
    ),
}


def titled(op: Op) -> str:
    return f"{op.name}/{op.stride}" if isinstance(op, Conv2d) and op.stride > 1 else op.name


@pytest.mark.parametrize("name", FORWARD)
def test_the_other_blocks_are_the_documents(name: str) -> None:
    spec, table = FORWARD[name]
    links = chain_of(spec).links
    assert tuple((titled(link.op), " ".join(link.reads), link.writes, " ".join(link.feeds)) for link in links) == table
    assert {link.op.padding for link in links if isinstance(link.op, Conv2d)} == {"symmetric"}


@pytest.mark.parametrize(("spec", "ends"), [(StemSpec(**SIZES), False), (StemSpec(**SIZES, dx=True), True)])
def test_the_stem_s_backward_ends_at_its_kernel_unless_asked(spec: StemSpec, ends: bool) -> None:
    assert ("x" in chain_of(spec).cotangents()) is ends


def test_conv_m_is_the_documents_table() -> None:
    rows = MobileNetV4Spec(n=2, h=224, w=224).rows
    assert [(r.ic, r.oc, r.expand, r.pre_k, r.post_k, r.stride) for r in rows] == [
        *((48, 80, 4, 3, 5, 2), (80, 80, 2, 3, 3, 1), (80, 160, 6, 3, 5, 2), (160, 160, 4, 3, 3, 1)),
        *((160, 160, 4, 3, 3, 1), (160, 160, 4, 3, 5, 1), (160, 160, 4, 3, 3, 1), (160, 160, 4, 3, 0, 1)),
        *((160, 160, 2, 0, 0, 1), (160, 160, 4, 3, 0, 1), (160, 256, 6, 5, 5, 2), (256, 256, 4, 5, 5, 1)),
        *((256, 256, 4, 3, 5, 1), (256, 256, 4, 3, 5, 1), (256, 256, 4, 0, 0, 1), (256, 256, 4, 3, 0, 1)),
        *((256, 256, 2, 3, 5, 1), (256, 256, 4, 5, 5, 1), (256, 256, 4, 0, 0, 1), (256, 256, 4, 0, 0, 1)),
        (256, 256, 2, 5, 0, 1),
    ]
    heights = [spec.h for _, spec in MobileNetV4Spec(n=2, h=224, w=224).blocks() if isinstance(spec, MapSpec)]
    assert heights == [224, 112, 56, *[28] * 2, *[14] * 8, *[7] * 11]


# FORMULAS section 4, the encoder block: as UIB_TABLE.
SITE = Drop(0.5, (True,))
ENCODER_TABLE: dict[str, tuple[EncoderSpec, tuple[tuple[str, str, str, tuple[str, ...]], ...]]] = {
    "composed core, both drop sites": (
        EncoderSpec(n=1, t=2, mlp=2, drop_a=SITE, drop_m=SITE),
        (
            ("dyOut", "out", "", ()),
            ("dMd", "md", "add", ()),
            ("dF2", "f2", "droppath", ("Wfc2", "bfc2")),
            ("dG", "g", "dense", ()),
            ("dF1", "f1", "gelutanh", ("Wfc1", "bfc1")),
            ("dN2", "n2", "dense", ("ln2g", "ln2bt")),
            ("dhMlp", "hm", "layernorm", ()),
            ("dh", "h", "copy add", ()),
            ("dAd", "ad", "add", ()),
            ("dAo", "ao", "droppath", ("Wo", "bo")),
            ("dConcat", "o", "dense", ()),
            ("dP", "attnP", "weighted", ()),
            ("dS", "attnS", "softmaxrows", ()),
            ("dV", "v", "weighted", ("Wv", "bv")),
            ("dK", "k", "scores", ("Wk", "bk")),
            ("dQ", "q", "scores", ("Wq", "bq")),
            ("dN1", "n1", "dense dense dense", ("ln1g", "ln1bt")),
            ("dxAttn", "xa", "layernorm", ()),
            ("CotIn", "x", "copy add", ()),
        ),
    ),
    "fused core, no drop site": (
        EncoderSpec(n=1, t=2, mlp=2, core="fused"),
        (
            ("dyOut", "out", "", ()),
            ("dF2", "f2", "add", ("Wfc2", "bfc2")),
            ("dG", "g", "dense", ()),
            ("dF1", "f1", "gelutanh", ("Wfc1", "bfc1")),
            ("dN2", "n2", "dense", ("ln2g", "ln2bt")),
            ("dhMlp", "hm", "layernorm", ()),
            ("dh", "h", "copy add", ()),
            ("dAo", "ao", "add", ("Wo", "bo")),
            ("dConcat", "o", "dense", ()),
            ("dV", "v", "attention", ("Wv", "bv")),
            ("dK", "k", "attention", ("Wk", "bk")),
            ("dQ", "q", "attention", ("Wq", "bq")),
            ("dN1", "n1", "dense dense dense", ("ln1g", "ln1bt")),
            ("dxAttn", "xa", "layernorm", ()),
            ("CotIn", "x", "copy add", ()),
        ),
    ),
}


@pytest.mark.parametrize("name", ENCODER_TABLE)
def test_the_encoder_is_the_documents_table(name: str) -> None:
    spec, table = ENCODER_TABLE[name]
    assert rows(chain_of(spec)) == table
    assert len(chain_of(spec).nodes) == 16


@pytest.mark.parametrize("drop_a", [None, SITE])
@pytest.mark.parametrize("drop_m", [None, SITE])
def test_an_absent_drop_site_is_the_identity(drop_a: Drop | None, drop_m: Drop | None) -> None:
    links = chain_of(EncoderSpec(n=1, t=2, mlp=2, drop_a=drop_a, drop_m=drop_m)).links
    reads = {link.writes: link.reads for link in links}
    assert reads["h"] == ("ad" if drop_a else "ao", "x")
    assert reads["out"] == ("md" if drop_m else "f2", "h")
    assert {link.writes: link.constants for link in links if link.constants} == {
        **({"ad": ("drop_a",)} if drop_a else {}),
        **({"md": ("drop_m",)} if drop_m else {}),
    }


VIT_FORWARD: dict[str, tuple[Spec, tuple[tuple[str, str, str, str], ...]]] = {
    "attention": (
        AttentionSpec(n=1, t=2),
        (
            ("dense", "x", "q", "Wq bq"),
            ("dense", "x", "k", "Wk bk"),
            ("dense", "x", "v", "Wv bv"),
            ("scores", "q k", "attnS", ""),
            ("softmaxrows", "attnS", "attnP", ""),
            ("weighted", "attnP v", "o", ""),
            ("dense", "o", "out", "Wo bo"),
        ),
    ),
    "attention, fused core": (
        AttentionSpec(n=1, t=2, core="fused_math"),
        (
            ("dense", "x", "q", "Wq bq"),
            ("dense", "x", "k", "Wk bk"),
            ("dense", "x", "v", "Wv bv"),
            ("attention", "q k v", "o", ""),
            ("dense", "o", "out", "Wo bo"),
        ),
    ),
    "patch_embed": (
        PatchEmbedSpec(n=1, h=8, w=4, d=2, p=4),
        (
            ("conv2d/4", "x", "pe", "peW peb"),
            ("prependcls", "pe", "seq", "cls"),
            ("addposition", "seq", "out", "pos"),
        ),
    ),
    "vit_head": (
        VitHeadSpec(n=1, t=2, d=2),
        (("layernorm", "x", "fn", "fng fnbt"), ("clsslice", "fn", "fc", ""), ("dense", "fc", "out", "Wd bd")),
    ),
    "loss": (LossSpec(n=1, classes=2), (("smoothedcrossentropy", "x", "out", ""),)),
}


@pytest.mark.parametrize("name", VIT_FORWARD)
def test_vit_s_other_blocks_are_the_documents(name: str) -> None:
    spec, table = VIT_FORWARD[name]
    links = chain_of(spec).links
    assert tuple((titled(link.op), " ".join(link.reads), link.writes, " ".join(link.feeds)) for link in links) == table
    assert {link.op.padding for link in links if isinstance(link.op, Conv2d)} <= {"valid"}


def test_block_1_of_a_tower_runs_first() -> None:
    chain = chain_of(TowerSpec(n=1, t=2, mlp=2, depth=3, drops=(Sites(SITE, SITE),) * 3))
    assert [link.feeds[0] for link in chain.links if isinstance(link.op, LayerNorm)] == [
        *("b1ln1g", "b1ln2g", "b2ln1g", "b2ln2g", "b3ln1g", "b3ln2g")
    ]
    reads = {link.writes: link.reads for link in chain.links}
    assert (reads["b1xa"], reads["b2xa"], reads["b3xa"]) == (("x",), ("b1out",), ("b2out",))
    assert (reads["b1h"], reads["b2h"], reads["b3h"]) == (("b1ad", "x"), ("b2ad", "b1out"), ("b3ad", "b2out"))
    assert reads["out"] == ("b3md", "b3h")
    assert (chain.cotangents()["b1out"], chain.cotangents()["b2q"]) == ("dy_b1out", "b2dQ")
    assert len(chain.nodes) == 3 * 16


def test_vit_tiny_is_the_documents_chain() -> None:
    spec = VitSpec(n=1, h=224, w=224)
    chain = chain_of(spec)
    assert len(chain.nodes) == 4 + 12 * 16 + 4 == 200
    assert {t.name: t.shape for t in spec.parameters()}["pos"] == (197, 192)
    assert [(link.op.name, " ".join(link.reads), link.writes) for link in (*chain.links[:4], *chain.links[-5:])] == [
        ("conv2d", "x", "pe"),
        ("prependcls", "pe", "seq"),
        ("addposition", "seq", "tokens"),
        ("copy", "tokens", "b1xa"),
        ("add", "b12f2 b12h", "b12out"),
        ("layernorm", "b12out", "fn"),
        ("clsslice", "fn", "fc"),
        ("dense", "fc", "logits"),
        ("smoothedcrossentropy", "logits", "out"),
    ]
    assert [type(link.op) for link in chain.links].count(SmoothedCrossEntropy) == 1
    assert {link.op.heads for link in chain.links if isinstance(link.op, Scores | Weighted | Attention)} == {3}


ROUNDED = {
    # what the bf16 flag rounds the operands of
    AttentionSpec(n=1, t=2, bf16=True): "q k v attnS o out",
    AttentionSpec(n=1, t=2, bf16=True, core="fused"): "q k v o out",
    EncoderSpec(n=1, t=2, mlp=2, bf16=True): "q k v attnS o ao f1 f2",
    EncoderSpec(n=1, t=2, mlp=2, bf16=True, core="fused"): "q k v o ao f1 f2",
    EncoderSpec(n=1, t=2, mlp=2): "",
    PatchEmbedSpec(n=1, h=2, w=2, d=2, p=2, bf16=True): "",
    PatchEmbedSpec(n=1, h=2, w=2, d=2, p=2, bf16_conv=True): "",
    PatchEmbedSpec(n=1, h=2, w=2, d=2, p=2, bf16=True, bf16_conv=True): "pe",
    VitSpec(n=1, h=16, w=16, depth=1, bf16=True): "b1q b1k b1v b1attnS b1o b1ao b1f1 b1f2",
    VitSpec(n=1, h=16, w=16, depth=1, bf16_conv=True): "",
    VitSpec(n=1, h=16, w=16, depth=1, bf16=True, bf16_conv=True): "pe b1q b1k b1v b1attnS b1o b1ao b1f1 b1f2",
}


@pytest.mark.parametrize("spec", ROUNDED, ids=str)
def test_the_flags_round_the_operands_of_the_documents_products(spec: Spec) -> None:
    links = chain_of(spec).links
    assert " ".join(link.writes for link in links if getattr(link.op, "products", EXACT).bf16) == ROUNDED[spec]


@pytest.mark.parametrize(("norm", "kind"), [("vector", "token"), ("scalar", "token_scalar")])
def test_every_norm_of_a_vit_is_of_the_spec_s_kind(norm: Any, kind: str) -> None:
    links = chain_of(VitSpec(n=1, h=16, w=16, depth=2, norm=norm)).links
    assert [link.op.kind for link in links if isinstance(link.op, LayerNorm)] == [kind] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_well_formed(kind: str) -> None:
    for spec in specs(kind):
        chain = chain_of(spec)
        written = [chain.input]
        for link in chain.links:
            assert set(link.reads) <= set(written)
            written.append(link.writes)
        assert len(set(written)) == len(written)
        assert chain.input == spec.input().name
        names = chain.cotangents()
        assert len(set(names.values())) == len(names)
        assert set(written) - set(names) <= {chain.input}  # a backward may end before the input
        assert all(any(site in link.reads for link in chain.links) for site in written if site != chain.output)


@pytest.mark.parametrize("kind", KINDS)
def test_the_nodes_of_a_chain_are_the_parameters_of_its_row(kind: str) -> None:
    for spec in specs(kind):
        chain = chain_of(spec)
        assert sorted(chain.nodes) == sorted(t.name for t in spec.parameters())
        assert {c for link in chain.links for c in link.constants} == {t.name for t in spec.constants()}


def test_fill_leaves_out_absent_slots_wherever_they_are_read() -> None:
    table = (
        Link(Copy(), ("x",), "a", "A", slot="one"),
        Link(Relu(), ("a",), "b", "B", slot="two"),
        Link(Add(), ("b", "a"), "c", "C"),
    )

    def reads(one: bool, two: bool) -> list[tuple[str, ...]]:
        return [link.reads for link in fill(table, {"one": one, "two": two})]

    assert reads(True, True) == [("x",), ("a",), ("b", "a")]
    assert reads(False, True) == [("x",), ("b", "x")]
    assert reads(True, False) == [("x",), ("a", "a")]
    assert reads(False, False) == [("x", "x")]
