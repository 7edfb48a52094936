"""The op records: one file per family, holding that family's forward, VJPs and bars."""

from diffgrad.ops.activation import Relu, Relu6, Swish
from diffgrad.ops.attention import Attention, AttentionCore, Scores, SoftmaxRows, Weighted
from diffgrad.ops.base import Op, Vjp
from diffgrad.ops.conv import Conv2d, Depthwise
from diffgrad.ops.dense import Dense, Flatten, GlobalAveragePool
from diffgrad.ops.elementwise import Add, Copy, DropPath, LayerScale
from diffgrad.ops.gelu import GeluErf, GeluTanh
from diffgrad.ops.loss import SmoothedCrossEntropy
from diffgrad.ops.norm import BatchNorm, LayerNorm
from diffgrad.ops.products import EXACT, Products
from diffgrad.ops.tokens import AddPosition, ClsSlice, PrependCls

__all__ = [
    "EXACT",
    "Add",
    "AddPosition",
    "Attention",
    "AttentionCore",
    "BatchNorm",
    "ClsSlice",
    "Conv2d",
    "Copy",
    "Dense",
    "Depthwise",
    "DropPath",
    "Flatten",
    "GeluErf",
    "GeluTanh",
    "GlobalAveragePool",
    "LayerNorm",
    "LayerScale",
    "Op",
    "PrependCls",
    "Products",
    "Relu",
    "Relu6",
    "Scores",
    "SmoothedCrossEntropy",
    "SoftmaxRows",
    "Swish",
    "Vjp",
    "Weighted",
]
