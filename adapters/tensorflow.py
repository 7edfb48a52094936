"""TensorFlow: NHWC, eager unless a case asks for another mode, GradientTape from parameters and tapped activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import keras
import tensorflow as tf

from diffgrad.adapters.base import Adapter, Stopwatch, Tap, Unsupported
from diffgrad.adapters.layout import from_nhwc, to_nhwc
from diffgrad.adapters.registry import mode_of
from diffgrad.adapters.tensorflow_layers import Layers, Padding, symmetric
from diffgrad.adapters.tensorflow_modes import (
    GRAPHS,
    MODES,
    Result,
    Tensors,
    arrays,
    buffers,
    check_place,
    configure,
    settle,
    views,
)
from diffgrad.case import Case
from diffgrad.how import How
from diffgrad.specs import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    AttentionSpec,
    BatchNormOpSpec,
    ConvNeXtDownSpec,
    ConvNeXtHeadSpec,
    ConvNeXtNetSpec,
    ConvNeXtSpec,
    ConvNeXtStemSpec,
    ConvOpSpec,
    DenseOpSpec,
    DropPathOpSpec,
    EncoderSpec,
    FusedSpec,
    HeadSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    LossSpec,
    MobileNetV4Spec,
    PatchEmbedSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
    Spec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.ops import shown
from diffgrad.trace import Arrays, Trace

# Compiled programs that are kept; a case's observed and bare runs follow each other, so old ones are of no more use.
_KEPT = 8


def _on_cpu(case: Case, *but: str) -> bool:
    """Whether a case runs on the CPU, in a mode other than these."""
    return case.how.device == "cpu" and case.how.mode not in but


def _has_depthwise(spec: Spec, fewest: int = 2) -> bool:
    """Whether there is a depthwise convolution of at least so many channels; of one it is a plain convolution."""
    if isinstance(spec, ConvOpSpec):
        return spec.depthwise and spec.ic >= fewest
    return any(t.name.endswith(("qW", "dW")) and t.shape[1] == 1 <= fewest <= t.shape[0] for t in spec.parameters())


def _has_explicit_padding(spec: Spec) -> bool:
    """Whether a convolution is padded by numbers."""
    if isinstance(spec, ConvOpSpec):
        return spec.padding == "symmetric" or (spec.padding == "explicit" and min(spec.pads) >= 0)
    symmetric_stem = isinstance(spec, StemSpec) and spec.padding == "symmetric"
    return symmetric_stem or _has_depthwise(spec, 1) or any(name.endswith("f0cW") for name in spec.kernels())


def _no_nchw(case: Case) -> bool:
    """TensorFlow's own CPU kernels are NHWC; oneDNN's lack float64, and the backward of explicit padding."""
    spec, how = case.block, case.how
    if how.layout != "channels_first" or not spec.kernels() or not _on_cpu(case, "xla"):
        return False
    if case.dtype == "float64" or not how.onednn:
        return True
    return how.mode != "jvp" and how.conv != "layer" and _has_explicit_padding(spec)  # the layers pad beforehand


def _no_grouped(case: Case) -> bool:
    return case.how.conv == "grouped" and _has_depthwise(case.block) and _on_cpu(case, "xla", "jvp")


def _no_fused_norm(case: Case) -> bool:
    has_batch_norm = case.block.fewest_statistics() is not None
    return case.how.norm == "fused" and case.dtype == "float64" and has_batch_norm


class TensorFlowAdapter(Adapter):
    """TensorFlow: eager, graph, XLA, recomputation and forward mode."""

    name = "tensorflow"
    unsupported = (
        Unsupported(_no_nchw, "channels_first: TensorFlow has no kernels for these NCHW convolutions on the CPU"),
        Unsupported(_no_grouped, "conv grouped: TensorFlow has no gradients of grouped convolutions on the CPU"),
        Unsupported(_no_fused_norm, "norm fused: TensorFlow's FusedBatchNormV3 has no float64"),
    )

    def __init__(self) -> None:
        configure()
        self._layers = Layers(How())
        self._graph = lru_cache(maxsize=_KEPT)(self._build)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__}

    def devices(self) -> tuple[str, ...]:
        return tuple(d.name for d in tf.config.list_physical_devices())

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec, how = case.block, case.how
        self._layers = Layers(how)
        with settle(how):
            held = {name: tf.constant(v) for name, v in buffers(spec, how, tensors).items()}
            tangents = to_nhwc(spec, case.tangents()) if how.mode == "jvp" else {}
            seeds = {name: tf.constant(v) for name, v in tangents.items()}
            with Stopwatch() as clock:
                out, sites, got = self._program(case, True)(held, seeds)
                bare = self._program(case, False)(held, seeds) if how.bare else None
            check_place(out, how)
            updates = _stepped(case, tensors, got)
        acts = from_nhwc(spec, arrays(sites | {"out": out}))
        derivatives = from_nhwc(spec, arrays(got))
        if how.mode == "jvp":
            return Trace(acts, {}, {}, tangents=derivatives), clock.seconds
        parameters = {t.name for t in spec.parameters()}
        trace = Trace(
            acts=acts,
            cots={s: g for s, g in derivatives.items() if s not in parameters},
            grads={s: g for s, g in derivatives.items() if s in parameters},
            updates=from_nhwc(spec, updates),
            bare=from_nhwc(spec, arrays({"out": bare[0]} | bare[2])) if bare else {},
        )
        return trace, clock.seconds

    def _program(self, case: Case, exposed: bool) -> Callable[[Tensors, Tensors], Result]:
        """The forward and backward of a case, from the buffers of its tensors."""
        if case.how.mode in GRAPHS:
            return self._graph(case.block, case.dtype, case.how, exposed)
        return partial(self._run, case.block, case.how, exposed)

    def _build(self, spec: Spec, dtype: str, how: How, exposed: bool) -> Callable[[Tensors, Tensors], Result]:
        step = partial(self._run, spec, how, exposed)
        return tf.function(step, autograph=False, jit_compile=how.mode == "xla")  # type: ignore[no-any-return]

    def _run(self, spec: Spec, how: How, exposed: bool, held: Tensors, tangents: Tensors) -> Result:
        t = views(spec, how, held)
        leaves = {name: t[name] for name in spec.differentiated()}
        rest = {name: v for name, v in t.items() if name not in leaves}
        forward = partial(self.block(spec), spec)
        return MODES[mode_of(self.name, how)](forward, leaves, rest, tangents or t["dy"], exposed)

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
            v = tap("qc", self._layers.depthwise(v, t["qW"], pre_stride))
            v = tap("qn", self._layers.bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", tf.nn.relu(v))
        v = tap("ec", self._layers.conv(v, t["eW"]))
        v = tap("en", self._layers.bn(v, t["eg"], t["ebt"]))
        v = tap("er", tf.nn.relu(v))
        if b.post_k:
            v = tap("dc", self._layers.depthwise(v, t["dW"], post_stride))
            v = tap("dn", self._layers.bn(v, t["dg"], t["dbt"]))
            v = tap("dr", tf.nn.relu(v))
        v = tap("pc", self._layers.conv(v, t["pW"]))
        return self._layers.bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> Any:
        """conv 3x3 stride 2, BN, relu."""
        padding = "SAME" if b.padding == "xla_same" else symmetric(3)
        v = tap("sc", self._layers.conv(t["x"], t["sW"], 2, padding))
        return tf.nn.relu(tap("sn", self._layers.bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> Any:
        """The fused stage."""
        v = tap("f0cc", self._layers.conv(t["x"], t["f0cW"], 2, symmetric(b.k)))
        v = tap("f0cn", self._layers.bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", tf.nn.silu(v) if b.act == "swish" else tf.nn.relu(v))
        v = tap("f0pc", self._layers.conv(v, t["f0pW"]))
        return self._layers.bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> Any:
        """The head."""
        v = tap("h1c", self._layers.conv(t["x"], t["h1W"]))
        v = tap("h1n", self._layers.bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", tf.nn.relu(v))
        if b.pool_first:
            v = tap("pool", tf.reduce_mean(v, (1, 2), keepdims=True))
        if b.oc:
            v = tap("hc", self._layers.conv(v, t["hW"]))
            v = tap("hn", self._layers.bn(v, t["hg"], t["hbt"]))
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
        v = tap("d", tf.nn.bias_add(self._layers.depthwise(v, t["dW"], 1), t["db"]))
        v = tap("nl", self._layers.ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", tf.nn.bias_add(self._layers.conv(v, t["exW"]), t["exb"]))
        v = tap("g", tf.nn.gelu(v, approximate=b.act == "gelu_tanh"))
        v = tap("p", tf.nn.bias_add(self._layers.conv(v, t["prW"]), t["prb"]))
        v = tap("ls", v * (t["lsg"] if b.scale == "channel" else tf.transpose(t["lsg"], (1, 2, 0))))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return v + t["x"]

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> Any:
        """Patchify, LN."""
        v = tap("st", tf.nn.bias_add(self._layers.conv(t["x"], t["stW"], b.k), t["stb"]))
        return self._layers.ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> Any:
        """LN, conv 2x2 stride 2."""
        v = tap("dsn", self._layers.ln(t["x"], b.norm, t["dsng"], t["dsnbt"]))
        return tf.nn.bias_add(self._layers.conv(v, t["dsW"], 2), t["dsb"])

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> Any:
        """Pooling, LN, dense."""
        v = tap("pool", tf.reduce_mean(t["x"], (1, 2), keepdims=True))
        v = tap("hn", self._layers.ln(v, b.norm, t["hng"], t["hnbt"]))
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
        v = tap("n1", self._layers.token_ln(tap("xa", tf.identity(t["x"])), t["ln1g"], t["ln1bt"]))
        v = tap("ao", _mhsa(b, v, t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"][:, None, None])
        h = tap("h", v + t["x"])
        v = tap("n2", self._layers.token_ln(tap("hm", tf.identity(h)), t["ln2g"], t["ln2bt"]))
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
        v = tap("pe", tf.cast(self._layers.conv(x, w, b.p), t["x"].dtype) + t["peb"])
        cls = tf.broadcast_to(t["cls"], (b.n, 1, b.d))
        return tap("seq", tf.concat((cls, tf.reshape(v, (b.n, -1, b.d))), 1)) + t["pos"]

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> Any:
        """LN, the cls token, dense."""
        v = tap("fn", self._layers.token_ln(t["x"], t["fng"], t["fnbt"]))
        return tf.matmul(tap("fc", v[:, 0]), t["Wd"]) + t["bd"]

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> Any:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], logits))

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> Any:
        """The smoothed cross entropy alone."""
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t["target"], t["x"]))

    def op_conv(self, b: ConvOpSpec, t: Tensors, tap: Tap) -> Any:
        """One convolution."""
        paddings: dict[str, Padding] = {
            "symmetric": symmetric(b.k),
            "xla_same": "SAME",
            "valid": "VALID",
            "explicit": b.pads,
        }
        convolve = self._layers.depthwise if b.depthwise else self._layers.conv
        v = convolve(t["x"], t["W"], b.stride, paddings[b.padding])
        return tf.nn.bias_add(v, t["b"]) if b.bias else v

    def op_bn(self, b: BatchNormOpSpec, t: Tensors, tap: Tap) -> Any:
        """One batch norm."""
        return self._layers.bn(t["x"], t["g"], t["bt"])

    def op_ln(self, b: LayerNormOpSpec, t: Tensors, tap: Tap) -> Any:
        """One layer norm."""
        return self._layers.token_ln(t["x"], t["g"], t["bt"])

    def op_act(self, b: ActivationOpSpec, t: Tensors, tap: Tap) -> Any:
        """One activation."""
        return ACTIVATIONS[b.act](t["x"])

    def op_dense(self, b: DenseOpSpec, t: Tensors, tap: Tap) -> Any:
        """One dense layer."""
        return tf.matmul(t["x"], t["W"]) + t["b"]

    def op_pool(self, b: PoolOpSpec, t: Tensors, tap: Tap) -> Any:
        """One global average pooling."""
        return tf.reduce_mean(t["x"], (1, 2), keepdims=True)

    def op_scale(self, b: LayerScaleOpSpec, t: Tensors, tap: Tap) -> Any:
        """One layer scale."""
        return t["x"] * (t["g"] if b.scale == "channel" else tf.transpose(t["g"], (1, 2, 0)))

    def op_drop(self, b: DropPathOpSpec, t: Tensors, tap: Tap) -> Any:
        """One drop site."""
        return t["x"] * t["drop"][:, None]

    def op_softmax(self, b: SoftmaxOpSpec, t: Tensors, tap: Tap) -> Any:
        """One softmax."""
        return tf.nn.softmax(tf.where(shown(b.mask), t["x"], t["x"].dtype.as_numpy_dtype("-inf")) if b.mask else t["x"])

    def op_sdpa(self, b: AttentionCoreOpSpec, t: Tensors, tap: Tap) -> Any:
        """One attention core."""
        q, k, v = (tf.reshape(t[s], (b.n, b.t, b.heads, b.head_dim)) for s in ("x", "k", "v"))
        mask = tf.constant([[shown(b.mask)]]) if b.mask else None
        return tf.reshape(keras.ops.dot_product_attention(q, k, v, mask=mask), t["x"].shape)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "swish": tf.nn.silu,
    "gelu_tanh": partial(tf.nn.gelu, approximate=True),
    "gelu_erf": partial(tf.nn.gelu, approximate=False),
}
"""Activation by name."""


def _stepped(case: Case, tensors: Arrays, gradients: Tensors) -> Arrays:
    """Every parameter after a plain SGD step, where the case asks for one."""
    if not case.lr:
        return {}
    start = to_nhwc(case.block, {t.name: tensors[t.name] for t in case.block.parameters() if t.name in gradients})
    stepped = {name: tf.Variable(v) for name, v in start.items()}
    if stepped:
        optimizer = tf.keras.optimizers.SGD(learning_rate=case.lr)
        optimizer.apply_gradients([(gradients[name], theta) for name, theta in stepped.items()])
    return {name: theta.numpy() for name, theta in stepped.items()}


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


def adapter(quick: bool = False) -> TensorFlowAdapter:
    """The adapter of this file; XLA is asked for its defaults always, so ``quick`` changes nothing."""
    return TensorFlowAdapter()
