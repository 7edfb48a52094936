"""ConvNeXt's blocks and net: sizes, variants and the parameters that follow (FORMULAS section 3)."""

from __future__ import annotations

from typing import Literal

from diffgrad.specs.base import DEEPEST, CaseError, Drop, MapSpec, Spec, Tensor, check_drop, prefixed

Norm = Literal["channel", "scalar"]
"""LayerNorm over C at each position (the real ConvNeXt), or over the whole map with one gamma, beta (document 004)."""


def _norm(stem: str, norm: Norm, c: int) -> tuple[Tensor, Tensor]:
    size = c if norm == "channel" else 1
    return Tensor(f"{stem}g", (size,), "gamma"), Tensor(f"{stem}bt", (size,), "beta")


def _conv(stem: str, o: int, i: int, k: int = 1) -> tuple[Tensor, Tensor]:
    return Tensor(f"{stem}W", (o, i, k, k), "kernel"), Tensor(f"{stem}b", (o,), "beta")


class ConvNeXtSpec(MapSpec, frozen=True, kw_only=True, tag="convnext"):
    """dw k x k, LN, conv 1x1 to ``expand * c``, GELU, conv 1x1 back, layer scale, [drop path], + x."""

    c: int
    expand: int = 4
    k: int = 7
    norm: Norm = "channel"
    scale: Literal["channel", "element"] = "channel"
    act: Literal["gelu_tanh", "gelu_erf"] = "gelu_tanh"
    drop: Drop | None = None

    def check(self) -> None:
        super().check()
        self.at_least("c", 1)
        self.at_least("expand", 1)
        self.odd("k")
        check_drop("convnext.drop", self.drop, self.n)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.c, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    def parameters(self) -> tuple[Tensor, ...]:
        scale = (self.c,) if self.scale == "channel" else (self.c, self.h, self.w)
        return (
            *_conv("d", self.c, 1, self.k),
            *_norm("ln", self.norm, self.c),
            *_conv("ex", self.c * self.expand, self.c),
            *_conv("pr", self.c, self.c * self.expand),
            Tensor("lsg", scale, "gamma"),
        )

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("drop", (self.n,), "drop"),) if self.drop else ()


class ConvNeXtStemSpec(MapSpec, frozen=True, kw_only=True, tag="convnext_stem"):
    """Patchify conv (kernel = stride = ``k``, no padding), then LN. ``dx`` asks for the input's cotangent, too."""

    ic: int = 3
    oc: int = 96
    k: Literal[1, 2, 4] = 4
    norm: Norm = "channel"
    dx: bool = False

    def check(self) -> None:
        super().check()
        self.at_least("ic", 1)
        self.at_least("oc", 1)
        for field in ("h", "w"):
            self.at_least(field, self.k)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oc, self.h // self.k, self.w // self.k)

    def parameters(self) -> tuple[Tensor, ...]:
        return (*_conv("st", self.oc, self.ic, self.k), *_norm("stn", self.norm, self.oc))

    def differentiated(self) -> tuple[str, ...]:
        names = super().differentiated()
        return names if self.dx else names[1:]


class ConvNeXtDownSpec(MapSpec, frozen=True, kw_only=True, tag="convnext_down"):
    """Downsampling between stages: LN, then conv 2x2 stride 2 without padding."""

    ic: int
    oc: int
    norm: Norm = "channel"

    def check(self) -> None:
        super().check()
        self.at_least("ic", 1)
        self.at_least("oc", 1)
        for field in ("h", "w"):
            self.at_least(field, 2)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oc, self.h // 2, self.w // 2)

    def parameters(self) -> tuple[Tensor, ...]:
        return (*_norm("dsn", self.norm, self.ic), *_conv("ds", self.oc, self.ic, 2))


class ConvNeXtHeadSpec(MapSpec, frozen=True, kw_only=True, tag="convnext_head"):
    """Global average pooling, LN, dense."""

    c: int
    classes: int = 1000
    norm: Norm = "channel"

    def check(self) -> None:
        super().check()
        self.at_least("c", 1)
        self.at_least("classes", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.c, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.classes)

    def parameters(self) -> tuple[Tensor, ...]:
        return (
            *_norm("hn", self.norm, self.c),
            Tensor("Wd", (self.c, self.classes), "matrix"),
            Tensor("bd", (self.classes,), "beta"),
        )


class ConvNeXtNetSpec(MapSpec, frozen=True, kw_only=True, tag="convnext_net"):
    """Stem, stages of blocks with a downsampling before every stage but the first, head, smoothed cross entropy.

    ``h`` and ``w`` are the image's sizes. The defaults are ConvNeXt-T's depths and widths.
    """

    depths: tuple[int, ...] = (3, 3, 9, 3)
    widths: tuple[int, ...] = (96, 192, 384, 768)
    image: int = 3
    patch: Literal[1, 2, 4] = 4
    expand: int = 4
    k: int = 7
    norm: Norm = "channel"
    classes: int = 1000

    def check(self) -> None:
        super().check()
        self.at_least("image", 1)
        self.at_least("classes", 2)
        if not self.depths or len(self.depths) != len(self.widths):
            raise CaseError(
                f"convnext_net.depths = {list(self.depths)} and widths = {list(self.widths)}: one of each per stage"
            )
        if min(*self.depths, *self.widths) < 1:
            raise CaseError(f"convnext_net.depths = {list(self.depths)}, widths = {list(self.widths)}: at least 1 each")
        if max(self.depths) > DEEPEST:
            raise CaseError(f"convnext_net.depths = {list(self.depths)}: must be at most {DEEPEST} each")
        least = self.patch * 2 ** (len(self.depths) - 1)
        for field in ("h", "w"):
            if getattr(self, field) < least:
                raise CaseError(f"convnext_net.{field} = {getattr(self, field)}: its stages need at least {least}")
        for _, block in self.blocks():
            block.check()

    def blocks(self) -> tuple[tuple[str, Spec], ...]:
        """(prefix of its names, spec) of every part in order: stem, blocks s1b1 ..., downsamplings d2 ..., head."""
        n, norm = self.n, self.norm
        stem = ConvNeXtStemSpec(n=n, h=self.h, w=self.w, ic=self.image, oc=self.widths[0], k=self.patch, norm=norm)
        h, w = self.h // self.patch, self.w // self.patch
        out: list[tuple[str, Spec]] = [("", stem)]
        for stage, (depth, c) in enumerate(zip(self.depths, self.widths, strict=True), 1):
            if stage > 1:
                out.append((f"d{stage}", ConvNeXtDownSpec(n=n, h=h, w=w, ic=self.widths[stage - 2], oc=c, norm=norm)))
                h, w = h // 2, w // 2
            block = ConvNeXtSpec(n=n, h=h, w=w, c=c, expand=self.expand, k=self.k, norm=norm)
            out += [(f"s{stage}b{i}", block) for i in range(1, depth + 1)]
        return (*out, ("", ConvNeXtHeadSpec(n=n, h=h, w=w, c=self.widths[-1], classes=self.classes, norm=norm)))

    def boundaries(self) -> tuple[str, ...]:
        """What each part's output is called in the net."""
        inner = [prefix for prefix, _ in self.blocks()[1:-1]]
        return ("stem", *(f"{prefix}out" for prefix in inner), "logits")

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.image, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return ()

    def parameters(self) -> tuple[Tensor, ...]:
        return prefixed(self.blocks(), lambda block: block.parameters())

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("target", (self.n, self.classes), "target"),)

    def differentiated(self) -> tuple[str, ...]:
        return super().differentiated()[1:]  # the backward ends at the stem's kernel
