"""JAX: NHWC; cotangents by zero taps that are differentiated; one program per block spec, dtype and conditions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.adapters.jax_layers import BATCH_AXES, ConvArgs, Padding, conv_of, norm_of
from diffgrad.adapters.jax_modes import (
    PLATFORMS,
    Seen,
    Tensors,
    buffers_of,
    fetch,
    observed,
    on_device,
    program_conditions,
    shaped,
    step_of,
)
from diffgrad.adapters.layout import from_nhwc, to_nhwc
from diffgrad.case import Case, numpy_dtype
from diffgrad.how import PLAIN, How
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

Program = tuple[Callable[..., Seen], dict[str, tuple[int, ...]]]
"""What runs a case's buffers, and the shape of every tapped site."""

# One fifth of the default compile time; results are confirmed with the defaults before anything is reported.
QUICK_COMPILE: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


# Otherwise XLA may leave out a rounding to bfloat16 in one consumer of a site and keep it in what is recorded.
FAITHFUL: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}

# A whole net's expanded depthwise kernels need gigabytes unless they are made when they are used.
SPARE_MEMORY: dict[str, bool | int | str] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
if jax.__version_info__ < (0, 9, 1):
    SPARE_MEMORY = {}  # older releases refuse the option


class JaxAdapter(Adapter):
    """jax.jit, unless a case names another mode. ``quick`` compiles with few optimisations, to explore many shapes."""

    name = "jax"

    def __init__(self, quick: bool = False) -> None:
        jax.config.update("jax_enable_x64", True)
        self._options = {"cpu": FAITHFUL | (QUICK_COMPILE if quick else SPARE_MEMORY), "cuda": FAITHFUL}
        self._program = lru_cache(maxsize=64)(self._build)
        self._how = PLAIN

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "jaxlib": version("jaxlib")}

    def devices(self) -> tuple[str, ...]:
        return tuple(str(d) for d in jax.devices())

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec, how = case.block, program_conditions(case.how)
        x = spec.input().name
        t = to_nhwc(spec, tensors)
        buffers = buffers_of(spec, how, t)
        moving = to_nhwc(spec, case.tangents()) if how.mode == "jvp" else None
        self._how = how
        with self._conditions(how), Stopwatch() as clock:
            program, sites = self._program(spec, case.dtype, how)
            zeros = {s: np.zeros(shape, numpy_dtype(case.dtype)) for s, shape in sites.items()}
            seen = fetch(program(buffers, zeros if moving is None else moving), how)
            bare = fetch(self._program(spec, case.dtype, how, True)[0](buffers, {}), how) if case.how.bare else None
            stepped = {k: t[k] for k in seen.grads if k != x} if case.lr else {}
            updates = {k: np.asarray(jnp.asarray(v) - case.lr * jnp.asarray(seen.grads[k])) for k, v in stepped.items()}
        return (
            Trace(
                acts=from_nhwc(spec, seen.acts | {"out": seen.out}),
                cots=from_nhwc(spec, seen.cots | {k: v for k, v in seen.grads.items() if k == x}),
                grads=from_nhwc(spec, {k: v for k, v in seen.grads.items() if k != x}),
                updates=from_nhwc(spec, updates),
                tangents=from_nhwc(spec, seen.tangents),
                bare={} if bare is None else from_nhwc(spec, bare.grads | {"out": bare.out}),
            ),
            clock.seconds,
        )

    @contextlib.contextmanager
    def _conditions(self, how: How) -> Iterator[None]:
        """The device, and on CUDA the precision of products."""
        platform = PLATFORMS[how.device]
        try:
            device = jax.devices(platform)[0]
        except RuntimeError as e:
            raise RuntimeError(f"how.device = {how.device}: JAX sees no such device: {e}") from e
        # A CPU has one precision of products only.
        precision = None if how.device == "cpu" else "tensorfloat32" if how.tf32 else "float32"
        with jax.default_device(device), jax.default_matmul_precision(precision):
            yield

    def _build(self, spec: Spec, dtype: str, how: How, bare: bool = False) -> Program:
        """The forward-and-derivative program, compiled unless the mode is eager, and the shape of every tapped site."""
        forward = partial(self.block(spec), spec)
        zero = np.zeros((), numpy_dtype(dtype))
        like = to_nhwc(spec, {s.name: np.broadcast_to(zero, s.shape) for s in spec.tensors()})
        step = step_of(spec, how, bare, forward, {k: v.shape for k, v in like.items()})
        sites: Tensors = {}
        if not bare and how.mode != "jvp":
            _, sites = jax.eval_shape(lambda t: observed(forward, {})(t, {}), shaped(like))
        shapes = {k: v.shape for k, v in sites.items()}
        if how.mode == "eager":
            return (lambda buffers, taps: step(*on_device(buffers, taps))), shapes
        taps = {k: like[k] for k in spec.differentiated()} if how.mode == "jvp" else sites
        lowered = jax.jit(step).lower(*map(shaped, (buffers_of(spec, how, like), taps)))
        return lowered.compile(compiler_options=cast(Any, self._options[how.device])), shapes

    def _conv(
        self, x: jax.Array, w: jax.Array, stride: int = 1, padding: Padding | None = None, groups: int = 1
    ) -> jax.Array:
        """NHWC, HWIO; symmetric padding unless another is named."""
        top, left = (k // 2 for k in w.shape[:2])
        return conv_of(self._how)(x, w, ConvArgs(stride, padding or ((top, top), (left, left)), groups))

    def _bn(self, x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
        return norm_of(self._how)(x, BATCH_AXES, g, b)

    def _ln(self, x: jax.Array, norm: str, g: jax.Array, b: jax.Array) -> jax.Array:
        """Layer norm over the channels, or over the whole map with one gamma and beta."""
        return norm_of(self._how)(x, (1, 2, 3) if norm == "scalar" else (-1,), g, b)

    def _token_ln(self, x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
        """Layer norm of every token, gamma and beta per number or one of each."""
        return self._ln(x, "token", g, b)

    def uib(self, b: UibSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", t["x"])
        v = tap("pn", self._uib_body(b, v, t, tap, 1, 1))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return jnp.add(v, t["x"])

    def uib_s2(self, b: UibStridedSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Universal inverted bottleneck, stride 2, no skip."""
        pre, post = (1, 2) if b.carrier == "post" else (2, 1)
        return self._uib_body(b, t["x"], t, tap, pre, post)

    def _uib_body(
        self, b: UibSpec | UibStridedSpec, v: jax.Array, t: Tensors, tap: Tap, pre_stride: int, post_stride: int
    ) -> jax.Array:
        if b.pre_k:
            v = tap("qc", self._conv(v, t["qW"], pre_stride, groups=v.shape[3]))
            v = tap("qn", self._bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", jax.nn.relu(v))
        v = tap("ec", self._conv(v, t["eW"]))
        v = tap("en", self._bn(v, t["eg"], t["ebt"]))
        v = tap("er", jax.nn.relu(v))
        if b.post_k:
            v = tap("dc", self._conv(v, t["dW"], post_stride, groups=b.mid))
            v = tap("dn", self._bn(v, t["dg"], t["dbt"]))
            v = tap("dr", jax.nn.relu(v))
        v = tap("pc", self._conv(v, t["pW"]))
        return self._bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> jax.Array:
        """conv 3x3 stride 2, BN, relu."""
        v = tap("sc", self._conv(t["x"], t["sW"], 2, "SAME" if b.padding == "xla_same" else None))
        return jax.nn.relu(tap("sn", self._bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The fused stage."""
        v = tap("f0cc", self._conv(t["x"], t["f0cW"], 2))
        v = tap("f0cn", self._bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", jax.nn.silu(v) if b.act == "swish" else jax.nn.relu(v))
        v = tap("f0pc", self._conv(v, t["f0pW"]))
        return self._bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The head."""
        v = tap("h1c", self._conv(t["x"], t["h1W"]))
        v = tap("h1n", self._bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", jax.nn.relu(v))
        if b.pool_first:
            v = tap("pool", jnp.mean(v, (1, 2), keepdims=True))
        if b.oc:
            v = tap("hc", self._conv(v, t["hW"]))
            v = tap("hn", self._bn(v, t["hg"], t["hbt"]))
            v = tap("hr", jax.nn.relu(v))
        if not b.pool_first:
            v = tap("pool", jnp.mean(v, (1, 2), keepdims=True))
        return jnp.dot(tap("flat", v.reshape(v.shape[0], -1)), t["Wd"]) + t["bd"]

    def mobilenetv4(self, b: MobileNetV4Spec, t: Tensors, tap: Tap) -> jax.Array:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return -jnp.sum(t["target"] * jax.nn.log_softmax(logits)) / b.n

    def convnext(self, b: ConvNeXtSpec, t: Tensors, tap: Tap) -> jax.Array:
        """ConvNeXt block."""
        v = tap("xb", t["x"])
        v = tap("d", self._conv(v, t["dW"], groups=b.c) + t["db"])
        v = tap("nl", self._ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", self._conv(v, t["exW"]) + t["exb"])
        v = tap("g", jax.nn.gelu(v, approximate=b.act == "gelu_tanh"))
        v = tap("p", self._conv(v, t["prW"]) + t["prb"])
        v = tap("ls", _scale(v, t["lsg"], b.scale))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return jnp.add(v, t["x"])

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Patchify, LN."""
        v = tap("st", self._conv(t["x"], t["stW"], b.k, "VALID") + t["stb"])
        return self._ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> jax.Array:
        """LN, conv 2x2 stride 2."""
        v = tap("dsn", self._ln(t["x"], b.norm, t["dsng"], t["dsnbt"]))
        return self._conv(v, t["dsW"], 2, "VALID") + t["dsb"]

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Pooling, LN, dense."""
        v = tap("pool", jnp.mean(t["x"], (1, 2), keepdims=True))
        v = tap("hn", self._ln(v, b.norm, t["hng"], t["hnbt"]))
        return jnp.dot(tap("flat", v.reshape(v.shape[0], -1)), t["Wd"]) + t["bd"]

    def convnext_net(self, b: ConvNeXtNetSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return -jnp.sum(t["target"] * jax.nn.log_softmax(logits)) / b.n

    def attention(self, b: AttentionSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Multi-head self-attention."""
        return _mhsa(b, t["x"], t, tap)

    def encoder(self, b: EncoderSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Encoder block."""
        v = tap("n1", self._token_ln(tap("xa", t["x"]), t["ln1g"], t["ln1bt"]))
        v = tap("ao", _mhsa(b, v, t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"][:, None, None])
        h = tap("h", jnp.add(v, t["x"]))
        v = tap("n2", self._token_ln(tap("hm", h), t["ln2g"], t["ln2bt"]))
        v = tap("g", jax.nn.gelu(tap("f1", _linear(v, t["Wfc1"], t["bfc1"], b.bf16)), approximate=True))
        v = tap("f2", _linear(v, t["Wfc2"], t["bfc2"], b.bf16))
        if b.drop_m:
            v = tap("md", v * t["drop_m"][:, None, None])
        return jnp.add(v, h)

    def tower(self, b: TowerSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Encoder blocks in series."""
        return cast(jax.Array, self.run_blocks(b.blocks(), (*b.boundaries(), "out"), t, tap))

    def patch_embed(self, b: PatchEmbedSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Patchify, cls in front, positions."""
        x, w = t["x"], t["peW"]
        if b.bf16 and b.bf16_conv:
            x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        v = tap("pe", self._conv(x, w, b.p, "VALID").astype(t["x"].dtype) + t["peb"])
        cls = jnp.broadcast_to(t["cls"], (b.n, 1, b.d))
        return cast(jax.Array, tap("seq", jnp.concatenate((cls, v.reshape(b.n, -1, b.d)), 1)) + t["pos"])

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """LN, the cls token, dense."""
        v = tap("fn", self._token_ln(t["x"], t["fng"], t["fnbt"]))
        return jnp.dot(tap("fc", v[:, 0]), t["Wd"]) + t["bd"]

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return -jnp.sum(t["target"] * jax.nn.log_softmax(logits)) / b.n

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The smoothed cross entropy alone."""
        return -jnp.sum(t["target"] * jax.nn.log_softmax(t["x"])) / b.n

    def op_conv(self, b: ConvOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One convolution."""
        top, bottom, left, right = b.pads
        pads: dict[str, Padding] = {"xla_same": "SAME", "valid": "VALID", "explicit": ((top, bottom), (left, right))}
        v = self._conv(t["x"], t["W"], b.stride, pads.get(b.padding), b.ic if b.depthwise else 1)
        return v + t["b"] if b.bias else v

    def op_bn(self, b: BatchNormOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One batch norm."""
        return self._bn(t["x"], t["g"], t["bt"])

    def op_ln(self, b: LayerNormOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One layer norm of tokens."""
        return self._token_ln(t["x"], t["g"], t["bt"])

    def op_act(self, b: ActivationOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One activation."""
        return _ACTIVATIONS[b.act](t["x"])

    def op_dense(self, b: DenseOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One dense layer."""
        return jnp.dot(t["x"], t["W"]) + t["b"]

    def op_pool(self, b: PoolOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One global average pooling."""
        return jnp.mean(t["x"], (1, 2), keepdims=True)

    def op_scale(self, b: LayerScaleOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One layer scale."""
        return _scale(t["x"], t["g"], b.scale)

    def op_drop(self, b: DropPathOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One stochastic-depth site."""
        return t["x"] * t["drop"][:, None]

    def op_softmax(self, b: SoftmaxOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One softmax of rows."""
        return jax.nn.softmax(jnp.where(jnp.array(shown(b.mask)), t["x"], -jnp.inf) if b.mask else t["x"])

    def op_sdpa(self, b: AttentionCoreOpSpec, t: Tensors, tap: Tap) -> jax.Array:
        """One attention core."""
        q, k, v = (t[s].reshape(b.n, b.t, b.heads, b.head_dim) for s in "xkv")
        mask = jnp.array([[shown(b.mask)]]) if b.mask else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(t["x"].shape)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "swish": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
}


def _scale(v: jax.Array, g: jax.Array, scale: str) -> jax.Array:
    """Layer scale, gamma per channel or per element [C,H,W]."""
    return v * (g if scale == "channel" else jnp.transpose(g, (1, 2, 0)))


def _mhsa(b: AttentionSpec | EncoderSpec, v: jax.Array, t: Tensors, tap: Tap) -> jax.Array:
    slabs = (*v.shape[:2], b.heads, b.head_dim)
    q, k, u = (tap(s, _linear(v, t[f"W{s}"], t[f"b{s}"], b.bf16)).reshape(slabs) for s in "qkv")
    if b.core == "composed":
        s = tap("attnS", _einsum("nthd,nuhd->nhtu", q, k, b.bf16) / b.head_dim**0.5)
        o = _einsum("nhtu,nuhd->nthd", tap("attnP", jax.nn.softmax(s)), u, b.bf16)
    elif b.bf16:
        q, k, u = (x.astype(jnp.bfloat16) for x in (q, k, u))
        o = jax.nn.dot_product_attention(q, k, u).astype(v.dtype)
    else:
        o = jax.nn.dot_product_attention(q, k, u)
    return _linear(tap("o", o.reshape(v.shape)), t["Wo"], t["bo"], b.bf16)


def _einsum(form: str, a: jax.Array, b: jax.Array, bf16: bool) -> jax.Array:
    """With the flag: bfloat16 operands, sums and result in float32."""
    if not bf16:
        return jnp.einsum(form, a, b)
    return jnp.einsum(form, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=a.dtype)


def _linear(x: jax.Array, w: jax.Array, b: jax.Array, bf16: bool) -> jax.Array:
    return _einsum("nti,io->nto", x, w, bf16) + b


def adapter(quick: bool = False) -> JaxAdapter:
    """The adapter of this file."""
    return JaxAdapter(quick)
