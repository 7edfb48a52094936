"""The op records: one file per family, holding that family's forward, VJPs and bars."""

from diffgrad.ops.base import Op, Vjp
from diffgrad.ops.conv import Conv2d, Depthwise
from diffgrad.ops.elementwise import Add, Copy, DropPath, Relu
from diffgrad.ops.norm import BatchNorm

__all__ = ["Add", "BatchNorm", "Conv2d", "Copy", "Depthwise", "DropPath", "Op", "Relu", "Vjp"]
