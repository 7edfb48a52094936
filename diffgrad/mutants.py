"""Planted faults: the silent traps of FORMULAS section 5, each a NumPy adapter that has one, and the link to blame.

The tester is worth what it catches: every mutant must be killed by generated cases and blamed on its own link, while
the unmutated adapter raises no alarm on the same cases.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.adapters.base import Tap
from diffgrad.adapters.numpy import AnyUib, Floats, NumpyAdapter, Var
from diffgrad.adapters.numpy_ops import Padding, Window
from diffgrad.case import Case
from diffgrad.chains import chain_of
from diffgrad.check import Quantity, check_run
from diffgrad.specs import (
    AttentionSpec,
    ConvNeXtSpec,
    ConvOpSpec,
    EncoderSpec,
    FusedSpec,
    HeadSpec,
    MobileNetV4Spec,
    PatchEmbedSpec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
)
from diffgrad.specs.ops import Mask
from diffgrad.specs.vit import TokenNorm
from diffgrad.strategies import cases, sample

Residual = UibSpec | ConvNeXtSpec


class _NodesAtConv(NumpyAdapter):
    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats, shared: tuple[int, ...]) -> tuple[Floats, Floats]:
        return super().bn_nodes(dx, dx, normed, shared)


class _ConvAtNorm(NumpyAdapter):
    """The batch norm hands its own output's cotangent on, as if the conv's were the same."""

    def bn_back(self, d: Floats, normed: Floats, inv_std: Floats, axes: tuple[int, ...]) -> Floats:
        return d


class _PostAlways(NumpyAdapter):
    def post(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        if b.post_k:
            return super().post(b, t, tap, v)
        kernel = np.full((b.mid, 1, 3, 3), 1 / 9, v.value.dtype)
        return self.relu(self.depthwise(v, Var(kernel)))


class _PostNever(NumpyAdapter):
    def post(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        return v


class _Swapped(NumpyAdapter):
    def uib(self, b: UibSpec, t: dict[str, Var], tap: Tap) -> Var:
        if b.pre_k and b.pre_k == b.post_k and b.expand == 1:
            t = t | {"qW": t["dW"], "dW": t["qW"]}
        return super().uib(b, t, tap)


class _Relu6(NumpyAdapter):
    def relu(self, x: Var) -> Var:
        mask = (x.value > 0) & (x.value < 6)
        return Var(np.clip(x.value, 0, 6), (x,), lambda dy: (dy * mask,))


class _Swish(NumpyAdapter):
    def relu(self, x: Var) -> Var:
        sigma = 1 / (1 + np.exp(-x.value))
        return Var(x.value * sigma, (x,), lambda dy: (dy * sigma * (1 + x.value * (1 - sigma)),))


class _LeakyMask(NumpyAdapter):
    """Backward without the mask."""

    def relu(self, x: Var) -> Var:
        return Var(super().relu(x).value, (x,), lambda dy: (dy,))


class _MaskedPre(NumpyAdapter):
    def pre_act(self, v: Var) -> Var:
        return self.relu(v)


class _MaskedProject(NumpyAdapter):
    def join(self, b: Residual, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        return super().join(b, t, tap, self.relu(v))


class _MaskedOutput(NumpyAdapter):
    def join(self, b: Residual, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        return self.relu(super().join(b, t, tap, v))


class _NoFanIn(NumpyAdapter):
    def add(self, a: Var, b: Var) -> Var:
        return Var(a.value + b.value, (a,), lambda dy: (dy,))


class _DoubleFanIn(NumpyAdapter):
    def add(self, a: Var, b: Var) -> Var:
        return Var(a.value + b.value, (a, b), lambda dy: (dy, 2 * dy))


class _NoSkip(NumpyAdapter):
    def add(self, a: Var, b: Var) -> Var:
        return a


class _FrozenStatistics(NumpyAdapter):
    def bn_back(self, d: Floats, normed: Floats, inv_std: Floats, axes: tuple[int, ...]) -> Floats:
        return d * inv_std


class _Unbiased(NumpyAdapter):
    def variance(self, centred: Floats, axes: tuple[int, ...]) -> Floats:
        n = int(np.prod([centred.shape[i] for i in axes]))
        return np.asarray(super().variance(centred, axes) * centred.dtype.type(n / max(n - 1, 1)))


class _EpsOutside(NumpyAdapter):
    def inverse_root(self, variance: Floats) -> Floats:
        return np.asarray(1 / (np.sqrt(variance) + variance.dtype.type(1e-5)))


class _DropOnSkip(NumpyAdapter):
    def join(self, b: Residual, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        if not b.drop:
            return super().join(b, t, tap, v)
        return self.add(tap("pd", self.copy(v)), self.scale(t["x"], t["drop"].value))


class _NoReciprocal(NumpyAdapter):
    def scale(self, x: Var, a: Floats) -> Var:
        return super().scale(x, (a != 0).astype(a.dtype))


class _MeanOverBatch(NumpyAdapter):
    def weight_sum(self, dw: Floats, batch: int) -> Floats:
        return np.asarray(dw / dw.dtype.type(batch))


class _StrideMisplaced(NumpyAdapter):
    def strides(self, b: AnyUib) -> tuple[int, int]:
        pre, post = super().strides(b)
        return (post, pre) if b.pre_k and b.post_k else (pre, post)


class _StridedSkip(NumpyAdapter):
    def uib_s2(self, b: UibStridedSpec, t: dict[str, Var], tap: Tap) -> Var:
        v = super().uib_s2(b, t, tap)
        return self.add(v, self.halve(t["x"])) if b.ic == b.oc else v

    def halve(self, x: Var) -> Var:
        def pull(dy: Floats) -> tuple[Floats]:
            dx = np.zeros_like(x.value)
            dx[:, :, ::2, ::2] = dy
            return (dx,)

        return Var(x.value[:, :, ::2, ::2], (x,), pull)


class _DepthwiseSame(NumpyAdapter):
    def depthwise(self, x: Var, w: Var, stride: int = 1, padding: Padding = "symmetric") -> Var:
        return super().depthwise(x, w, stride, "xla_same")


class _StemPadding(NumpyAdapter):
    def stem(self, b: StemSpec, t: dict[str, Var], tap: Tap) -> Var:
        other: Literal["symmetric", "xla_same"] = "xla_same" if b.padding == "symmetric" else "symmetric"
        return super().stem(msgspec.structs.replace(b, padding=other), t, tap)


class _FusedAct(NumpyAdapter):
    def fused_act(self, b: FusedSpec, v: Var) -> Var:
        return self.relu(v) if b.act == "swish" else self.swish(v)


class _FusedMasked(NumpyAdapter):
    def fused_end(self, v: Var) -> Var:
        return self.relu(v)


class _PoolMisplaced(NumpyAdapter):
    def pools_first(self, b: HeadSpec) -> bool:
        return not b.pool_first


class _RowsSwapped(NumpyAdapter):
    """The first two neighbours of the same shape have each other's weights."""

    def mobilenetv4(self, b: MobileNetV4Spec, t: dict[str, Var], tap: Tap) -> Var:
        for k, (row, after) in enumerate(zip(b.rows, b.rows[1:], strict=False), 1):
            if row == after:
                mine, next_ = f"u{k}", f"u{k + 1}"
                names = [p.name for p in row.spec(b.n, 1, 1).parameters()]
                swapped = {mine + n: t[next_ + n] for n in names} | {next_ + n: t[mine + n] for n in names}
                return super().mobilenetv4(b, t | swapped, tap)
        return super().mobilenetv4(b, t, tap)


class _LossNotAveraged(NumpyAdapter):
    def loss_back(self, p: Floats, t: Floats) -> Floats:
        return np.asarray(p - t)


class _Unsmoothed(NumpyAdapter):
    def cross_entropy(self, z: Var, t: Floats) -> Var:
        return super().cross_entropy(z, (t == t.max(-1, keepdims=True)).astype(t.dtype))


class _StridedPre0(NumpyAdapter):
    """A row without a pre-depthwise gets one all the same: a 3x3 box, before anything else."""

    def pre(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        if b.pre_k:
            return super().pre(b, t, tap, v)
        return self.depthwise(v, Var(np.full((v.value.shape[1], 1, 3, 3), 1 / 9, v.value.dtype)))


class _ScaleSkipped(NumpyAdapter):
    def scale_back(self, dy: Floats, scale: Floats) -> Floats:
        return dy


class _GeluForm(NumpyAdapter):
    def gelu(self, x: Var, form: str) -> Var:
        return super().gelu(x, "gelu_erf" if form == "gelu_tanh" else "gelu_tanh")


class _NormForm(NumpyAdapter):
    """Statistics over the other axes, with the right gamma and beta."""

    def ln(self, x: Var, g: Var, b: Var, kind: str) -> Var:
        axes, shared = ((1, 2, 3), (0, 2, 3)) if kind == "channel" else ((1,), (0, 1, 2, 3))
        return self.norm(x, g, b, axes, shared)


class _NoBias(NumpyAdapter):
    def bias(self, x: Var, b: Var) -> Var:
        return Var(super().bias(x, b).value, (x, b), lambda dy: (dy, dy.mean((0, 2, 3))))


class _StepUphill(NumpyAdapter):
    def step(self, theta: Floats, gradient: Floats, lr: float) -> Floats:
        return super().step(theta, -gradient, lr)


class _StepWithoutRate(NumpyAdapter):
    def step(self, theta: Floats, gradient: Floats, lr: float) -> Floats:
        return super().step(theta, gradient, 1.0)


class _PartPerThousand(NumpyAdapter):
    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats, shared: tuple[int, ...]) -> tuple[Floats, Floats]:
        gain, shift = super().bn_nodes(dy, dx, normed, shared)
        return gain * gain.dtype.type(1.001), shift


class _OtherSlab(NumpyAdapter):
    """Each head reads K's and V's slab of the next head."""

    def weighted(self, p: Var, v: Var, heads: int, bf16: bool = False) -> Var:
        def turned(x: Floats, shift: int) -> Floats:
            return self.join_heads(np.roll(self.heads(x, heads), shift, axis=1))

        moved = Var(turned(v.value, 1), (v,), lambda dy: (turned(dy, -1),))
        return super().weighted(p, moved, heads, bf16)


class _RootOfWidth(NumpyAdapter):
    def scaled_by(self, slabs: Floats) -> int:
        return int(slabs.shape[1] * slabs.shape[-1])


class _SoftmaxOverQueries(NumpyAdapter):
    def softmax(self, z: Var, axis: int = -1, mask: Mask = ()) -> Var:
        return super().softmax(z, -2, mask)


class _SoftmaxNotCentred(NumpyAdapter):
    """The rows' common part is not taken off in the backward."""

    def softmax_back(self, p: Floats, dp: Floats, axis: int) -> Floats:
        return np.asarray(p * dp)


class _ClsEverywhere(NumpyAdapter):
    def cls_slice(self, x: Var) -> Var:
        shape = x.value.shape
        return Var(x.value[:, 0], (x,), lambda dy: (np.broadcast_to(dy[:, None], shape).copy(),))


class _ClsMean(NumpyAdapter):
    def cls_node(self, dy: Floats) -> Floats:
        return np.asarray(dy[:, 0].mean(0))


class _BatchAsTokens(NumpyAdapter):
    """Attention among the examples instead of among the tokens, where both are as many."""

    def mhsa(self, b: AttentionSpec | EncoderSpec, v: Var, t: dict[str, Var], tap: Tap) -> Var:
        if b.n != b.t:
            return super().mhsa(b, v, t, tap)
        out = super().mhsa(b, self._turned(v), t, tap)
        return self._turned(out)

    def _turned(self, v: Var) -> Var:
        return Var(v.value.swapaxes(0, 1), (v,), lambda dy: (dy.swapaxes(0, 1),))


class _TailFirst(NumpyAdapter):
    """The tower's last block runs first."""

    def tower(self, b: TowerSpec, t: dict[str, Var], tap: Tap) -> Var:
        names = [prefix for prefix, _ in b.blocks()]
        turned = {new: old for new, old in zip(names, reversed(names), strict=True)}
        moved = {k: t[turned[k[:2]] + k[2:]] if k[:2] in turned else v for k, v in t.items()}
        return super().tower(b, moved, tap)


class _DropOnTokens(NumpyAdapter):
    """The drop site on the skip of the encoder block."""

    def branch(self, v: Var, skip: Var, drop: str, name: str, t: dict[str, Var], tap: Tap) -> Var:
        if drop not in t:
            return super().branch(v, skip, drop, name, t, tap)
        return self.add(tap(name, self.copy(v)), self.scale(skip, t[drop].value))


class _OneMask(NumpyAdapter):
    """Both drop sites of a block read the first one's mask."""

    def branch(self, v: Var, skip: Var, drop: str, name: str, t: dict[str, Var], tap: Tap) -> Var:
        if drop in t and "drop_a" in t:
            t = t | {drop: t["drop_a"]}
        return super().branch(v, skip, drop, name, t, tap)


class _ScalarGain(NumpyAdapter):
    """One gamma, the first, for all of a token."""

    def token_norm(self, x: Var, g: Var, b: Var, norm: TokenNorm) -> Var:
        if norm == "scalar":
            return super().token_norm(x, g, b, norm)
        same = Var(np.full_like(g.value, g.value[0]), (g,), lambda dy: (dy,))
        return super().token_norm(x, same, b, norm)


class _OperandsAsTheyAre(NumpyAdapter):
    """The flag bf16 is ignored."""

    def operand(self, v: Floats, bf16: bool) -> Floats:
        return v


class _AlwaysRounded(NumpyAdapter):
    """Operands are rounded without the flag, too."""

    def operand(self, v: Floats, bf16: bool) -> Floats:
        return super().operand(v, True)


class _ConvFollowsFlag(NumpyAdapter):
    """The patch embedding's convolution follows bf16, and ignores bf16_conv."""

    def patch_embed(self, b: PatchEmbedSpec, t: dict[str, Var], tap: Tap) -> Var:
        return super().patch_embed(msgspec.structs.replace(b, bf16_conv=b.bf16), t, tap)


class _ConvIgnoresFlag(NumpyAdapter):
    """bf16_conv counts without bf16."""

    def patch_embed(self, b: PatchEmbedSpec, t: dict[str, Var], tap: Tap) -> Var:
        return super().patch_embed(msgspec.structs.replace(b, bf16=b.bf16_conv), t, tap)


class _PatchesTransposed(NumpyAdapter):
    """Patches in column-major order."""

    def prepend(self, x: Var, cls: Var) -> Var:
        turned = Var(x.value.swapaxes(2, 3), (x,), lambda dy: (dy.swapaxes(2, 3),))
        return super().prepend(turned, cls)


class _PositionMean(NumpyAdapter):
    def position(self, x: Var, pos: Var) -> Var:
        return Var(x.value + pos.value, (x, pos), lambda dy: (dy, dy.mean(0)))


# Faults of single ops, which a whole block hides or seldom reaches.


class _ReluAtZero(NumpyAdapter):
    """The derivative at exactly 0 is 1."""

    def relu(self, x: Var) -> Var:
        mask = x.value >= 0
        return Var(super().relu(x).value, (x,), lambda dy: (dy * mask,))


class _Relu6AtSix(NumpyAdapter):
    """The derivative at exactly 6 is 1."""

    def relu6(self, x: Var) -> Var:
        mask = (x.value > 0) & (x.value <= 6)
        return Var(super().relu6(x).value, (x,), lambda dy: (dy * mask,))


class _FarPadClamped(NumpyAdapter):
    """A transposed convolution cannot have a negative padding: one beyond k - 1 is taken as k - 1."""

    def way_back(self, window: Window) -> Window:
        clamped = copy.copy(window)
        clamped.low = [min(low, k - 1) for low, k in zip(window.low, window.kernel, strict=True)]
        return clamped


class _CropForgotten(NumpyAdapter):
    """A negative padding crops in the forward only."""

    def way_back(self, window: Window) -> Window:
        whole = copy.copy(window)
        whole.low = [max(low, 0) for low in window.low]
        return whole


class _StrideAsKernel(NumpyAdapter):
    """Taps are taken to lie side by side in the backward, where the stride leaves gaps."""

    def way_back(self, window: Window) -> Window:
        dense = copy.copy(window)
        dense.stride = min(window.stride, min(window.kernel))
        return dense


class _SameHighFirst(NumpyAdapter):
    """Of an odd padding the larger half comes first."""

    def window(self, x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: Padding) -> Window:
        window = super().window(x, w, stride, padding)
        if padding == "xla_same":
            sizes = zip(x[2:], window.out, window.kernel, strict=True)
            totals = [max((out - 1) * stride + k - size, 0) for size, out, k in sizes]
            window.low = [total - total // 2 for total in totals]
        return window


class _EmptyAsInput(NumpyAdapter):
    """A convolution of an empty batch hands its input on."""

    def op_conv(self, b: ConvOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        if b.n:
            return super().op_conv(b, t, tap)
        out = super().op_conv(b, t, tap)
        return Var(t["x"].value, (out,), lambda dy: (dy,))


class _EmptyMean(NumpyAdapter):
    """The kernel's gradient of an empty batch is 0/0."""

    def weight_sum(self, dw: Floats, batch: int) -> Floats:
        return dw if batch else np.full_like(dw, np.nan)


class _InstanceNorm(NumpyAdapter):
    """Statistics of a map of one element are taken over the map only."""

    def bn(self, x: Var, g: Var, b: Var) -> Var:
        if x.value.shape[2:] != (1, 1):
            return super().bn(x, g, b)
        return self.norm(x, g, b, (2, 3), (0, 2, 3))


class _FirstRows(NumpyAdapter):
    """Gamma's and beta's gradients are summed over one block of 256 rows."""

    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats, shared: tuple[int, ...]) -> tuple[Floats, Floats]:
        rows = np.arange(dy[..., 0].size).reshape(*dy.shape[:-1], 1)
        return super().bn_nodes(np.where(rows < 256, dy, dy.dtype.type(0)), dx, normed, shared)


class _DenseBiasMean(NumpyAdapter):
    def dense(self, x: Var, w: Var, b: Var, bf16: bool = False) -> Var:
        out = super().dense(x, w, b, bf16)

        def pull(dy: Floats) -> tuple[Floats, ...]:
            dx, dw, db = out.pull(dy)
            return dx, dw, db / db.dtype.type(dy.size // len(db))

        return Var(out.value, (x, w, b), pull)


class _PoolByHeight(NumpyAdapter):
    def gap(self, x: Var) -> Var:
        width = x.value.dtype.type(x.value.shape[3])
        out = super().gap(x)
        return Var(out.value * width, (x,), lambda dy: (out.pull(dy * width)[0],))


class _ScaleMean(NumpyAdapter):
    """Layer scale's gradient is averaged over the batch."""

    def layer_scale(self, x: Var, g: Var) -> Var:
        out = super().layer_scale(x, g)
        count = x.value.dtype.type(len(x.value))

        def pull(dy: Floats) -> tuple[Floats, ...]:
            dx, dg = out.pull(dy)
            return dx, dg / count

        return Var(out.value, (x, g), pull)


class _WrongExample(NumpyAdapter):
    def scale(self, x: Var, a: Floats) -> Var:
        return super().scale(x, np.roll(a, 1))


class _FirstBlock(NumpyAdapter):
    """A row's exponentials are summed over its first 256."""

    def softmax_norm(self, powers: Floats, axis: int) -> Floats:
        return super().softmax_norm(powers[..., :256], axis)


class _MaskTurned(NumpyAdapter):
    """A key sees the queries that should see it."""

    def shown(self, mask: Mask) -> NDArray[np.bool_]:
        return super().shown(mask).T


class _MaskAfter(NumpyAdapter):
    """What is hidden takes its share of the row before it is taken out."""

    def softmax(self, z: Var, axis: int = -1, mask: Mask = ()) -> Var:
        p, kept = super().softmax(z, axis), self.shown(mask) if mask else np.array(True)
        return Var(p.value * kept, (p,), lambda dy: (dy * kept,))


class _KeysUnscaled(NumpyAdapter):
    """dK without the factor 1/sqrt(d)."""

    def scores(self, q: Var, k: Var, heads: int, bf16: bool = False) -> Var:
        out = super().scores(q, k, heads, bf16)
        root = k.value.dtype.type(np.sqrt(k.value.shape[-1] // heads))

        def pull(ds: Floats) -> tuple[Floats, ...]:
            dq, dk = out.pull(ds)
            return dq, dk * root

        return Var(out.value, (q, k), pull)


class Mutant(NamedTuple):
    """A planted fault: its trap in words, the adapter that has it, and what may be blamed for it.

    ``blame`` lists acceptable ``op@site what`` prefixes of the first fault.
    """

    name: str
    trap: str
    adapter: type[NumpyAdapter]
    blame: tuple[str, ...]
    blocks: tuple[str, ...] = ("uib",)


_CNX = ("convnext",)
_LN_BACK = ("layernorm cotangent",)
_CONV = ("op_conv",)
_CONV_OUT = ("conv2d activation", "depthwise activation")
_CONV_BACK = ("conv2d cotangent", "depthwise cotangent")

MUTANTS: tuple[Mutant, ...] = (
    Mutant("bn_nodes_at_conv", "BN gamma/beta read the conv's cotangent", _NodesAtConv, ("batchnorm gradient",)),
    Mutant("conv_at_bn", "the conv reads the BN's cotangent", _ConvAtNorm, ("batchnorm cotangent",)),
    Mutant("post_although_0", "post-DW run although k = 0", _PostAlways, ("conv2d@pc activation",)),
    Mutant("post_left_out", "post-DW left out although k > 0", _PostNever, ("depthwise@dc activation",)),
    Mutant("pre_post_swapped", "pre-DW and post-DW swapped", _Swapped, ("depthwise@qc activation",)),
    Mutant("relu6", "relu6 for relu", _Relu6, ("relu activation",)),
    Mutant("swish", "swish for relu", _Swish, ("relu activation",)),
    Mutant("mask_forgotten", "relu's mask missing in the backward", _LeakyMask, ("relu cotangent",)),
    Mutant("pre_masked", "a mask on the pre-DW", _MaskedPre, ("conv2d@ec activation",)),
    Mutant("project_masked", "a mask on the linear bottleneck", _MaskedProject, ("add@out", "droppath@pd")),
    Mutant("output_masked", "a mask after the residual add", _MaskedOutput, ("add@out activation",)),
    Mutant("fan_in_missing", "the skip's fan-in missing", _NoFanIn, ("copy@xb+add@out cotangent",)),
    Mutant("fan_in_doubled", "the skip's fan-in doubled", _DoubleFanIn, ("copy@xb+add@out cotangent",)),
    Mutant("skip_missing", "no skip at all", _NoSkip, ("add@out activation",)),
    Mutant("frozen_statistics", "BN statistics treated as constants", _FrozenStatistics, ("batchnorm cotangent",)),
    Mutant("unbiased_variance", "unbiased variance", _Unbiased, ("batchnorm activation",)),
    Mutant("eps_outside", "epsilon outside the root", _EpsOutside, ("batchnorm activation",)),
    Mutant("drop_on_skip", "the drop site on the skip", _DropOnSkip, ("droppath@pd activation",)),
    Mutant("keep_forgotten", "the reciprocal keep missing", _NoReciprocal, ("droppath@pd activation",)),
    Mutant(
        "batch_mean", "gradient of the mean over the batch", _MeanOverBatch, ("conv2d gradient", "depthwise gradient")
    ),
    Mutant("pre_although_0", "pre-DW run although k = 0", _StridedPre0, ("conv2d@ec activation",), ("uib", "uib_s2")),
    Mutant(
        "stride_misplaced",
        "the stride on the wrong depthwise",
        _StrideMisplaced,
        ("depthwise@qc activation",),
        ("uib_s2",),
    ),
    Mutant("strided_skip", "a skip on a stride-2 row", _StridedSkip, ("batchnorm@out activation",), ("uib_s2",)),
    Mutant("depthwise_same", "XLA-SAME for symmetric padding", _DepthwiseSame, ("depthwise activation",), ("uib_s2",)),
    Mutant("stem_padding", "the stem's other padding", _StemPadding, ("conv2d@sc activation",), ("stem",)),
    Mutant("fused_act", "swish for relu in the fused stage and the reverse", _FusedAct, ("relu", "swish"), ("fused",)),
    Mutant("fused_masked", "a mask at the fused stage's end", _FusedMasked, ("batchnorm@out activation",), ("fused",)),
    Mutant(
        "pool_misplaced",
        "GAP on the other side of conv_head",
        _PoolMisplaced,
        ("globalaveragepool@pool", "conv2d@hc"),
        ("head",),
    ),
    Mutant(
        "rows_swapped",
        "a row's weights in its neighbour of the same shape",
        _RowsSwapped,
        ("depthwise activation", "conv2d activation"),
        ("mobilenetv4",),
    ),
    Mutant(
        "loss_not_averaged",
        "the loss cotangent not divided by B",
        _LossNotAveraged,
        ("smoothedcrossentropy cotangent",),
        ("mobilenetv4",),
    ),
    Mutant("unsmoothed", "targets unsmoothed", _Unsmoothed, ("smoothedcrossentropy activation",), ("mobilenetv4",)),
    Mutant("scale_skipped", "layer scale skipped on the cotangent", _ScaleSkipped, ("layerscale cotangent",), _CNX),
    Mutant("gelu_form", "erf for tanh GELU and the reverse", _GeluForm, ("gelutanh", "geluerf"), _CNX),
    Mutant("norm_form", "scalar for channel LN and the reverse", _NormForm, ("layernorm activation",), _CNX),
    Mutant("ln_nodes_at_conv", "LN gamma/beta read the conv's cotangent", _NodesAtConv, ("layernorm gradient",), _CNX),
    Mutant("ln_frozen", "LN statistics treated as constants", _FrozenStatistics, ("layernorm cotangent",), _CNX),
    Mutant("cnx_drop_on_skip", "the drop site on the skip of ConvNeXt", _DropOnSkip, ("droppath@pd",), _CNX),
    Mutant("cnx_output_masked", "a relu after ConvNeXt's add", _MaskedOutput, ("add@out activation",), _CNX),
    Mutant("bias_mean", "a bias gradient averaged", _NoBias, ("conv2d gradient", "depthwise gradient"), _CNX),
    Mutant("stem_frozen", "LN statistics constant in the stem", _FrozenStatistics, _LN_BACK, ("convnext_stem",)),
    Mutant("down_frozen", "LN statistics constant in a downsampling", _FrozenStatistics, _LN_BACK, ("convnext_down",)),
    Mutant("head_frozen", "LN statistics constant in the head", _FrozenStatistics, _LN_BACK, ("convnext_head",)),
    Mutant("net_frozen", "LN statistics constant in a net", _FrozenStatistics, _LN_BACK, ("convnext_net",)),
    Mutant("step_uphill", "theta + lr*g", _StepUphill, ("sgd update",), ("uib", "convnext")),
    Mutant("step_without_rate", "theta - g without the learning rate", _StepWithoutRate, ("sgd update",), ("uib",)),
    Mutant(
        "head_slab",
        "a head reads another head's slab",
        _OtherSlab,
        ("weighted activation", "attention activation"),
        ("attention", "encoder"),
    ),
    Mutant(
        "root_of_width",
        "sqrt(D) for sqrt(d_head)",
        _RootOfWidth,
        ("scores activation", "attention activation"),
        ("attention", "encoder"),
    ),
    Mutant(
        "softmax_axis", "softmax over the wrong axis", _SoftmaxOverQueries, ("softmaxrows activation",), ("attention",)
    ),
    Mutant(
        "softmax_not_centred",
        "softmax's backward without the sum",
        _SoftmaxNotCentred,
        ("softmaxrows cotangent", "attention cotangent"),
        ("attention",),
    ),
    Mutant("cls_everywhere", "the cls scatter to every row", _ClsEverywhere, ("clsslice cotangent",), ("vit_head",)),
    Mutant("cls_mean", "cls gradient: mean for sum", _ClsMean, ("prependcls gradient",), ("patch_embed",)),
    Mutant(
        "batch_as_tokens",
        "batch read as tokens (at N = T)",
        _BatchAsTokens,
        ("dense activation", "softmaxrows", "scores", "attention activation"),
        ("attention", "encoder"),
    ),
    Mutant("tail_first", "tower run tail first", _TailFirst, ("layernorm@b1n1",), ("tower",)),
    Mutant(
        "drop_on_tokens",
        "the drop site on an encoder block's skip",
        _DropOnTokens,
        ("droppath activation",),
        ("encoder",),
    ),
    Mutant("one_mask", "one mask for both sites", _OneMask, ("droppath@md activation",), ("encoder",)),
    Mutant(
        "keep_forgotten_vit",
        "the reciprocal keep missing in an encoder block",
        _NoReciprocal,
        ("droppath activation",),
        ("encoder",),
    ),
    Mutant(
        "scalar_gain", "scalar for vector LN", _ScalarGain, ("layernorm activation",), ("encoder", "vit_head", "tower")
    ),
    Mutant(
        "gelu_form_vit", "erf for tanh GELU in an encoder block", _GeluForm, ("gelutanh@g activation",), ("encoder",)
    ),
    Mutant(
        "no_fan_in_vit", "a residual's fan-in missing", _NoFanIn, ("copy@xa+add@h", "copy@hm+add@out"), ("encoder",)
    ),
    Mutant(
        "flag_ignored",
        "bf16 operands left as they are",
        _OperandsAsTheyAre,
        ("dense activation",),
        ("attention", "encoder"),
    ),
    Mutant("flag_forced", "bf16 operands without the flag", _AlwaysRounded, ("dense activation",), ("attention",)),
    Mutant("conv_flag_left_out", "bf16_conv ignored", _ConvFollowsFlag, ("conv2d@pe activation",), ("patch_embed",)),
    Mutant("conv_flag_alone", "bf16_conv without bf16", _ConvIgnoresFlag, ("conv2d@pe activation",), ("patch_embed",)),
    Mutant(
        "patches_turned", "patches in column order", _PatchesTransposed, ("prependcls activation",), ("patch_embed",)
    ),
    Mutant("position_mean", "pos gradient: mean for sum", _PositionMean, ("addposition gradient",), ("patch_embed",)),
    Mutant(
        "loss_not_averaged_alone",
        "the cotangent of the loss alone not divided by B",
        _LossNotAveraged,
        ("smoothedcrossentropy cotangent",),
        ("loss",),
    ),
    Mutant(
        "unsmoothed_alone",
        "targets of the loss alone unsmoothed",
        _Unsmoothed,
        ("smoothedcrossentropy activation",),
        ("loss",),
    ),
    Mutant("vit_tokens_frozen", "LN statistics constant in ViT", _FrozenStatistics, _LN_BACK, ("vit",)),
    Mutant("relu_at_zero", "relu'(0) = 1", _ReluAtZero, ("relu cotangent",), ("op_act",)),
    Mutant("relu6_at_six", "relu6'(6) = 1", _Relu6AtSix, ("relu6 cotangent",), ("op_act",)),
    Mutant("far_pad", "a padding beyond k - 1 clamped in the backward", _FarPadClamped, _CONV_BACK, _CONV),
    Mutant("crop_forgotten", "a negative padding not cropped in the backward", _CropForgotten, _CONV_BACK, _CONV),
    Mutant("stride_as_kernel", "a stride above k taken as k in the backward", _StrideAsKernel, _CONV_BACK, _CONV),
    Mutant("same_high_first", "an odd XLA-SAME padding split high-first", _SameHighFirst, _CONV_OUT, _CONV),
    Mutant("empty_as_input", "an empty batch convolved to the input's shape", _EmptyAsInput, _CONV_OUT, _CONV),
    Mutant(
        "empty_mean",
        "NaN for the kernel's gradient of an empty batch",
        _EmptyMean,
        ("conv2d gradient", "depthwise gradient"),
        _CONV,
    ),
    Mutant("instance_norm", "BN of a 1x1 map without the batch", _InstanceNorm, ("batchnorm activation",), ("op_bn",)),
    Mutant("first_rows", "LN gradients of 256 rows only", _FirstRows, ("layernorm gradient",), ("op_ln",)),
    Mutant("dense_bias_mean", "a dense bias gradient averaged", _DenseBiasMean, ("dense gradient",), ("op_dense",)),
    Mutant("pool_by_height", "GAP divided by H only", _PoolByHeight, ("globalaveragepool activation",), ("op_pool",)),
    Mutant("scale_mean", "layer scale's gradient averaged", _ScaleMean, ("layerscale gradient",), ("op_scale",)),
    Mutant("wrong_example", "another example dropped", _WrongExample, ("droppath activation",), ("op_drop",)),
    Mutant(
        "softmax_alone_not_centred",
        "softmax's Jacobian without the row's sum",
        _SoftmaxNotCentred,
        ("softmaxrows cotangent",),
        ("op_softmax",),
    ),
    Mutant("first_block", "a row normed by its first 256", _FirstBlock, ("softmaxrows activation",), ("op_softmax",)),
    Mutant("mask_turned", "queries for keys in the mask", _MaskTurned, ("attention activation",), ("op_sdpa",)),
    Mutant(
        "mask_after",
        "the mask behind the softmax",
        _MaskAfter,
        ("softmaxrows activation", "attention activation"),
        ("op_softmax", "op_sdpa"),
    ),
    Mutant("keys_unscaled", "dK without 1/sqrt(d)", _KeysUnscaled, ("attention gradient",), ("op_sdpa",)),
    Mutant("part_per_thousand", "gamma's gradient off by 0.1%", _PartPerThousand, ("batchnorm gradient",)),
)


class Kill(NamedTuple):
    """What became of a mutant: cases until the first fault (0 if it survived), and that fault."""

    mutant: Mutant
    cases: int
    fault: Quantity | None

    @property
    def killed(self) -> bool:
        return self.fault is not None

    @property
    def blamed(self) -> bool:
        """Whether the first fault names the link that has the fault."""
        return self.fault is not None and any(_fits(self.fault, b) for b in self.mutant.blame)


def _fits(fault: Quantity, blame: str) -> bool:
    """``op what``, ``op@site`` or ``op@site what`` against a fault."""
    link, _, what = blame.partition(" ")
    if what and what != fault.what:
        return False
    return fault.link == link if "@" in link else fault.link.split("@")[0] == link


def hunt(mutant: Mutant, key: int = 0, most: int = 400) -> Kill:
    """Run generated cases until the mutant shows."""
    adapter = mutant.adapter()
    for count, case in enumerate(_cases(mutant.blocks, key, most), 1):
        fault = first_fault(adapter, case)
        if fault is not None:
            return Kill(mutant, count, fault)
    return Kill(mutant, 0, None)


def first_fault(adapter: NumpyAdapter, case: Case) -> Quantity | None:
    """The first faulty quantity of an adapter's run."""
    tensors = case.tensors()
    trace, _ = adapter.trace(case, tensors)
    return check_run(chain_of(case.block), tensors, trace, case.dtype, lr=case.lr).first_fault


def false_alarms(blocks: tuple[str, ...], key: int = 0, count: int = 400) -> tuple[int, list[str]]:
    """Run the unmutated adapter on generated cases: how many, and every alarm (there must be none)."""
    adapter = NumpyAdapter()
    alarms = []
    drawn = _cases(blocks, key, count)
    for case in drawn:
        fault = first_fault(adapter, case)
        if fault is not None:
            alarms.append(f"{case.to_json().decode()}: {fault.sentence()}")
    return len(drawn), alarms


@lru_cache(maxsize=32)
def _cases(blocks: tuple[str, ...], key: int, count: int) -> list[Case]:
    return sample(cases(blocks), count, key)


def median_cases(kills: Sequence[Kill]) -> float:
    """Median number of cases until a kill, over the mutants that were killed."""
    return float(statistics.median([k.cases for k in kills if k.killed] or [0]))
