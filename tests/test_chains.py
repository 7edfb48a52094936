"""Chains against the documents' tables, and the rules that any chain must keep."""

from __future__ import annotations

from typing import Any

import pytest

from diffgrad.chains import Chain, Link, chain_of
from diffgrad.chains.base import fill
from diffgrad.ops import Add, Conv2d, Copy, Op, Relu
from diffgrad.specs import Drop, FusedSpec, HeadSpec, MobileNetV4Spec, Spec, StemSpec, UibSpec, UibStridedSpec
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
    heights = [spec.h for _, spec in MobileNetV4Spec(n=2, h=224, w=224).blocks()]
    assert heights == [224, 112, 56, *[28] * 2, *[14] * 8, *[7] * 11]


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
