"""Specs of single ops, weighted towards the corners in which kernels change path: uniform sizes miss nearly all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from diffgrad.specs import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    ConvOpSpec,
    DenseOpSpec,
    DropPathOpSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
    Spec,
)
from diffgrad.specs.ops import Act, Mask, OpPadding
from diffgrad.strategies.sizes import (
    BATCHES,
    CHANNELS,
    HEAD_DIMS,
    RARELY,
    SIDES,
    TOKEN_NORMS,
    TOKENS,
    channels,
    fitting,
    masks,
)

# Elements of an op's largest array: one op is cheap, and long sums are corners.
LARGEST = 2**13

THIN = st.one_of(st.integers(1, 3), SIDES)
"""Sides of a map, of which half are smaller than most kernels."""

MANY_ROWS = st.sampled_from((257, 4096))
"""Rows at which kernels that sum them in blocks begin another block, or give some to another thread."""

LONG = st.sampled_from((255, 256, 257, 1000, 1024, 4096))
"""Rows longer than a block of a kernel that takes a row at a time."""

# A convolution of an empty batch is legal, and the corner that is left out most often.
CONV_BATCHES = st.sampled_from((1, 2, 3, 1, 2, 0))
PADDINGS: st.SearchStrategy[OpPadding] = st.sampled_from(("valid", "symmetric", "xla_same", "explicit"))
ODD_KERNELS = st.sampled_from((1, 3, 1, 5, 7, 11))
KERNELS = st.one_of(ODD_KERNELS, st.sampled_from((2, 4, 8)))
FEW = st.one_of(st.integers(1, 3), CHANNELS)

Pads = tuple[int, int, int, int]


def strides(k: int) -> st.SearchStrategy[int]:
    """Strides below, at and above the kernel's size: above, some of the input is never read."""
    return st.one_of(st.sampled_from((1, 2, 3)), st.integers(k, k + 3))


@st.composite
def pads(draw: st.DrawFn, k: int) -> Pads:
    """Within the kernel's reach, or one beyond it and another that crops."""
    inner = st.integers(0, k - 1)
    drawn = [draw(inner) for _ in range(4)]
    if draw(st.booleans()):
        far, crop = draw(st.permutations(range(4)))[:2]
        drawn[far] = draw(st.integers(k, k + 3))
        drawn[crop] = draw(st.integers(-3, -1))
    top, bottom, left, right = drawn
    return top, bottom, left, right


class _Side(NamedTuple):
    """What is added to one axis of a map."""

    low: int
    high: int

    def least(self, k: int) -> int:
        """The smallest size of which something is left after the crop, and that gives an output."""
        cropped = max(-self.low, 0) + max(-self.high, 0)
        return max(cropped + 1, k - self.low - self.high)


@st.composite
def op_conv(draw: st.DrawFn) -> ConvOpSpec:
    """Every padding, kernels larger than the map, strides larger than the kernel, empty batches, outputs 1 wide."""
    padding = draw(PADDINGS)
    k = draw(ODD_KERNELS if padding == "symmetric" else KERNELS)
    around = draw(pads(k)) if padding == "explicit" else (0, 0, 0, 0)
    rows, cols = _Side(*around[:2]), _Side(*around[2:])
    n, h, w = draw(CONV_BATCHES), draw(THIN), draw(THIN)
    if padding in ("valid", "explicit"):
        h, w = h - 1 + rows.least(k), w - 1 + cols.least(k)
    ic = fitting(draw, FEW, LARGEST // 2, max(n, 1) * h * w)
    depthwise = draw(st.booleans())
    one = ConvOpSpec(
        n=n,
        h=h,
        w=w,
        ic=ic,
        oc=ic if depthwise else 1,
        k=k,
        stride=draw(strides(k)),
        padding=padding,
        pads=around,
        bias=draw(st.booleans()),
        depthwise=depthwise,
    )
    return one if depthwise else replace(one, oc=fitting(draw, FEW, LARGEST, _per_output(one)))


def _per_output(one: ConvOpSpec) -> int:
    """Elements that an output channel has, of the map or of the kernel."""
    return max(math.prod(one.output_shape()), one.ic * one.k**2)


@st.composite
def many(draw: st.DrawFn, dims: int) -> tuple[int, ...]:
    """257 or 4096 rows, in one of several dimensions or spread over two."""
    rows = draw(MANY_ROWS)
    split = draw(st.sampled_from((1, 1, 16))) if rows == 4096 else 1
    sizes = [rows // split, split, *[1] * (dims - 2)]
    return tuple(draw(st.permutations(sizes)))


@st.composite
def op_bn(draw: st.DrawFn) -> BatchNormOpSpec:
    """Statistics over few values, over one, or over many."""
    n, h, w = draw(many(3)) if draw(RARELY) else (draw(BATCHES), draw(THIN), draw(THIN))
    return BatchNormOpSpec(n=n, h=h, w=w, c=fitting(draw, CHANNELS, LARGEST, n * h * w))


@st.composite
def op_ln(draw: st.DrawFn) -> LayerNormOpSpec:
    """Many rows (a kernel sums gamma's gradient over them in blocks), or long ones, or few."""
    n, t = draw(many(2)) if draw(RARELY) else (draw(BATCHES), draw(TOKENS))
    d = fitting(draw, LONG if draw(RARELY) else CHANNELS, LARGEST, n * t)
    return LayerNormOpSpec(n=n, t=t, d=d, norm=draw(TOKEN_NORMS))


ACTS: st.SearchStrategy[Act] = st.sampled_from(("relu", "relu6", "swish", "gelu_tanh", "gelu_erf"))
VECTORS = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 127, 128, 129)))
"""Sizes around those of vector registers, whose remainders are computed by other code."""


@st.composite
def op_act(draw: st.DrawFn) -> ActivationOpSpec:
    """Every activation."""
    return ActivationOpSpec(n=draw(BATCHES), size=draw(VECTORS), act=draw(ACTS))


@st.composite
def op_dense(draw: st.DrawFn) -> DenseOpSpec:
    """Few rows or many, and long sums."""
    n = draw(MANY_ROWS) if draw(RARELY) else draw(BATCHES)
    i = fitting(draw, LONG if draw(RARELY) else VECTORS, LARGEST, n)
    return DenseOpSpec(n=n, i=i, o=fitting(draw, VECTORS, LARGEST // 2, max(n, i)))


@st.composite
def op_pool(draw: st.DrawFn) -> PoolOpSpec:
    """Maps of one row, of one column and of one element, and large ones."""
    n = draw(BATCHES)
    h, w = draw(many(2)) if draw(RARELY) else (draw(THIN), draw(THIN))
    return PoolOpSpec(n=n, h=h, w=w, c=fitting(draw, CHANNELS, LARGEST, n * h * w))


@st.composite
def op_scale(draw: st.DrawFn) -> LayerScaleOpSpec:
    """Per channel and per element."""
    n, h, w = draw(many(3)) if draw(RARELY) else (draw(BATCHES), draw(THIN), draw(THIN))
    return LayerScaleOpSpec(
        n=n, h=h, w=w, c=channels(draw, n * h * w), scale=draw(st.sampled_from(("channel", "element")))
    )


@st.composite
def op_drop(draw: st.DrawFn) -> DropPathOpSpec:
    """Every mask."""
    n = draw(BATCHES)
    return DropPathOpSpec(n=n, size=draw(VECTORS), drop=draw(masks(n)))


@st.composite
def hidden(draw: st.DrawFn, rows: int, places: int, empty: bool) -> Mask:
    """Nothing hidden, what comes later, one column, any places, or whole rows (where a row may be empty)."""
    kinds = ("nothing", "nothing", "later", "column", "places")
    kind = draw(st.sampled_from((*kinds, "rows") if empty else kinds))
    gone = np.zeros((rows, places), bool)
    match kind:
        case "nothing":
            return ()
        case "later":
            gone = ~np.tri(rows, places, dtype=bool)
        case "column":
            gone[:, draw(st.integers(0, places - 1))] = True
        case "places":
            size = -(-rows * places // 8)
            bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
            gone = np.unpackbits(bits, count=rows * places).reshape(rows, places).astype(bool)
        case "rows":
            gone[draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))] = True
    if not empty:
        gone[gone.all(1)] = False
    return tuple("".join("10"[place] for place in row) for row in gone.astype(int))


@st.composite
def op_softmax(draw: st.DrawFn) -> SoftmaxOpSpec:
    """Rows of one, short rows, and seldom long ones; places hidden."""
    n = draw(BATCHES)
    if draw(RARELY):
        return SoftmaxOpSpec(n=min(n, 2), size=draw(LONG))
    size = draw(TOKENS)
    return SoftmaxOpSpec(n=n, size=size, mask=draw(hidden(n, size, empty=False)))


@st.composite
def op_sdpa(draw: st.DrawFn) -> AttentionCoreOpSpec:
    """One token, heads of width 1, both kernels, keys hidden and queries that see none."""
    n, t, head_dim = draw(BATCHES), draw(TOKENS), draw(HEAD_DIMS)
    return AttentionCoreOpSpec(
        n=n,
        t=t,
        heads=fitting(draw, st.integers(1, 4), LARGEST // 2, n * t * head_dim),
        head_dim=head_dim,
        core=draw(st.sampled_from(("fused", "fused_math"))),
        mask=draw(hidden(t, t, empty=True)),
    )


OPS: dict[str, Callable[[], st.SearchStrategy[Spec]]] = {
    "op_conv": op_conv,
    "op_bn": op_bn,
    "op_ln": op_ln,
    "op_act": op_act,
    "op_dense": op_dense,
    "op_pool": op_pool,
    "op_scale": op_scale,
    "op_drop": op_drop,
    "op_softmax": op_softmax,
    "op_sdpa": op_sdpa,
}
"""Op block -> strategy for its spec."""
