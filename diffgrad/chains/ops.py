"""Single ops as chains of one link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffgrad.chains.base import Chain, Link
from diffgrad.ops import (
    Attention,
    AttentionCore,
    BatchNorm,
    Conv2d,
    Dense,
    Depthwise,
    DropPath,
    GeluErf,
    GeluTanh,
    GlobalAveragePool,
    LayerNorm,
    LayerScale,
    Op,
    Relu,
    Relu6,
    SoftmaxRows,
    Swish,
)
from diffgrad.specs import Spec
from diffgrad.specs.ops import ConvOpSpec, LayerNormOpSpec

ACTIVATIONS: dict[str, type[Op]] = {
    "relu": Relu,
    "relu6": Relu6,
    "swish": Swish,
    "gelu_tanh": GeluTanh,
    "gelu_erf": GeluErf,
}


def _conv(spec: ConvOpSpec) -> Op:
    padding = spec.pads if spec.padding == "explicit" else spec.padding
    return (Depthwise if spec.depthwise else Conv2d)(spec.stride, padding)


def _layer_norm(spec: LayerNormOpSpec) -> Op:
    return LayerNorm(kind="token" if spec.norm == "vector" else "token_scalar")


OPS: dict[str, Callable[[Any], Op]] = {
    "op_conv": _conv,
    "op_bn": lambda spec: BatchNorm(),
    "op_ln": _layer_norm,
    "op_act": lambda spec: ACTIVATIONS[spec.act](),
    "op_dense": lambda spec: Dense(),
    "op_pool": lambda spec: GlobalAveragePool(),
    "op_scale": lambda spec: LayerScale(),
    "op_drop": lambda spec: DropPath(),
    "op_softmax": lambda spec: SoftmaxRows(mask=spec.mask),
    "op_sdpa": lambda spec: AttentionCore(Attention(spec.heads, mask=spec.mask)),
}
"""Block name -> the op that it holds."""


def single(spec: Spec) -> Chain:
    """The chain of one link: it reads the input, its parameters and its constants, and writes the output."""
    feeds = tuple(t.name for t in spec.parameters())
    constants = tuple(t.name for t in spec.constants())
    return Chain((Link(OPS[spec.kind](spec), ("x",), "out", "dyOut", feeds, constants),), "x", "CotIn")
