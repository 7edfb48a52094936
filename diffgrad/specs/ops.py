"""Single ops as cases of their own: the smallest program that shows an op's fault, and the fastest to run."""

from __future__ import annotations

from typing import Literal

from diffgrad.specs.base import CaseError, Drop, MapSpec, Spec, Tensor, check_drop
from diffgrad.specs.vit import TokenNorm

OpPadding = Literal["symmetric", "xla_same", "valid", "explicit"]
Act = Literal["relu", "relu6", "swish", "gelu_tanh", "gelu_erf"]


class ConvOpSpec(MapSpec, frozen=True, kw_only=True, tag="op_conv"):
    """One convolution. ``pads`` (top, bottom, left, right) counts for ``padding`` explicit only; a negative one crops.

    A batch of 0 is legal. ``depthwise`` has one kernel per channel, and then ``oc`` is ``ic``.
    """

    ic: int
    oc: int
    k: int
    stride: int = 1
    padding: OpPadding = "valid"
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    bias: bool = False
    depthwise: bool = False

    def check(self) -> None:
        for field, low in (("n", 0), ("h", 1), ("w", 1), ("ic", 1), ("oc", 1), ("k", 1), ("stride", 1)):
            self.at_least(field, low)
        if self.padding == "symmetric":
            self.odd("k")
        if self.padding != "explicit" and any(self.pads):
            raise CaseError(f"{self.kind}.pads = {self.pads}: only padding explicit takes them")
        if self.depthwise and self.oc != self.ic:
            raise CaseError(f"{self.kind}.oc = {self.oc}: a depthwise convolution has as many as ic = {self.ic}")
        if min(self._out()) < 1:
            raise CaseError(f"{self.kind}.k = {self.k}: larger than the padded map, so there is no output")

    def _out(self) -> tuple[int, int]:
        if self.padding == "xla_same":
            return -(-self.h // self.stride), -(-self.w // self.stride)
        half = (self.k - 1) // 2 if self.padding == "symmetric" else 0
        top, bottom, left, right = self.pads if self.padding == "explicit" else (half,) * 4
        return (
            (self.h + top + bottom - self.k) // self.stride + 1,
            (self.w + left + right - self.k) // self.stride + 1,
        )

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oc, *self._out())

    def parameters(self) -> tuple[Tensor, ...]:
        kernel = Tensor("W", (self.oc, 1 if self.depthwise else self.ic, self.k, self.k), "kernel")
        return (kernel, Tensor("b", (self.oc,), "beta")) if self.bias else (kernel,)


class _ChannelsSpec(MapSpec, frozen=True, kw_only=True):
    """An op from a map [n,c,h,w] to one of the same shape, unless it says otherwise."""

    c: int

    def check(self) -> None:
        super().check()
        self.at_least("c", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.c, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return self.input().shape

    def parameters(self) -> tuple[Tensor, ...]:
        return ()


class _RowsSpec(Spec, frozen=True, kw_only=True):
    """An op without parameters from [n,size] to [n,size]."""

    size: int

    def check(self) -> None:
        super().check()
        self.at_least("size", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.size), "input")

    def output_shape(self) -> tuple[int, ...]:
        return self.input().shape

    def parameters(self) -> tuple[Tensor, ...]:
        return ()


class BatchNormOpSpec(_ChannelsSpec, frozen=True, kw_only=True, tag="op_bn"):
    """One batch norm in training mode, on [n,c,h,w]."""

    def parameters(self) -> tuple[Tensor, ...]:
        return Tensor("g", (self.c,), "gamma"), Tensor("bt", (self.c,), "beta")

    def fewest_statistics(self) -> int:
        return self.n * self.h * self.w


class LayerNormOpSpec(Spec, frozen=True, kw_only=True, tag="op_ln"):
    """One layer norm over the width d of every token of [n,t,d], gamma and beta per number (vector) or one of each."""

    t: int
    d: int
    norm: TokenNorm = "vector"

    def check(self) -> None:
        super().check()
        self.at_least("t", 1)
        self.at_least("d", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.t, self.d), "input")

    def output_shape(self) -> tuple[int, ...]:
        return self.input().shape

    def parameters(self) -> tuple[Tensor, ...]:
        shape = (self.d if self.norm == "vector" else 1,)
        return Tensor("g", shape, "gamma"), Tensor("bt", shape, "beta")


class ActivationOpSpec(_RowsSpec, frozen=True, kw_only=True, tag="op_act"):
    """One activation, on [n,size]; nothing precedes it, so that an exact 0 tests the convention at the kink."""

    act: Act = "relu"


class DenseOpSpec(Spec, frozen=True, kw_only=True, tag="op_dense"):
    """One dense layer, [n,i] -> [n,o]."""

    i: int
    o: int

    def check(self) -> None:
        super().check()
        self.at_least("i", 1)
        self.at_least("o", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.i), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.o)

    def parameters(self) -> tuple[Tensor, ...]:
        return Tensor("W", (self.i, self.o), "matrix"), Tensor("b", (self.o,), "beta")


class PoolOpSpec(_ChannelsSpec, frozen=True, kw_only=True, tag="op_pool"):
    """One global average pooling, [n,c,h,w] -> [n,c,1,1]."""

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, 1, 1)


class LayerScaleOpSpec(_ChannelsSpec, frozen=True, kw_only=True, tag="op_scale"):
    """One layer scale on [n,c,h,w], gamma per channel [c] or per element [c,h,w]."""

    scale: Literal["channel", "element"] = "channel"

    def parameters(self) -> tuple[Tensor, ...]:
        return (Tensor("g", (self.c,) if self.scale == "channel" else (self.c, self.h, self.w), "gamma"),)


class DropPathOpSpec(_RowsSpec, frozen=True, kw_only=True, tag="op_drop"):
    """One stochastic-depth site, on [n,size]."""

    drop: Drop

    def check(self) -> None:
        super().check()
        check_drop(f"{self.kind}.drop", self.drop, self.n)

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("drop", (self.n,), "drop"),)


Mask = tuple[str, ...]
"""A string per row, "1" where a place is seen and "0" where it is hidden. Without a string all is seen."""


def check_mask(where: str, mask: Mask, rows: int, places: int) -> None:
    """Raises CaseError unless the mask has the right size, if it is one."""
    if mask and (len(mask) != rows or any(len(row) != places or set(row) - {"0", "1"} for row in mask)):
        raise CaseError(f"{where} = {list(mask)}: wants {rows} strings of {places} characters, each 0 or 1")


def shown(mask: Mask) -> list[list[bool]]:
    """Whether each place of each row is seen."""
    return [[place == "1" for place in row] for row in mask]


class SoftmaxOpSpec(_RowsSpec, frozen=True, kw_only=True, tag="op_softmax"):
    """One softmax over the last axis of [n,size]. What ``mask`` hides is -inf; of every row something is seen."""

    mask: Mask = ()

    def check(self) -> None:
        super().check()
        check_mask(f"{self.kind}.mask", self.mask, self.n, self.size)
        if any("1" not in row for row in self.mask):
            raise CaseError(f"{self.kind}.mask = {list(self.mask)}: hides a whole row, which has no softmax")


class AttentionCoreOpSpec(Spec, frozen=True, kw_only=True, tag="op_sdpa"):
    """One attention core on q, k, v [n,t,heads*head_dim], no projections: ``x`` is q, and k and v are parameters.

    Row i of ``mask`` says which keys query i sees, in every example and head. A query that sees none gives 0.
    """

    t: int
    heads: int = 1
    head_dim: int = 1
    core: Literal["fused", "fused_math"] = "fused"
    mask: Mask = ()

    def check(self) -> None:
        super().check()
        for field in ("t", "heads", "head_dim"):
            self.at_least(field, 1)
        check_mask(f"{self.kind}.mask", self.mask, self.t, self.t)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.t, self.heads * self.head_dim), "input")

    def output_shape(self) -> tuple[int, ...]:
        return self.input().shape

    def parameters(self) -> tuple[Tensor, ...]:
        shape = self.input().shape
        return Tensor("k", shape, "input"), Tensor("v", shape, "input")
