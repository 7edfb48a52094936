"""NumPy: the same-precision reference, a small reverse-mode tape of its own. Also the fastest way to test the checker.

Every operation rounds in the case's dtype, as a plain framework would. The planted faults of ``diffgrad mutants`` are
subclasses of this adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import erf

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.case import Case
from diffgrad.specs import (
    EPS,
    AttentionSpec,
    ConvNeXtDownSpec,
    ConvNeXtHeadSpec,
    ConvNeXtNetSpec,
    ConvNeXtSpec,
    ConvNeXtStemSpec,
    EncoderSpec,
    FusedSpec,
    HeadSpec,
    LossSpec,
    MobileNetV4Spec,
    PatchEmbedSpec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.vit import TokenNorm
from diffgrad.trace import Arrays, Trace

Floats = NDArray[Any]
AnyUib = UibSpec | UibStridedSpec


@dataclass(eq=False)
class Var:
    """A value on the tape: its parents, and the map from its cotangent to theirs."""

    value: Floats
    parents: tuple[Var, ...] = ()
    pull: Callable[[Floats], tuple[Floats, ...]] = lambda dy: ()
    cot: Floats | None = field(default=None)


def backward(out: Var, dy: Floats) -> None:
    """Accumulate cotangents from ``out`` to everything it depends on."""
    order: list[Var] = []
    seen: set[int] = set()

    def visit(v: Var) -> None:
        if id(v) not in seen:
            seen.add(id(v))
            for parent in v.parents:
                visit(parent)
            order.append(v)

    visit(out)
    out.cot = dy
    for v in reversed(order):
        if v.cot is None:
            continue
        for parent, g in zip(v.parents, v.pull(v.cot), strict=True):
            parent.cot = g if parent.cot is None else parent.cot + g


class NumpyAdapter(Adapter):
    """NumPy in the case's dtype. Each primitive is a method, so that a planted fault can replace it."""

    name = "numpy"
    mode = "eager"

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        t = {name: Var(v) for name, v in tensors.items()}
        sites: dict[str, Var] = {}

        def tap(site: str, v: Var) -> Var:
            sites[site] = v
            return v

        with Stopwatch() as clock, np.errstate(all="ignore"):
            out = self.block(spec)(spec, t, tap)
            backward(out, tensors["dy"])
        x = spec.input().name
        inputs = {x: t[x]} if x in spec.differentiated() else {}
        nodes = {s: v.cot for s, v in (sites | inputs).items()}
        grads = {p.name: t[p.name].cot for p in spec.parameters()}
        return (
            Trace(
                acts={s: v.value for s, v in sites.items()} | {"out": out.value},
                cots={s: g for s, g in nodes.items() if g is not None},
                grads={s: g for s, g in grads.items() if g is not None},
                updates={s: self.step(tensors[s], g, case.lr) for s, g in grads.items() if g is not None and case.lr},
            ),
            clock.seconds,
        )

    def uib(self, b: UibSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Universal inverted bottleneck, stride 1."""
        v = self.body(b, t, tap, tap("xb", self.copy(t["x"])))
        return self.join(b, t, tap, tap("pn", v))

    def uib_s2(self, b: UibStridedSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Universal inverted bottleneck, stride 2, no skip."""
        return self.body(b, t, tap, t["x"])

    def body(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """Everything but the skip."""
        v = self.pre(b, t, tap, v)
        v = tap("ec", self.conv(v, t["eW"]))
        v = tap("en", self.bn(v, t["eg"], t["ebt"]))
        v = tap("er", self.relu(v))
        v = self.post(b, t, tap, v)
        v = tap("pc", self.conv(v, t["pW"]))
        return self.bn(v, t["pg"], t["pbt"])

    def strides(self, b: AnyUib) -> tuple[int, int]:
        """Strides of the pre- and the post-depthwise."""
        if isinstance(b, UibSpec):
            return 1, 1
        return (1, 2) if b.carrier == "post" else (2, 1)

    def pre(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The pre-depthwise and its batch norm, where the row has one."""
        if not b.pre_k:
            return v
        v = tap("qc", self.depthwise(v, t["qW"], self.strides(b)[0]))
        v = self.pre_act(tap("qn", self.bn(v, t["qg"], t["qbt"])))
        return tap("qr", self.relu(v)) if b.pre_act == "relu" else v

    def pre_act(self, v: Var) -> Var:
        """Nothing else follows the pre-depthwise's batch norm."""
        return v

    def post(self, b: AnyUib, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The post-depthwise, its batch norm and relu, where the row has one."""
        if not b.post_k:
            return v
        v = tap("dc", self.depthwise(v, t["dW"], self.strides(b)[1]))
        v = tap("dn", self.bn(v, t["dg"], t["dbt"]))
        return tap("dr", self.relu(v))  # type: ignore[no-any-return]

    def join(self, b: UibSpec | ConvNeXtSpec, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The drop site on the branch, then the skip."""
        if b.drop:
            v = tap("pd", self.scale(v, t["drop"].value))
        return self.add(v, t["x"])

    def stem(self, b: StemSpec, t: dict[str, Var], tap: Tap) -> Var:
        """conv 3x3 stride 2, BN, relu."""
        v = tap("sc", self.conv(t["x"], t["sW"], 2, b.padding))
        return self.relu(tap("sn", self.bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The fused stage."""
        v = tap("f0cc", self.conv(t["x"], t["f0cW"], 2))
        v = tap("f0cn", self.bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", self.fused_act(b, v))
        v = tap("f0pc", self.conv(v, t["f0pW"]))
        return self.fused_end(self.bn(v, t["f0pg"], t["f0pbt"]))

    def fused_act(self, b: FusedSpec, v: Var) -> Var:
        return self.swish(v) if b.act == "swish" else self.relu(v)

    def fused_end(self, v: Var) -> Var:
        """Nothing follows the last batch norm."""
        return v

    def head(self, b: HeadSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The head."""
        v = tap("h1c", self.conv(t["x"], t["h1W"]))
        v = tap("h1n", self.bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", self.relu(v))
        if self.pools_first(b):
            v = tap("pool", self.gap(v))
        if b.oc:
            v = tap("hc", self.conv(v, t["hW"]))
            v = tap("hn", self.bn(v, t["hg"], t["hbt"]))
            v = tap("hr", self.relu(v))
        if not self.pools_first(b):
            v = tap("pool", self.gap(v))
        return self.dense(tap("flat", self.flatten(v)), t["Wd"], t["bd"])

    def pools_first(self, b: HeadSpec) -> bool:
        return b.pool_first

    def mobilenetv4(self, b: MobileNetV4Spec, t: dict[str, Var], tap: Tap) -> Var:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return self.cross_entropy(logits, t["target"].value)

    def convnext(self, b: ConvNeXtSpec, t: dict[str, Var], tap: Tap) -> Var:
        """ConvNeXt block."""
        v = tap("xb", self.copy(t["x"]))
        v = tap("d", self.bias(self.depthwise(v, t["dW"]), t["db"]))
        v = tap("nl", self.ln(v, t["lng"], t["lnbt"], b.norm))
        v = tap("e", self.bias(self.conv(v, t["exW"]), t["exb"]))
        v = tap("g", self.gelu(v, b.act))
        v = tap("p", self.bias(self.conv(v, t["prW"]), t["prb"]))
        v = tap("ls", self.layer_scale(v, t["lsg"]))
        return self.join(b, t, tap, v)

    def convnext_stem(self, b: ConvNeXtStemSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Patchify, LN."""
        v = tap("st", self.bias(self.conv(t["x"], t["stW"], b.k, "valid"), t["stb"]))
        return self.ln(v, t["stng"], t["stnbt"], b.norm)

    def convnext_down(self, b: ConvNeXtDownSpec, t: dict[str, Var], tap: Tap) -> Var:
        """LN, conv 2x2 stride 2."""
        v = tap("dsn", self.ln(t["x"], t["dsng"], t["dsnbt"], b.norm))
        return self.bias(self.conv(v, t["dsW"], 2, "valid"), t["dsb"])

    def convnext_head(self, b: ConvNeXtHeadSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Pooling, LN, dense."""
        v = tap("hn", self.ln(tap("pool", self.gap(t["x"])), t["hng"], t["hnbt"], b.norm))
        return self.dense(tap("flat", self.flatten(v)), t["Wd"], t["bd"])

    def convnext_net(self, b: ConvNeXtNetSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The whole net and its loss."""
        return self.cross_entropy(self.run_blocks(b.blocks(), b.boundaries(), t, tap), t["target"].value)

    def attention(self, b: AttentionSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Multi-head self-attention."""
        return self.mhsa(b, t["x"], t, tap)

    def mhsa(self, b: AttentionSpec | EncoderSpec, v: Var, t: dict[str, Var], tap: Tap) -> Var:
        """Projections, one core a head, output projection."""
        q, k, u = (tap(s, self.dense(v, t[f"W{s}"], t[f"b{s}"], b.bf16)) for s in "qkv")
        if b.core == "composed":
            p = tap("attnP", self.softmax(tap("attnS", self.scores(q, k, b.heads, b.bf16))))
        else:
            p = self.softmax(self.scores(q, k, b.heads, b.bf16))
        o = tap("o", self.weighted(p, u, b.heads, b.bf16))
        return self.dense(o, t["Wo"], t["bo"], b.bf16)

    def encoder(self, b: EncoderSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The encoder block."""
        v = tap("n1", self.token_norm(tap("xa", self.copy(t["x"])), t["ln1g"], t["ln1bt"], b.norm))
        v = tap("ao", self.mhsa(b, v, t, tap))
        h = tap("h", self.branch(v, t["x"], "drop_a", "ad", t, tap))
        v = tap("n2", self.token_norm(tap("hm", self.copy(h)), t["ln2g"], t["ln2bt"], b.norm))
        v = tap("g", self.gelu(tap("f1", self.dense(v, t["Wfc1"], t["bfc1"], b.bf16)), "gelu_tanh"))
        v = tap("f2", self.dense(v, t["Wfc2"], t["bfc2"], b.bf16))
        return self.branch(v, h, "drop_m", "md", t, tap)

    def branch(self, v: Var, skip: Var, drop: str, name: str, t: dict[str, Var], tap: Tap) -> Var:
        """A branch's drop site, where it has one, then the skip."""
        if drop in t:
            v = tap(name, self.scale(v, t[drop].value))
        return self.add(v, skip)

    def tower(self, b: TowerSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Encoder blocks in series."""
        return self.run_blocks(b.blocks(), (*b.boundaries(), "out"), t, tap)  # type: ignore[no-any-return]

    def patch_embed(self, b: PatchEmbedSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Patchify, cls in front, positions."""
        v = tap("pe", self.bias(self.conv(t["x"], t["peW"], b.p, "valid", b.bf16 and b.bf16_conv), t["peb"]))
        return self.position(tap("seq", self.prepend(v, t["cls"])), t["pos"])

    def vit_head(self, b: VitHeadSpec, t: dict[str, Var], tap: Tap) -> Var:
        """LN, the cls token, dense."""
        v = tap("fn", self.token_norm(t["x"], t["fng"], t["fnbt"], b.norm))
        return self.dense(tap("fc", self.cls_slice(v)), t["Wd"], t["bd"])

    def vit(self, b: VitSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The whole net and its loss."""
        return self.cross_entropy(self.run_blocks(b.blocks(), b.boundaries(), t, tap), t["target"].value)

    def loss(self, b: LossSpec, t: dict[str, Var], tap: Tap) -> Var:
        """The smoothed cross entropy alone."""
        return self.cross_entropy(t["x"], t["target"].value)

    def step(self, theta: Floats, gradient: Floats, lr: float) -> Floats:
        """Plain SGD."""
        return np.asarray(theta - theta.dtype.type(lr) * gradient)

    # Primitives: value, parents, and the pull-back in the same precision.

    def copy(self, x: Var) -> Var:
        return Var(x.value, (x,), lambda dy: (dy,))

    def add(self, a: Var, b: Var) -> Var:
        return Var(a.value + b.value, (a, b), lambda dy: (dy, dy))

    def scale(self, x: Var, a: Floats) -> Var:
        """One factor per example."""
        s = a.reshape(-1, *(1,) * (x.value.ndim - 1))
        return Var(x.value * s, (x,), lambda dy: (dy * s,))

    def relu(self, x: Var) -> Var:
        mask = x.value > 0
        return Var(np.where(mask, x.value, x.value.dtype.type(0)), (x,), lambda dy: (dy * mask,))

    def swish(self, x: Var) -> Var:
        s = 1 / (1 + np.exp(-x.value))
        return Var(x.value * s, (x,), lambda dy: (dy * (s * (1 + x.value * (1 - s))),))

    def gap(self, x: Var) -> Var:
        """Mean over the map, dimensions kept."""
        shape, size = x.value.shape, x.value.dtype.type(x.value.shape[2] * x.value.shape[3])
        mean = x.value.mean((2, 3), keepdims=True)
        return Var(mean, (x,), lambda dy: (np.broadcast_to(dy / size, shape),))

    def flatten(self, x: Var) -> Var:
        return Var(x.value.reshape(len(x.value), -1), (x,), lambda dy: (dy.reshape(x.value.shape),))

    def dense(self, x: Var, w: Var, b: Var, bf16: bool = False) -> Var:
        """Over the last axis; with the flag, every product takes rounded operands."""
        low, kernel = self.operand(x.value, bf16), self.operand(w.value, bf16)

        def pull(dy: Floats) -> tuple[Floats, Floats, Floats]:
            d = self.operand(dy, bf16)
            dw = low.reshape(-1, low.shape[-1]).T @ d.reshape(-1, d.shape[-1])
            return d @ kernel.T, self.weight_sum(dw, len(dy)), dy.reshape(-1, dy.shape[-1]).sum(0)

        return Var(low @ kernel + b.value, (x, w, b), pull)

    def operand(self, v: Floats, bf16: bool) -> Floats:
        """What a product reads: rounded to bfloat16 with the flag, else as it is."""
        return v.astype(ml_dtypes.bfloat16).astype(v.dtype) if bf16 else v

    def scores(self, q: Var, k: Var, heads: int, bf16: bool = False) -> Var:
        """Q*K^T/sqrt(d) of each head."""
        a, b = (self.slabs(self.operand(v.value, bf16), heads) for v in (q, k))
        factor = q.value.dtype.type(1 / np.sqrt(self.scaled_by(a)))

        def pull(ds: Floats) -> tuple[Floats, Floats]:
            d = self.operand(ds, bf16)
            return self.join_heads(d @ b) * factor, self.join_heads(d.swapaxes(2, 3) @ a) * factor

        return Var(a @ b.swapaxes(2, 3) * factor, (q, k), pull)

    def scaled_by(self, slabs: Floats) -> int:
        """The head's width, whose root divides the scores."""
        return int(slabs.shape[-1])

    def softmax(self, z: Var, axis: int = -1) -> Var:
        """Softmax of every row."""
        powers = np.exp(z.value - z.value.max(axis, keepdims=True))
        p = powers / powers.sum(axis, keepdims=True)
        return Var(p, (z,), lambda dp: (self.softmax_back(p, dp, axis),))

    def softmax_back(self, p: Floats, dp: Floats, axis: int) -> Floats:
        return np.asarray(p * (dp - (p * dp).sum(axis, keepdims=True)))

    def weighted(self, p: Var, v: Var, heads: int, bf16: bool = False) -> Var:
        """P*V of each head, heads side by side."""
        a, b = self.operand(p.value, bf16), self.slabs(self.operand(v.value, bf16), heads)

        def pull(do: Floats) -> tuple[Floats, Floats]:
            d = self.heads(self.operand(do, bf16), heads)
            return d @ b.swapaxes(2, 3), self.join_heads(a.swapaxes(2, 3) @ d)

        return Var(self.join_heads(a @ b), (p, v), pull)

    def slabs(self, v: Floats, heads: int) -> Floats:
        """The slab of each head, [N,T,D] -> [N,heads,T,d], of what a core reads."""
        return self.heads(v, heads)

    def heads(self, v: Floats, heads: int) -> Floats:
        n, t, width = v.shape
        return v.reshape(n, t, heads, width // heads).swapaxes(1, 2)

    def join_heads(self, v: Floats) -> Floats:
        """[N,heads,T,d] -> [N,T,D]"""
        n, heads, t, d = v.shape
        return v.swapaxes(1, 2).reshape(n, t, heads * d)

    def token_norm(self, x: Var, g: Var, b: Var, norm: TokenNorm) -> Var:
        """Layer norm of each token."""
        return self.norm(x, g, b, (2,), (0, 1) if norm == "vector" else (0, 1, 2))

    def prepend(self, x: Var, cls: Var) -> Var:
        """Patches in a row behind the cls token."""
        n, d = x.value.shape[:2]
        patches = x.value.reshape(n, d, -1).swapaxes(1, 2)
        tokens = np.concatenate((np.broadcast_to(cls.value, (n, 1, d)), patches), axis=1)
        return Var(tokens, (x, cls), lambda dy: (dy[:, 1:].swapaxes(1, 2).reshape(x.value.shape), self.cls_node(dy)))

    def cls_node(self, dy: Floats) -> Floats:
        return np.asarray(dy[:, 0].sum(0))

    def position(self, x: Var, pos: Var) -> Var:
        """A position for every token."""
        return Var(x.value + pos.value, (x, pos), lambda dy: (dy, dy.sum(0)))

    def cls_slice(self, x: Var) -> Var:
        """Token 0; backward, the patch rows get nothing."""

        def pull(dy: Floats) -> tuple[Floats]:
            dx = np.zeros_like(x.value)
            dx[:, 0] = dy
            return (dx,)

        return Var(x.value[:, 0], (x,), pull)

    def cross_entropy(self, z: Var, t: Floats) -> Var:
        """Smoothed cross entropy, averaged over the batch."""
        shifted = z.value - z.value.max(-1, keepdims=True)
        powers = np.exp(shifted)
        norm = powers.sum(-1, keepdims=True)
        loss = -(t * (shifted - np.log(norm))).sum() / z.value.dtype.type(len(t))
        return Var(np.asarray(loss), (z,), lambda dy: (self.loss_back(powers / norm, t) * dy,))

    def loss_back(self, p: Floats, t: Floats) -> Floats:
        """Cotangent at the logits."""
        return np.asarray((p - t) / p.dtype.type(len(t)))

    def conv(self, x: Var, w: Var, stride: int = 1, padding: str = "symmetric", bf16: bool = False) -> Var:
        """By gathered patches [N,C,H',W',kH,kW]; ``x`` is zero-padded first."""
        window = Window(x.value.shape, w.value.shape, stride, padding)
        patches, kernel = window.patches(self.operand(x.value, bf16)), self.operand(w.value, bf16)

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            d = self.operand(dy, bf16)
            dx = window.scatter(np.einsum("nohw,ocab->nchwab", d, kernel))
            return dx, self.weight_sum(np.einsum("nchwab,nohw->ocab", patches, d, optimize=True), len(dy))

        return Var(np.einsum("nchwab,ocab->nohw", patches, kernel, optimize=True), (x, w), pull)

    def depthwise(self, x: Var, w: Var, stride: int = 1, padding: str = "symmetric") -> Var:
        """One kernel per channel."""
        window = Window(x.value.shape, w.value.shape, stride, padding)
        patches, kernel = window.patches(x.value), w.value[:, 0]

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            dx = window.scatter(np.einsum("nchw,cab->nchwab", dy, kernel))
            return dx, self.weight_sum(np.einsum("nchwab,nchw->cab", patches, dy)[:, None], len(dy))

        return Var(np.einsum("nchwab,cab->nchw", patches, kernel), (x, w), pull)

    def weight_sum(self, dw: Floats, batch: int) -> Floats:
        """A kernel's gradient is the *sum* over the batch."""
        return dw

    def bias(self, x: Var, b: Var) -> Var:
        """One number per channel."""
        return Var(x.value + b.value[:, None, None], (x, b), lambda dy: (dy, dy.sum((0, 2, 3))))

    def layer_scale(self, x: Var, g: Var) -> Var:
        """gamma per channel or per element of the map."""
        shared = (0, 2, 3) if g.value.ndim == 1 else (0,)
        scale = g.value[:, None, None] if g.value.ndim == 1 else g.value
        return Var(x.value * scale, (x, g), lambda dy: (self.scale_back(dy, scale), (dy * x.value).sum(shared)))

    def scale_back(self, dy: Floats, scale: Floats) -> Floats:
        return np.asarray(dy * scale)

    def gelu(self, x: Var, form: str) -> Var:
        """The tanh or the erf form."""
        v = x.value
        real = v.dtype.type
        if form == "gelu_tanh":
            k, a = real(np.sqrt(2 / np.pi)), real(0.044715)
            t = np.tanh(k * (v + a * v * v * v))
            slope = (1 + t) / 2 + v / 2 * (1 - t * t) * k * (1 + 3 * a * v * v)
        else:
            t = erf(v / real(np.sqrt(2)))
            slope = (1 + t) / 2 + v * np.exp(-v * v / 2) / real(np.sqrt(2 * np.pi))
        return Var(v / 2 * (1 + t), (x,), lambda dy: (dy * slope,))

    def bn(self, x: Var, g: Var, b: Var) -> Var:
        """Batch norm with live statistics: over everything but the channel."""
        return self.norm(x, g, b, (0, 2, 3), (0, 2, 3))

    def ln(self, x: Var, g: Var, b: Var, kind: str) -> Var:
        """Layer norm of one example: over the channels, or over the whole map with one gamma and beta."""
        if kind == "channel":
            return self.norm(x, g, b, (1,), (0, 2, 3))
        return self.norm(x, g, b, (1, 2, 3), (0, 1, 2, 3))

    def norm(self, x: Var, g: Var, b: Var, axes: tuple[int, ...], shared: tuple[int, ...]) -> Var:
        """Mean, then the mean square of the centred values, over ``axes``; gamma is the same along ``shared``."""
        centred = x.value - x.value.mean(axes, keepdims=True)
        inv_std = self.inverse_root(self.variance(centred, axes))
        normed = centred * inv_std
        spread = (-1, 1, 1) if x.value.ndim == 4 else (-1,)
        gain, shift = g.value.reshape(spread), b.value.reshape(spread)

        def pull(dy: Floats) -> tuple[Floats, Floats, Floats]:
            dx = self.bn_back(gain * dy, normed, inv_std, axes)
            gamma, beta = self.bn_nodes(dy, dx, normed, shared)
            return dx, gamma.reshape(g.value.shape), beta.reshape(b.value.shape)

        return Var(gain * normed + shift, (x, g, b), pull)

    def variance(self, centred: Floats, axes: tuple[int, ...]) -> Floats:
        return np.asarray(np.mean(centred * centred, axes, keepdims=True))

    def inverse_root(self, variance: Floats) -> Floats:
        return np.asarray(1 / np.sqrt(variance + variance.dtype.type(EPS)))

    def bn_back(self, d: Floats, normed: Floats, inv_std: Floats, axes: tuple[int, ...]) -> Floats:
        """Cotangent at the norm's input, for d = gamma * dy."""
        along = (normed * d).mean(axes, keepdims=True)
        return np.asarray(inv_std * (d - d.mean(axes, keepdims=True) - normed * along))

    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats, shared: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Gradients of gamma and beta, from the cotangent at the norm's *output*."""
        return (dy * normed).sum(shared), dy.sum(shared)


class Window:
    """Where a convolution's taps lie: low padding, output size, and the way there and back."""

    def __init__(self, x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: str) -> None:
        self.shape, self.kernel, self.stride = x, w[2:], stride
        self.low, self.out = [], []
        for size, k in zip(x[2:], self.kernel, strict=True):
            if padding == "xla_same":
                out = -(-size // stride)
                low = max((out - 1) * stride + k - size, 0) // 2
            else:
                low = k // 2 if padding == "symmetric" else 0
                out = (size + 2 * low - k) // stride + 1
            self.low.append(low)
            self.out.append(out)

    def _padded_shape(self) -> tuple[int, int]:
        high, wide = (
            max(size + low, (out - 1) * self.stride + k)
            for size, low, out, k in zip(self.shape[2:], self.low, self.out, self.kernel, strict=True)
        )
        return high, wide

    def _inside(self) -> tuple[slice, ...]:
        keep = (slice(low, low + size) for low, size in zip(self.low, self.shape[2:], strict=True))
        return (slice(None), slice(None), *keep)

    def patches(self, x: Floats) -> Floats:
        """[N,C,H,W] -> [N,C,H',W',kH,kW]"""
        padded = np.zeros((*self.shape[:2], *self._padded_shape()), x.dtype)
        padded[self._inside()] = x
        s = self.stride
        seen = sliding_window_view(padded, self.kernel, axis=(2, 3))[:, :, ::s, ::s]
        return np.asarray(seen[:, :, : self.out[0], : self.out[1]])

    def scatter(self, patches: Floats) -> Floats:
        """The transpose of patches: every tap's share added where it was read."""
        padded = np.zeros((*self.shape[:2], *self._padded_shape()), patches.dtype)
        s, (rows, cols) = self.stride, self.out
        for a in range(self.kernel[0]):
            for b in range(self.kernel[1]):
                padded[:, :, a : a + s * rows : s, b : b + s * cols : s][:, :, :rows, :cols] += patches[..., a, b]
        return np.asarray(padded[self._inside()])


def adapter(quick: bool = False) -> NumpyAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return NumpyAdapter()
