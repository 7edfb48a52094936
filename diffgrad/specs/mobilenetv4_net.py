"""MobileNetV4 as a net: its block table as data, and the spec of any net of that shape."""

from __future__ import annotations

import msgspec

from diffgrad.specs.base import CaseError, MapSpec, Spec, Tensor, prefixed
from diffgrad.specs.mobilenetv4 import FusedSpec, HeadSpec, StemSpec, UibSpec, UibStridedSpec, halved


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One row of the block table. A stride of 2 halves the map; k = 0 means no depthwise."""

    ic: int
    oc: int
    expand: int
    pre_k: int
    post_k: int
    stride: int = 1

    @property
    def family(self) -> str:
        """ExtraDW, IB, ConvNeXt-like or FFN, by which depthwises there are."""
        return {(1, 1): "ExtraDW", (0, 1): "IB", (1, 0): "ConvNeXt-like", (0, 0): "FFN"}[
            (int(self.pre_k > 0), int(self.post_k > 0))
        ]

    def spec(self, n: int, h: int, w: int) -> UibSpec | UibStridedSpec:
        """The row's block at batch n and input size h x w; the post-depthwise carries a stride if there is one."""
        if self.stride == 1:
            return UibSpec(n=n, h=h, w=w, c=self.ic, expand=self.expand, pre_k=self.pre_k, post_k=self.post_k)
        return UibStridedSpec(
            n=n,
            h=h,
            w=w,
            ic=self.ic,
            oc=self.oc,
            expand=self.expand,
            pre_k=self.pre_k,
            post_k=self.post_k,
            carrier="post" if self.post_k else "pre",
        )


# fmt: off
CONV_M: tuple[Row, ...] = (
    #     ic   oc  expand pre_k post_k stride
    Row( 48,  80,  4,     3,    5,     2),  # 1
    Row( 80,  80,  2,     3,    3),         # 2
    Row( 80, 160,  6,     3,    5,     2),  # 3
    Row(160, 160,  4,     3,    3),         # 4
    Row(160, 160,  4,     3,    3),         # 5
    Row(160, 160,  4,     3,    5),         # 6
    Row(160, 160,  4,     3,    3),         # 7
    Row(160, 160,  4,     3,    0),         # 8
    Row(160, 160,  2,     0,    0),         # 9
    Row(160, 160,  4,     3,    0),         # 10
    Row(160, 256,  6,     5,    5,     2),  # 11
    Row(256, 256,  4,     5,    5),         # 12
    Row(256, 256,  4,     3,    5),         # 13
    Row(256, 256,  4,     3,    5),         # 14
    Row(256, 256,  4,     0,    0),         # 15
    Row(256, 256,  4,     3,    0),         # 16
    Row(256, 256,  2,     3,    5),         # 17
    Row(256, 256,  4,     5,    5),         # 18
    Row(256, 256,  4,     0,    0),         # 19
    Row(256, 256,  4,     0,    0),         # 20
    Row(256, 256,  2,     5,    0),         # 21
)
# fmt: on
"""MobileNetV4-Conv-M's 21 rows, after the fused stage."""


class MobileNetV4Spec(MapSpec, frozen=True, kw_only=True, tag="mobilenetv4"):
    """Stem, fused stage, rows, head and the smoothed cross entropy, at any widths that fit together.

    ``h`` and ``w`` are the image's sizes. The defaults are Conv-M's widths.
    """

    rows: tuple[Row, ...] = CONV_M
    image: int = 3
    stem: int = 32
    fused: int = 128
    mid: int = 960
    oc: int = 1280
    classes: int = 1000

    def check(self) -> None:
        super().check()
        for field in ("image", "stem", "fused", "mid", "oc"):
            self.at_least(field, 1)
        self.at_least("classes", 2)
        if not self.rows:
            raise CaseError("mobilenetv4.rows is empty: a net needs at least one row")
        for number, row in enumerate(self.rows, 1):
            self._check_row(number, row)

    def _check_row(self, number: int, row: Row) -> None:
        name = f"mobilenetv4.rows[{number}]"
        if row.stride not in (1, 2):
            raise CaseError(f"{name}.stride = {row.stride}: must be 1 or 2")
        if row.stride == 1 and row.ic != row.oc:
            raise CaseError(f"{name}: ic = {row.ic} and oc = {row.oc} differ, and a stride-1 row has an identity skip")
        if number > 1 and row.ic != self.rows[number - 2].oc:
            raise CaseError(f"{name}.ic = {row.ic}: the row before gives {self.rows[number - 2].oc} channels")
        row.spec(self.n, 1, 1).check()

    def blocks(self) -> tuple[tuple[str, Spec], ...]:
        """(prefix of its names, spec) of every block in forward order: stem, fused stage, rows u1, u2 ... , head."""
        h, w = self.h, self.w
        out: list[tuple[str, Spec]] = [("", StemSpec(n=self.n, h=h, w=w, ic=self.image, oc=self.stem))]
        h, w = halved(h), halved(w)
        fused = FusedSpec(n=self.n, h=h, w=w, ic=self.stem, mid=self.fused, oc=self.rows[0].ic)
        out.append(("", fused))
        h, w = halved(h), halved(w)
        for number, row in enumerate(self.rows, 1):
            out.append((f"u{number}", row.spec(self.n, h, w)))
            if row.stride == 2:
                h, w = halved(h), halved(w)
        head = HeadSpec(n=self.n, h=h, w=w, ic=self.rows[-1].oc, mid=self.mid, oc=self.oc, classes=self.classes)
        return (*out, ("", head))

    def boundaries(self) -> tuple[str, ...]:
        """What each block's output is called in the net."""
        return ("stem", *(f"blk{k}" for k in range(len(self.rows) + 1)), "logits")

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.image, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return ()

    def parameters(self) -> tuple[Tensor, ...]:
        return prefixed(self.blocks(), lambda block: block.parameters())

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("target", (self.n, self.classes), "target"),)

    def differentiated(self) -> tuple[str, ...]:
        return super().differentiated()[1:]  # the stem's backward ends at its kernel

    def fewest_statistics(self) -> int:
        return min(b.fewest_statistics() or 0 for _, b in self.blocks())
