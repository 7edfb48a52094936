"""TensorFlow: NHWC, eager, GradientTape with respect to parameters and tapped activations."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.adapters.layout import from_nhwc, to_nhwc
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
from diffgrad.trace import Arrays, Trace

Tensors = dict[str, Any]


class TensorFlowAdapter(Adapter):
    """TensorFlow eager on CPU."""

    name = "tensorflow"
    mode = "eager"

    def __init__(self) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__}

    def devices(self) -> tuple[str, ...]:
        return tuple(d.name for d in tf.config.list_physical_devices())

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        t = {name: tf.constant(v) for name, v in to_nhwc(spec, tensors).items()}
        leaves = {name: t[name] for name in spec.differentiated()}
        sites: Tensors = {}

        def tap(site: str, v: Any) -> Any:
            sites[site] = v
            return v

        with Stopwatch() as clock:
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                out = self.block(spec)(spec, t, tap)
            wanted = {**sites, **leaves}
            got = tape.gradient(out, wanted, output_gradients=t["dy"])
        cots = {name: g.numpy() for name, g in got.items() if g is not None}
        x = spec.input().name
        stepped = {s: tf.Variable(t[s]) for s in cots if s in leaves and s != x} if case.lr else {}
        if stepped:
            optimizer = tf.keras.optimizers.SGD(learning_rate=case.lr)
            optimizer.apply_gradients([(got[s], theta) for s, theta in stepped.items()])
        return (
            Trace(
                acts=from_nhwc(spec, {s: v.numpy() for s, v in sites.items()} | {"out": np.asarray(out)}),
                cots=from_nhwc(spec, {s: g for s, g in cots.items() if s in sites or s == x}),
                grads=from_nhwc(spec, {s: g for s, g in cots.items() if s in leaves and s != x}),
                updates=from_nhwc(spec, {s: theta.numpy() for s, theta in stepped.items()}),
            ),
            clock.seconds,
        )

    def uib(self, b: UibSpec, t: Tensors, tap: Tap) -> Any:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", tf.identity(t["x"]))
        v = tap("pn", self._uib_body(b, v, t, tap, 1, 1))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return v + t["x"]

    def uib_s2(self, b: UibStridedSpec, t: Tensors, tap: Tap) -> Any:
        """Universal inverted bottleneck, stride 2, no skip."""
        pre, post = (1, 2) if b.carrier == "post" else (2, 1)
        return self._uib_body(b, t["x"], t, tap, pre, post)

    def _uib_body(
        self, b: UibSpec | UibStridedSpec, v: Any, t: Tensors, tap: Tap, pre_stride: int, post_stride: int
    ) -> Any:
        if b.pre_k:
            v = tap("qc", _depthwise(v, t["qW"], pre_stride))
            v = tap("qn", _bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", tf.nn.relu(v))
        v = tap("ec", tf.nn.conv2d(v, t["eW"], 1, "VALID"))
        v = tap("en", _bn(v, t["eg"], t["ebt"]))
        v = tap("er", tf.nn.relu(v))
        if b.post_k:
            v = tap("dc", _depthwise(v, t["dW"], post_stride))
            v = tap("dn", _bn(v, t["dg"], t["dbt"]))
            v = tap("dr", tf.nn.relu(v))
        v = tap("pc", tf.nn.conv2d(v, t["pW"], 1, "VALID"))
        return _bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> Any:
        """conv 3x3 stride 2, BN, relu."""
        padding = "SAME" if b.padding == "xla_same" else _symmetric(3)
        v = tap("sc", tf.nn.conv2d(t["x"], t["sW"], 2, padding))
        return tf.nn.relu(tap("sn", _bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> Any:
        """The fused stage."""
        v = tap("f0cc", tf.nn.conv2d(t["x"], t["f0cW"], 2, _symmetric(b.k)))
        v = tap("f0cn", _bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", tf.nn.silu(v) if b.act == "swish" else tf.nn.relu(v))
        v = tap("f0pc", tf.nn.conv2d(v, t["f0pW"], 1, "VALID"))
        return _bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> Any:
        """The head."""
        v = tap("h1c", tf.nn.conv2d(t["x"], t["h1W"], 1, "VALID"))
        v = tap("h1n", _bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", tf.nn.relu(v))
        if b.pool_first:
            v = tap("pool", tf.reduce_mean(v, (1, 2), keepdims=True))
        if b.oc:
            v = tap("hc", tf.nn.conv2d(v, t["hW"], 1, "VALID"))
            v = tap("hn", _bn(v, t["hg"], t["hbt"]))
            v = tap("hr", tf.nn.relu(v))
        if not b.pool_first:
            v = tap("pool", tf.reduce_mean(v, (1, 2), keepdims=True))
        return tf.matmul(tap("flat", tf.squeeze(v, (1, 2))), t["Wd"]) + t["bd"]

    def mobilenetv4(self, b: MobileNetV4Spec, t: Tensors, tap: Tap) -> Any:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], logits))

    def convnext(self, b: ConvNeXtSpec, t: Tensors, tap: Tap) -> Any:
        """ConvNeXt block."""
        v = tap("xb", tf.identity(t["x"]))
        v = tap("d", tf.nn.bias_add(_depthwise(v, t["dW"], 1), t["db"]))
        v = tap("nl", _ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", tf.nn.bias_add(tf.nn.conv2d(v, t["exW"], 1, "VALID"), t["exb"]))
        v = tap("g", tf.nn.gelu(v, approximate=b.act == "gelu_tanh"))
        v = tap("p", tf.nn.bias_add(tf.nn.conv2d(v, t["prW"], 1, "VALID"), t["prb"]))
        v = tap("ls", v * (t["lsg"] if b.scale == "channel" else tf.transpose(t["lsg"], (1, 2, 0))))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return v + t["x"]

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> Any:
        """Patchify, LN."""
        v = tap("st", tf.nn.bias_add(tf.nn.conv2d(t["x"], t["stW"], b.k, "VALID"), t["stb"]))
        return _ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> Any:
        """LN, conv 2x2 stride 2."""
        v = tap("dsn", _ln(t["x"], b.norm, t["dsng"], t["dsnbt"]))
        return tf.nn.bias_add(tf.nn.conv2d(v, t["dsW"], 2, "VALID"), t["dsb"])

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> Any:
        """Pooling, LN, dense."""
        v = tap("pool", tf.reduce_mean(t["x"], (1, 2), keepdims=True))
        v = tap("hn", _ln(v, b.norm, t["hng"], t["hnbt"]))
        return tf.matmul(tap("flat", tf.squeeze(v, (1, 2))), t["Wd"]) + t["bd"]

    def convnext_net(self, b: ConvNeXtNetSpec, t: Tensors, tap: Tap) -> Any:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], logits))

    def attention(self, b: AttentionSpec, t: Tensors, tap: Tap) -> Any:
        """Multi-head self-attention."""
        return _mhsa(b, t["x"], t, tap)

    def encoder(self, b: EncoderSpec, t: Tensors, tap: Tap) -> Any:
        """Encoder block."""
        v = tap("n1", _token_ln(tap("xa", tf.identity(t["x"])), t["ln1g"], t["ln1bt"]))
        v = tap("ao", _mhsa(b, v, t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"][:, None, None])
        h = tap("h", v + t["x"])
        v = tap("n2", _token_ln(tap("hm", tf.identity(h)), t["ln2g"], t["ln2bt"]))
        v = tap("g", tf.nn.gelu(tap("f1", _linear(v, t["Wfc1"], t["bfc1"], b.bf16)), approximate=True))
        v = tap("f2", _linear(v, t["Wfc2"], t["bfc2"], b.bf16))
        if b.drop_m:
            v = tap("md", v * t["drop_m"][:, None, None])
        return v + h

    def tower(self, b: TowerSpec, t: Tensors, tap: Tap) -> Any:
        """Encoder blocks in series."""
        return self.run_blocks(b.blocks(), (*b.boundaries(), "out"), t, tap)

    def patch_embed(self, b: PatchEmbedSpec, t: Tensors, tap: Tap) -> Any:
        """Patchify, cls in front, positions."""
        x, w = t["x"], t["peW"]
        if b.bf16 and b.bf16_conv:
            x, w = tf.cast(x, tf.bfloat16), tf.cast(w, tf.bfloat16)
        v = tap("pe", tf.cast(tf.nn.conv2d(x, w, b.p, "VALID"), t["x"].dtype) + t["peb"])
        cls = tf.broadcast_to(t["cls"], (b.n, 1, b.d))
        return tap("seq", tf.concat((cls, tf.reshape(v, (b.n, -1, b.d))), 1)) + t["pos"]

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> Any:
        """LN, the cls token, dense."""
        v = tap("fn", _token_ln(t["x"], t["fng"], t["fnbt"]))
        return tf.matmul(tap("fc", v[:, 0]), t["Wd"]) + t["bd"]

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> Any:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], logits))

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> Any:
        """The smoothed cross entropy alone."""
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], t["x"]))


def _mhsa(b: AttentionSpec | EncoderSpec, v: Any, t: Tensors, tap: Tap) -> Any:
    slabs = (*v.shape[:2], b.heads, b.head_dim)
    q, k, u = (tf.reshape(tap(s, _linear(v, t[f"W{s}"], t[f"b{s}"], b.bf16)), slabs) for s in "qkv")
    if b.core == "composed":
        q, k, u = (tf.transpose(x, (0, 2, 1, 3)) for x in (q, k, u))
        s = tap("attnS", _matmul(q, k, b.bf16, transpose_b=True) / b.head_dim**0.5)
        o = tf.transpose(_matmul(tap("attnP", tf.nn.softmax(s)), u, b.bf16), (0, 2, 1, 3))
    else:
        if b.bf16:
            q, k, u = (tf.cast(x, tf.bfloat16) for x in (q, k, u))
        o = tf.cast(keras.ops.dot_product_attention(q, k, u), v.dtype)
    return _linear(tap("o", tf.reshape(o, v.shape)), t["Wo"], t["bo"], b.bf16)


def _matmul(a: Any, b: Any, bf16: bool, transpose_b: bool = False) -> Any:
    if not bf16:
        return tf.matmul(a, b, transpose_b=transpose_b)
    low = (tf.cast(v, tf.bfloat16) for v in (a, b))
    return tf.cast(tf.matmul(*low, transpose_b=transpose_b), a.dtype)


def _linear(x: Any, w: Any, b: Any, bf16: bool) -> Any:
    return _matmul(x, w, bf16) + b


def _token_ln(x: Any, g: Any, b: Any) -> Any:
    """Layer norm of every token, gamma and beta per number or one of each."""
    return _ln(x, "token", g, b)


def _ln(x: Any, norm: str, g: Any, b: Any) -> Any:
    """Layer norm over the channels, or over the whole map with one gamma and beta."""
    mean, variance = tf.nn.moments(x, (1, 2, 3) if norm == "scalar" else (-1,), keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def _symmetric(k: int) -> list[list[int]]:
    return [[0, 0], [k // 2, k // 2], [k // 2, k // 2], [0, 0]]


def _depthwise(x: Any, w: Any, stride: int) -> Any:
    """[kH,kW,1,C] -> TensorFlow's [kH,kW,C,1], symmetric padding."""
    kernel = tf.transpose(w, (0, 1, 3, 2))
    return tf.nn.depthwise_conv2d(x, kernel, (1, stride, stride, 1), _symmetric(w.shape[0]))


def _bn(x: Any, g: Any, b: Any) -> Any:
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def adapter(quick: bool = False) -> TensorFlowAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return TensorFlowAdapter()
