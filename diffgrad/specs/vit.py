"""ViT's blocks and net: sizes, variants and the parameters that follow (FORMULAS section 4)."""

from __future__ import annotations

from typing import Literal

import msgspec

from diffgrad.specs.base import DEEPEST, Blocks, CaseError, Drop, MapSpec, Spec, Tensor, check_drop, prefixed

TokenNorm = Literal["vector", "scalar"]
"""LayerNorm over each token's D numbers, with gamma and beta per number or one of each."""

Core = Literal["composed", "fused", "fused_math"]
"""The attention core from primitives, with every inner site tapped, or the framework's own fused attention as one
link; ``fused_math`` asks for the reference implementation of a framework that has several."""


class Sites(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two drop sites of an encoder block: after the attention's output projection, and after the second dense."""

    a: Drop
    m: Drop


def _dense(stem: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    return Tensor(f"W{stem}", (inputs, outputs), "matrix"), Tensor(f"b{stem}", (outputs,), "beta")


def _norm(stem: str, norm: TokenNorm, d: int) -> tuple[Tensor, Tensor]:
    size = d if norm == "vector" else 1
    return Tensor(f"{stem}g", (size,), "gamma"), Tensor(f"{stem}bt", (size,), "beta")


class _TokenSpec(Spec, frozen=True, kw_only=True):
    """A block from tokens [N,T,D] to tokens, D = heads * head_dim. ``bf16`` rounds the operands of its products."""

    t: int
    heads: int = 1
    head_dim: int = 1
    core: Core = "composed"
    bf16: bool = False

    @property
    def d(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim

    def check(self) -> None:
        super().check()
        for field in ("t", "heads", "head_dim"):
            self.at_least(field, 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.t, self.d), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.t, self.d)


class AttentionSpec(_TokenSpec, frozen=True, kw_only=True, tag="attention"):
    """Multi-head self-attention: Q, K and V projections, one core a head, output projection."""

    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for stem in "qkvo" for t in _dense(stem, self.d, self.d))


class EncoderSpec(_TokenSpec, frozen=True, kw_only=True, tag="encoder"):
    """x + [drop a](MHSA(LN1(x))), then h + [drop m](dense(GELU(dense(LN2(h))))); ``mlp`` is the hidden width."""

    mlp: int
    norm: TokenNorm = "vector"
    drop_a: Drop | None = None
    drop_m: Drop | None = None

    def check(self) -> None:
        super().check()
        self.at_least("mlp", 1)
        check_drop("encoder.drop_a", self.drop_a, self.n)
        check_drop("encoder.drop_m", self.drop_m, self.n)

    def parameters(self) -> tuple[Tensor, ...]:
        return (
            *_norm("ln1", self.norm, self.d),
            *(t for stem in "qkvo" for t in _dense(stem, self.d, self.d)),
            *_norm("ln2", self.norm, self.d),
            *_dense("fc1", self.d, self.mlp),
            *_dense("fc2", self.mlp, self.d),
        )

    def constants(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(site, (self.n,), "drop") for site in ("drop_a", "drop_m") if getattr(self, site))


class TowerSpec(_TokenSpec, frozen=True, kw_only=True, tag="tower"):
    """``depth`` encoder blocks b1, b2 ... in series. ``drops`` has the sites of every block, or is empty."""

    mlp: int
    depth: int
    norm: TokenNorm = "vector"
    drops: tuple[Sites, ...] = ()

    def check(self) -> None:
        super().check()
        self.at_least("depth", 1)
        _check_tower(self)
        for _, block in self.blocks():
            block.check()

    def blocks(self) -> Blocks:
        """(prefix of its names, spec) of every block in forward order."""
        return _encoders(self, self.n, self.t, self.drops)

    def boundaries(self) -> tuple[str, ...]:
        """What the output of each block but the last is called; the last one's is the tower's."""
        return tuple(f"b{i}out" for i in range(1, self.depth))

    def parameters(self) -> tuple[Tensor, ...]:
        return prefixed(self.blocks(), lambda block: block.parameters())

    def constants(self) -> tuple[Tensor, ...]:
        return prefixed(self.blocks(), lambda block: block.constants())

    def scales(self, name: str) -> tuple[float, ...]:
        return _scales(self.blocks(), name)


class PatchEmbedSpec(MapSpec, frozen=True, kw_only=True, tag="patch_embed"):
    """conv p x p, stride p -> row-major tokens -> cls in front -> + pos. ``bf16_conv`` counts with ``bf16`` only."""

    ic: int = 3
    d: int
    p: int = 16
    bf16: bool = False
    bf16_conv: bool = False

    @property
    def t(self) -> int:
        """Tokens: one a patch, and cls."""
        return (self.h // self.p) * (self.w // self.p) + 1

    def check(self) -> None:
        super().check()
        for field in ("ic", "d", "p"):
            self.at_least(field, 1)
        self.at_least("h", self.p)
        self.at_least("w", self.p)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.t, self.d)

    def parameters(self) -> tuple[Tensor, ...]:
        return (
            Tensor("peW", (self.d, self.ic, self.p, self.p), "kernel"),
            Tensor("peb", (self.d,), "beta"),
            Tensor("cls", (self.d,), "beta"),
            Tensor("pos", (self.t, self.d), "beta"),
        )


class VitHeadSpec(Spec, frozen=True, kw_only=True, tag="vit_head"):
    """LN, the cls token, dense."""

    t: int
    d: int
    classes: int = 1000
    norm: TokenNorm = "vector"

    def check(self) -> None:
        super().check()
        for field in ("t", "d", "classes"):
            self.at_least(field, 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.t, self.d), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.classes)

    def parameters(self) -> tuple[Tensor, ...]:
        return (
            *_norm("fn", self.norm, self.d),
            Tensor("Wd", (self.d, self.classes), "matrix"),
            Tensor("bd", (self.classes,), "beta"),
        )


class LossSpec(Spec, frozen=True, kw_only=True, tag="loss"):
    """The cross entropy of logits x [N,K] with smoothed targets, or with soft ones: any rows that sum to 1."""

    classes: int
    alpha: float = 0.1
    soft: bool = False

    def check(self) -> None:
        super().check()
        self.at_least("classes", 1)
        check_alpha(self.kind, self.alpha)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.classes), "input")

    def output_shape(self) -> tuple[int, ...]:
        return ()

    def parameters(self) -> tuple[Tensor, ...]:
        return ()

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("target", (self.n, self.classes), "target"),)

    def targets(self) -> tuple[float, bool]:
        return self.alpha, self.soft


class VitSpec(MapSpec, frozen=True, kw_only=True, tag="vit"):
    """Patch embedding, tower, head, smoothed cross entropy. The defaults are ViT-Tiny's widths and depth."""

    image: int = 3
    p: int = 16
    heads: int = 3
    head_dim: int = 64
    mlp: int = 768
    depth: int = 12
    classes: int = 1000
    norm: TokenNorm = "vector"
    core: Core = "composed"
    bf16: bool = False
    bf16_conv: bool = False
    drops: tuple[Sites, ...] = ()
    alpha: float = 0.1

    def check(self) -> None:
        super().check()
        for field in ("image", "p", "heads", "head_dim", "mlp", "depth"):
            self.at_least(field, 1)
        self.at_least("classes", 2)
        self.at_least("h", self.p)
        self.at_least("w", self.p)
        check_alpha(self.kind, self.alpha)
        _check_tower(self)
        for _, block in self.blocks():
            block.check()

    @property
    def d(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim

    def blocks(self) -> Blocks:
        """(prefix of its names, spec) of every part in order: patch embedding, blocks b1, b2 ..., head."""
        embed = PatchEmbedSpec(
            n=self.n,
            h=self.h,
            w=self.w,
            ic=self.image,
            d=self.d,
            p=self.p,
            bf16=self.bf16,
            bf16_conv=self.bf16_conv,
        )
        head = VitHeadSpec(n=self.n, t=embed.t, d=self.d, classes=self.classes, norm=self.norm)
        return (("", embed), *_encoders(self, self.n, embed.t, self.drops), ("", head))

    def boundaries(self) -> tuple[str, ...]:
        """What each part's output is called in the net."""
        return ("tokens", *(f"b{i}out" for i in range(1, self.depth + 1)), "logits")

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.image, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return ()

    def parameters(self) -> tuple[Tensor, ...]:
        return prefixed(self.blocks(), lambda block: block.parameters())

    def constants(self) -> tuple[Tensor, ...]:
        sites = prefixed(self.blocks(), lambda block: block.constants())
        return (*sites, Tensor("target", (self.n, self.classes), "target"))

    def scales(self, name: str) -> tuple[float, ...]:
        return _scales(self.blocks(), name)

    def targets(self) -> tuple[float, bool]:
        return self.alpha, False


def _check_tower(spec: TowerSpec | VitSpec) -> None:
    """Raise CaseError for a tower that is too deep, or whose drop sites do not fit its depth."""
    spec.at_most("depth", DEEPEST)
    if spec.drops and len(spec.drops) != spec.depth:
        raise CaseError(f"{spec.kind}.drops has sites for {len(spec.drops)} blocks: must be empty or have {spec.depth}")


def _encoders(spec: TowerSpec | VitSpec, n: int, t: int, drops: tuple[Sites, ...]) -> Blocks:
    block = EncoderSpec(
        n=n,
        t=t,
        heads=spec.heads,
        head_dim=spec.head_dim,
        mlp=spec.mlp,
        norm=spec.norm,
        core=spec.core,
        bf16=spec.bf16,
    )
    names = [f"b{i}" for i in range(1, spec.depth + 1)]
    if not drops:
        return tuple((name, block) for name in names)
    return tuple(
        (name, msgspec.structs.replace(block, drop_a=sites.a, drop_m=sites.m))
        for name, sites in zip(names, drops, strict=False)
    )


def _scales(blocks: Blocks, name: str) -> tuple[float, ...]:
    for prefix, block in blocks:
        if prefix and name in {prefix + t.name for t in block.constants()}:
            return block.scales(name.removeprefix(prefix))
    raise KeyError(name)


def check_alpha(kind: str, alpha: float) -> None:
    """Raise CaseError for a smoothing that is no share."""
    if not 0.0 <= alpha <= 1.0:
        raise CaseError(f"{kind}.alpha = {alpha}: must be from 0 (one-hot targets) to 1 (all classes alike)")
