"""JAX: NHWC, jit, one compiled program per block spec and dtype; cotangents by zero taps that are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    Spec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.trace import Arrays, Trace

Tensors = dict[str, jax.Array]

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


class JaxAdapter(Adapter):
    """jax.jit on CPU. ``quick`` compiles with few optimisations, to explore many shapes."""

    name = "jax"
    mode = "jit"

    def __init__(self, quick: bool = False) -> None:
        jax.config.update("jax_enable_x64", True)
        self._options = FAITHFUL | (QUICK_COMPILE if quick else SPARE_MEMORY)
        self._program = lru_cache(maxsize=64)(self._compile)

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "jaxlib": version("jaxlib")}

    def devices(self) -> tuple[str, ...]:
        return tuple(str(d) for d in jax.devices())

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        t = to_nhwc(spec, tensors)
        with Stopwatch() as clock:
            program, sites = self._program(spec, case.dtype)
            taps = {s: np.zeros(shape, case.dtype) for s, shape in sites.items()}
            out, acts, grads, cots = jax.tree.map(np.asarray, program(t, taps))
            stepped = {k: t[k] for k in grads if k != spec.input().name} if case.lr else {}
            updates = {k: np.asarray(jnp.asarray(v) - case.lr * jnp.asarray(grads[k])) for k, v in stepped.items()}
        x = spec.input().name
        return (
            Trace(
                acts=from_nhwc(spec, acts | {"out": out}),
                cots=from_nhwc(spec, cots | {k: v for k, v in grads.items() if k == x}),
                grads=from_nhwc(spec, {k: v for k, v in grads.items() if k != x}),
                updates=from_nhwc(spec, updates),
            ),
            clock.seconds,
        )

    def _compile(self, spec: Spec, dtype: str) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
        """The compiled forward-and-backward program, and the shape of every tapped site."""
        wanted = spec.differentiated()
        forward = self.block(spec)

        def observed(leaves: Tensors, taps: Tensors, rest: Tensors) -> tuple[jax.Array, Tensors]:
            acts: Tensors = {}

            def tap(site: str, v: jax.Array) -> jax.Array:
                acts[site] = v + taps[site] if site in taps else v
                return acts[site]

            return forward(spec, leaves | rest, tap), acts

        def step(t: Tensors, taps: Tensors) -> tuple[jax.Array, Tensors, Tensors, Tensors]:
            leaves = {k: t[k] for k in wanted}
            rest = {k: v for k, v in t.items() if k not in leaves and k != "dy"}
            out, pull, acts = jax.vjp(lambda p, z: observed(p, z, rest), leaves, taps, has_aux=True)
            grads, cots = pull(t["dy"])
            return out, acts, grads, cots

        shapes = to_nhwc(spec, {s.name: np.broadcast_to(np.zeros((), dtype), s.shape) for s in spec.tensors()})
        shaped = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in shapes.items()}
        _, acts = jax.eval_shape(lambda t: observed(t, {}, {}), shaped)
        taps = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in acts.items()}
        program = jax.jit(step).lower(shaped, taps).compile(compiler_options=cast(Any, self._options))
        return program, {k: v.shape for k, v in taps.items()}

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
            v = tap("qc", _conv(v, t["qW"], pre_stride, groups=v.shape[3]))
            v = tap("qn", _bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", jax.nn.relu(v))
        v = tap("ec", _conv(v, t["eW"]))
        v = tap("en", _bn(v, t["eg"], t["ebt"]))
        v = tap("er", jax.nn.relu(v))
        if b.post_k:
            v = tap("dc", _conv(v, t["dW"], post_stride, groups=b.mid))
            v = tap("dn", _bn(v, t["dg"], t["dbt"]))
            v = tap("dr", jax.nn.relu(v))
        v = tap("pc", _conv(v, t["pW"]))
        return _bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> jax.Array:
        """conv 3x3 stride 2, BN, relu."""
        v = tap("sc", _conv(t["x"], t["sW"], 2, "SAME" if b.padding == "xla_same" else None))
        return jax.nn.relu(tap("sn", _bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The fused stage."""
        v = tap("f0cc", _conv(t["x"], t["f0cW"], 2))
        v = tap("f0cn", _bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", jax.nn.silu(v) if b.act == "swish" else jax.nn.relu(v))
        v = tap("f0pc", _conv(v, t["f0pW"]))
        return _bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The head."""
        v = tap("h1c", _conv(t["x"], t["h1W"]))
        v = tap("h1n", _bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", jax.nn.relu(v))
        if b.pool_first:
            v = tap("pool", jnp.mean(v, (1, 2), keepdims=True))
        if b.oc:
            v = tap("hc", _conv(v, t["hW"]))
            v = tap("hn", _bn(v, t["hg"], t["hbt"]))
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
        v = tap("d", _conv(v, t["dW"], groups=b.c) + t["db"])
        v = tap("nl", _ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", _conv(v, t["exW"]) + t["exb"])
        v = tap("g", jax.nn.gelu(v, approximate=b.act == "gelu_tanh"))
        v = tap("p", _conv(v, t["prW"]) + t["prb"])
        v = tap("ls", v * (t["lsg"] if b.scale == "channel" else jnp.transpose(t["lsg"], (1, 2, 0))))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return jnp.add(v, t["x"])

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Patchify, LN."""
        v = tap("st", _conv(t["x"], t["stW"], b.k, "VALID") + t["stb"])
        return _ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> jax.Array:
        """LN, conv 2x2 stride 2."""
        v = tap("dsn", _ln(t["x"], b.norm, t["dsng"], t["dsnbt"]))
        return _conv(v, t["dsW"], 2, "VALID") + t["dsb"]

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """Pooling, LN, dense."""
        v = tap("pool", jnp.mean(t["x"], (1, 2), keepdims=True))
        v = tap("hn", _ln(v, b.norm, t["hng"], t["hnbt"]))
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
        v = tap("n1", _token_ln(tap("xa", t["x"]), t["ln1g"], t["ln1bt"]))
        v = tap("ao", _mhsa(b, v, t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"][:, None, None])
        h = tap("h", jnp.add(v, t["x"]))
        v = tap("n2", _token_ln(tap("hm", h), t["ln2g"], t["ln2bt"]))
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
        v = tap("pe", _conv(x, w, b.p, "VALID").astype(t["x"].dtype) + t["peb"])
        cls = jnp.broadcast_to(t["cls"], (b.n, 1, b.d))
        return cast(jax.Array, tap("seq", jnp.concatenate((cls, v.reshape(b.n, -1, b.d)), 1)) + t["pos"])

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> jax.Array:
        """LN, the cls token, dense."""
        v = tap("fn", _token_ln(t["x"], t["fng"], t["fnbt"]))
        return jnp.dot(tap("fc", v[:, 0]), t["Wd"]) + t["bd"]

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return -jnp.sum(t["target"] * jax.nn.log_softmax(logits)) / b.n

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> jax.Array:
        """The smoothed cross entropy alone."""
        return -jnp.sum(t["target"] * jax.nn.log_softmax(t["x"])) / b.n


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


def _token_ln(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
    """Layer norm of every token, gamma and beta per number or one of each."""
    return _ln(x, "token", g, b)


def _ln(x: jax.Array, norm: str, g: jax.Array, b: jax.Array) -> jax.Array:
    """Layer norm over the channels, or over the whole map with one gamma and beta."""
    axes = (1, 2, 3) if norm == "scalar" else (-1,)
    mean = jnp.mean(x, axes, keepdims=True)
    var = jnp.var(x, axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + EPS) * g + b


def _conv(x: jax.Array, w: jax.Array, stride: int = 1, padding: str | None = None, groups: int = 1) -> jax.Array:
    """NHWC, HWIO; symmetric padding unless another is named."""
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        padding or [(k // 2, k // 2) for k in w.shape[:2]],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _bn(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
    mean = jnp.mean(x, (0, 1, 2))
    var = jnp.var(x, (0, 1, 2))
    return (x - mean) * lax.rsqrt(var + EPS) * g + b


def adapter(quick: bool = False) -> JaxAdapter:
    """The adapter of this file."""
    return JaxAdapter(quick)
