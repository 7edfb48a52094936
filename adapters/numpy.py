"""NumPy: the same-precision reference, a small reverse-mode tape of its own. Also the fastest way to test the checker.

Every operation rounds in the case's dtype, as a plain framework would; in a 16-bit one it sums in float32. The planted
faults of ``diffgrad mutants`` are subclasses of this adapter.
"""

from __future__ import annotations

import numpy as np

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.adapters.numpy_ops import Primitives
from diffgrad.adapters.numpy_tape import Floats, Var, backward, leaf
from diffgrad.case import Case
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
from diffgrad.trace import Arrays, Trace

__all__ = ["AnyUib", "Floats", "NumpyAdapter", "Var", "adapter", "backward"]

AnyUib = UibSpec | UibStridedSpec


class NumpyAdapter(Primitives, Adapter):
    """NumPy in the case's dtype."""

    name = "numpy"

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        with Stopwatch() as clock, np.errstate(all="ignore"):
            t, sites, out = self.tape(spec, tensors)
            own = [p.name for p in spec.parameters()]
            grads = {s: t[s].delivered(g) for s in own if (g := t[s].cot) is not None}
            x = spec.input().name
            nodes = sites | ({x: t[x]} if x in spec.differentiated() else {})
            trace = Trace(
                acts={s: v.delivered(v.value) for s, v in (sites | {"out": out}).items()},
                cots={s: v.delivered(v.cot) for s, v in nodes.items() if v.cot is not None},
                grads=grads,
                updates={s: self.update(t[s], case.lr) for s in grads} if case.lr else {},
                bare=self.bare(spec, tensors) if case.how.bare else {},
            )
        return trace, clock.seconds

    def tape(self, spec: Spec, tensors: Arrays) -> tuple[dict[str, Var], dict[str, Var], Var]:
        """Forward and backward: the given tensors, the tapped sites and the output, with their cotangents."""
        t = {name: leaf(v) for name, v in tensors.items()}
        sites: dict[str, Var] = {}

        def tap(site: str, v: Var) -> Var:
            sites[site] = v
            return v

        out = self.block(spec)(spec, t, tap)
        backward(out, t["dy"].value)
        return t, sites, out

    def bare(self, spec: Spec, tensors: Arrays) -> Arrays:
        """Once more, with nothing but the ends: there is nothing here that a tap could disturb."""
        t, _, out = self.tape(spec, tensors)
        ends = {s: t[s].delivered(g) for s in spec.differentiated() if (g := t[s].cot) is not None}
        return {"out": out.delivered(out.value), **ends}

    def update(self, theta: Var, lr: float) -> Floats:
        """A parameter after the step along its gradient."""
        return theta.delivered(self.step(theta.value, np.asarray(theta.cot), lr))

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

    def op_conv(self, b: ConvOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A convolution alone."""
        padding = b.pads if b.padding == "explicit" else b.padding
        v = (self.depthwise if b.depthwise else self.conv)(t["x"], t["W"], b.stride, padding)
        return self.bias(v, t["b"]) if b.bias else v

    def op_bn(self, b: BatchNormOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A batch norm alone."""
        return self.bn(t["x"], t["g"], t["bt"])

    def op_ln(self, b: LayerNormOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A layer norm of tokens alone."""
        return self.token_norm(t["x"], t["g"], t["bt"], b.norm)

    def op_act(self, b: ActivationOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """An activation alone."""
        if b.act in ("gelu_tanh", "gelu_erf"):
            return self.gelu(t["x"], b.act)
        plain = {"relu": self.relu, "relu6": self.relu6, "swish": self.swish}
        return plain[b.act](t["x"])

    def op_dense(self, b: DenseOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A dense layer alone."""
        return self.dense(t["x"], t["W"], t["b"])

    def op_pool(self, b: PoolOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A global average pooling alone."""
        return self.gap(t["x"])

    def op_scale(self, b: LayerScaleOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A layer scale alone."""
        return self.layer_scale(t["x"], t["g"])

    def op_drop(self, b: DropPathOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A drop site alone."""
        return self.scale(t["x"], t["drop"].value)

    def op_softmax(self, b: SoftmaxOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """A softmax of rows alone."""
        return self.softmax(t["x"], mask=b.mask)

    def op_sdpa(self, b: AttentionCoreOpSpec, t: dict[str, Var], tap: Tap) -> Var:
        """An attention core alone, on q (the input), k and v."""
        p = self.softmax(self.scores(t["x"], t["k"], b.heads), mask=b.mask)
        return self.weighted(p, t["v"], b.heads)

    def step(self, theta: Floats, gradient: Floats, lr: float) -> Floats:
        """Plain SGD."""
        return np.asarray(theta - theta.dtype.type(lr) * gradient)


def adapter(quick: bool = False) -> NumpyAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return NumpyAdapter()
