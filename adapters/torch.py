"""PyTorch: NCHW functional API; eager autograd unless the conditions name another mode."""

from __future__ import annotations

import copy
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from diffgrad.adapters.base import Adapter, Stopwatch, Tap, Unsupported
from diffgrad.adapters.registry import mode_of
from diffgrad.adapters.torch_layers import Layers, Padding, explicit, xla_same
from diffgrad.adapters.torch_modes import MODES, Job, Program, compiled
from diffgrad.adapters.torch_tensors import Tensors, arrays, place, set_up, tensor
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
from diffgrad.specs.base import Blocks
from diffgrad.specs.ops import Mask, shown
from diffgrad.trace import Arrays, Trace


def _single_statistic(case: Case) -> bool:
    return case.block.fewest_statistics() == 1 and case.how.norm != "composed"


def _fused_attention_forward_mode(case: Case) -> bool:
    cores = [getattr(block, "core", "") for block in (case.block, *(b for _, b in _parts(case.block)))]
    return case.how.mode == "jvp" and "fused" in cores


def _step_along_overlapping(case: Case) -> bool:
    overlapping = case.how.params == "expanded" and any(p.shape[:1] > (1,) for p in case.block.parameters())
    return bool(case.lr) and overlapping


def _dual_of_overlapping(case: Case) -> bool:
    x, how = case.block.input(), case.how
    moving = (t for t in (x, *case.block.parameters()) if how.memory(t.name, x.name) == "expanded")
    return how.mode == "jvp" and any(t.shape[:1] > (1,) for t in moving)


class TorchAdapter(Layers, Adapter):
    """torch, compiled in mode ``compile`` only."""

    name = "torch"
    unsupported = (
        Unsupported(_single_statistic, "torch refuses batch norm over one value per channel in training mode"),
        Unsupported(_fused_attention_forward_mode, "torch has no forward mode of its fused attention kernels"),
        Unsupported(_step_along_overlapping, "torch writes to no parameter whose elements share memory"),
        Unsupported(_dual_of_overlapping, "torch lays a tangent out as its primal, whose elements share memory"),
    )
    parts: Blocks = ()
    """The blocks of the present case's net, made beforehand: Dynamo cannot make a spec inside of a program."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._program = lru_cache(maxsize=64)(self._compile)

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}

    def devices(self) -> tuple[str, ...]:
        return ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec, how = case.block, case.how
        set_up(how)
        self.how, self.parts = how, _parts(spec)
        mode = mode_of(self.name, how)
        job = self._job(case, tensors)
        with Stopwatch() as clock:
            seen = MODES[mode](job)
            bare = MODES[mode](job._replace(bare=True)).ends() if how.bare else {}
        if seen.out.device.type != how.device:
            raise RuntimeError(f"how.device is {how.device}, and torch ran on {seen.out.device}")
        x = spec.input().name
        grads = {s: g for s, g in seen.cots.items() if s in job.leaves and s != x}
        return (
            Trace(
                acts=arrays({**seen.acts, "out": seen.out}),
                cots=arrays({s: g for s, g in seen.cots.items() if s not in grads}),
                grads=arrays(grads),
                updates=arrays(_stepped(job.leaves, grads, case.lr)) if case.lr else {},
                tangents=arrays(seen.tangents),
                bare=arrays(bare),
            ),
            clock.seconds,
        )

    def _job(self, case: Case, tensors: Arrays) -> Job:
        spec, how = case.block, case.how
        t = place(case, tensors)
        leaves = {name: t.pop(name) for name in spec.differentiated()}
        tangents = case.tangents() if how.mode == "jvp" else {}
        compiles = how.mode == "compile"
        return Job(
            program=self._program(spec, case.dtype, how) if compiles else Program(partial(self.block(spec), spec)),
            leaves=leaves,
            dy=t.pop("dy"),
            rest=t,
            tangents={name: tensor(v, how) for name, v in tangents.items()},
        )

    def _compile(self, spec: Spec, dtype: str, how: How) -> Program:
        """The program of one block in one dtype under one set of conditions; compiled when it is first called."""
        fixed = copy.copy(self)  # no later run changes its conditions, and so what the program was specialized to
        fixed.made = {}
        return compiled(partial(fixed.block(spec), spec))

    def uib(self, b: UibSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", t["x"].view_as(t["x"]))
        v = tap("pn", self._uib_body(b, v, t, tap, 1, 1))
        if b.drop:
            v = tap("pd", v * t["drop"].reshape(-1, 1, 1, 1))
        return torch.add(v, t["x"])

    def uib_s2(self, b: UibStridedSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Universal inverted bottleneck, stride 2, no skip."""
        pre, post = (1, 2) if b.carrier == "post" else (2, 1)
        return self._uib_body(b, t["x"], t, tap, pre, post)

    def _uib_body(
        self, b: UibSpec | UibStridedSpec, v: torch.Tensor, t: Tensors, tap: Tap, pre_stride: int, post_stride: int
    ) -> torch.Tensor:
        if b.pre_k:
            v = tap("qc", self.conv(v, t["qW"], stride=pre_stride, padding=b.pre_k // 2, groups=v.shape[1]))
            v = tap("qn", self.bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", F.relu(v))
        v = tap("ec", self.conv(v, t["eW"]))
        v = tap("en", self.bn(v, t["eg"], t["ebt"]))
        v = tap("er", F.relu(v))
        if b.post_k:
            v = tap("dc", self.conv(v, t["dW"], stride=post_stride, padding=b.post_k // 2, groups=b.mid))
            v = tap("dn", self.bn(v, t["dg"], t["dbt"]))
            v = tap("dr", F.relu(v))
        v = tap("pc", self.conv(v, t["pW"]))
        return self.bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """conv 3x3 stride 2, BN, relu."""
        if b.padding == "xla_same":
            rows, cols = (((size + 1) // 2 - 1) * 2 + 3 - size for size in (b.h, b.w))
            x = F.pad(t["x"], (cols // 2, cols - cols // 2, rows // 2, rows - rows // 2))
            v = tap("sc", self.conv(x, t["sW"], stride=2))
        else:
            v = tap("sc", self.conv(t["x"], t["sW"], stride=2, padding=1))
        return F.relu(tap("sn", self.bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The fused stage."""
        v = tap("f0cc", self.conv(t["x"], t["f0cW"], stride=2, padding=b.k // 2))
        v = tap("f0cn", self.bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", F.silu(v) if b.act == "swish" else F.relu(v))
        v = tap("f0pc", self.conv(v, t["f0pW"]))
        return self.bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The head."""
        v = tap("h1c", self.conv(t["x"], t["h1W"]))
        v = tap("h1n", self.bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", F.relu(v))
        if b.pool_first:
            v = tap("pool", F.adaptive_avg_pool2d(v, 1))
        if b.oc:
            v = tap("hc", self.conv(v, t["hW"]))
            v = tap("hn", self.bn(v, t["hg"], t["hbt"]))
            v = tap("hr", F.relu(v))
        if not b.pool_first:
            v = tap("pool", F.adaptive_avg_pool2d(v, 1))
        return F.linear(tap("flat", torch.flatten(v, 1)), t["Wd"].T, t["bd"])

    def mobilenetv4(self, b: MobileNetV4Spec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        logits = self.run_blocks(self.parts, b.boundaries(), t, tap)
        return F.cross_entropy(logits, t["target"])

    def convnext(self, b: ConvNeXtSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """ConvNeXt block."""
        v = tap("xb", t["x"].view_as(t["x"]))
        v = tap("d", self.conv(v, t["dW"], t["db"], padding=b.k // 2, groups=b.c))
        v = tap("nl", self.ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", self.conv(v, t["exW"], t["exb"]))
        v = tap("g", F.gelu(v, approximate="tanh" if b.act == "gelu_tanh" else "none"))
        v = tap("p", self.conv(v, t["prW"], t["prb"]))
        v = tap("ls", v * (t["lsg"].reshape(-1, 1, 1) if b.scale == "channel" else t["lsg"]))
        if b.drop:
            v = tap("pd", v * t["drop"].reshape(-1, 1, 1, 1))
        return torch.add(v, t["x"])

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Patchify, LN."""
        v = tap("st", self.conv(t["x"], t["stW"], t["stb"], stride=b.k))
        return self.ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """LN, conv 2x2 stride 2."""
        return self.conv(tap("dsn", self.ln(t["x"], b.norm, t["dsng"], t["dsnbt"])), t["dsW"], t["dsb"], stride=2)

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Pooling, LN, dense."""
        v = tap("pool", F.adaptive_avg_pool2d(t["x"], 1))
        v = tap("hn", self.ln(v, b.norm, t["hng"], t["hnbt"]))
        return F.linear(tap("flat", torch.flatten(v, 1)), t["Wd"].T, t["bd"])

    def convnext_net(self, b: ConvNeXtNetSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        return F.cross_entropy(self.run_blocks(self.parts, b.boundaries(), t, tap), t["target"])

    def attention(self, b: AttentionSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Multi-head self-attention."""
        return self._mhsa(b, t["x"], t, tap)

    def encoder(self, b: EncoderSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Encoder block."""
        v = tap("xa", t["x"].view_as(t["x"]))
        v = tap("ao", self._mhsa(b, tap("n1", self.token_ln(v, b.norm, t["ln1g"], t["ln1bt"])), t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"].reshape(-1, 1, 1))
        h = tap("h", torch.add(v, t["x"]))
        v = tap("n2", self.token_ln(tap("hm", h.view_as(h)), b.norm, t["ln2g"], t["ln2bt"]))
        v = tap("g", F.gelu(tap("f1", _linear(v, t["Wfc1"], t["bfc1"], b.bf16)), approximate="tanh"))
        v = tap("f2", _linear(v, t["Wfc2"], t["bfc2"], b.bf16))
        if b.drop_m:
            v = tap("md", v * t["drop_m"].reshape(-1, 1, 1))
        return torch.add(v, h)

    def tower(self, b: TowerSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Encoder blocks in series."""
        return self.run_blocks(self.parts, (*b.boundaries(), "out"), t, tap)  # type: ignore[no-any-return]

    def patch_embed(self, b: PatchEmbedSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Patchify, cls in front, positions."""
        if b.bf16 and b.bf16_conv:
            v = self.conv(t["x"].bfloat16(), t["peW"].bfloat16(), stride=b.p).float() + t["peb"].reshape(-1, 1, 1)
        else:
            v = self.conv(t["x"], t["peW"], t["peb"], stride=b.p)
        patches = tap("pe", v).flatten(2).transpose(1, 2)
        return tap("seq", torch.cat((t["cls"].expand(b.n, 1, -1), patches), 1)) + t["pos"]  # type: ignore[no-any-return]

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """LN, the cls token, dense."""
        v = tap("fn", self.token_ln(t["x"], b.norm, t["fng"], t["fnbt"]))
        return F.linear(tap("fc", v[:, 0]), t["Wd"].T, t["bd"])

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        return F.cross_entropy(self.run_blocks(self.parts, b.boundaries(), t, tap), t["target"])

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The smoothed cross entropy alone."""
        return F.cross_entropy(t["x"], t["target"])

    def _mhsa(self, b: AttentionSpec | EncoderSpec, v: torch.Tensor, t: Tensors, tap: Tap) -> torch.Tensor:
        q, k, u = (_slabs(tap(s, _linear(v, t[f"W{s}"], t[f"b{s}"], b.bf16)), b.heads) for s in "qkv")
        if b.core == "composed":
            s = tap("attnS", _matmul(q, k.transpose(2, 3), b.bf16) * b.head_dim**-0.5)
            o = _matmul(tap("attnP", torch.softmax(s, -1)), u, b.bf16)
        elif b.bf16:
            o = self.sdpa(q.bfloat16(), k.bfloat16(), u.bfloat16(), b.core).float()
        else:
            o = self.sdpa(q, k, u, b.core)
        return _linear(tap("o", o.transpose(1, 2).flatten(2)), t["Wo"], t["bo"], b.bf16)

    def op_conv(self, b: ConvOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One convolution."""
        x = t["x"]
        padding: Padding = b.k // 2 if b.padding == "symmetric" else 0
        if b.padding == "explicit":
            x, padding = explicit(x, b.pads)
        elif b.padding == "xla_same":
            x, padding = xla_same(x, b.k, b.stride)
        return self.conv(x, t["W"], t.get("b"), b.stride, padding, b.ic if b.depthwise else 1)

    def op_bn(self, b: BatchNormOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One batch norm."""
        return self.bn(t["x"], t["g"], t["bt"])

    def op_ln(self, b: LayerNormOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One layer norm."""
        return self.token_ln(t["x"], b.norm, t["g"], t["bt"])

    def op_act(self, b: ActivationOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One activation."""
        match b.act:
            case "relu":
                return F.relu(t["x"])
            case "relu6":
                return F.relu6(t["x"])
            case "swish":
                return F.silu(t["x"])
        return F.gelu(t["x"], approximate="tanh" if b.act == "gelu_tanh" else "none")

    def op_dense(self, b: DenseOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One dense layer."""
        return F.linear(t["x"], t["W"].T, t["b"])

    def op_pool(self, b: PoolOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One global average pooling."""
        return F.adaptive_avg_pool2d(t["x"], 1)

    def op_scale(self, b: LayerScaleOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One layer scale."""
        return t["x"] * (t["g"].reshape(-1, 1, 1) if b.scale == "channel" else t["g"])

    def op_drop(self, b: DropPathOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One stochastic-depth site."""
        return t["x"] * t["drop"].reshape(-1, 1)

    def op_softmax(self, b: SoftmaxOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One softmax."""
        x = t["x"].masked_fill(~_mask(b.mask, t["x"]), -torch.inf) if b.mask else t["x"]
        return torch.softmax(x, -1)

    def op_sdpa(self, b: AttentionCoreOpSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """One attention core; the input is q."""
        q, k, v = (_slabs(t[s], b.heads) for s in ("x", "k", "v"))
        return self.sdpa(q, k, v, b.core, _mask(b.mask, q) if b.mask else None).transpose(1, 2).flatten(2)


def _mask(mask: Mask, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(shown(mask), device=like.device)


def _slabs(v: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head's slab of columns: [N,T,D] -> [N,heads,T,d]."""
    return torch.unflatten(v, 2, (heads, v.shape[2] // heads)).transpose(1, 2)


def _matmul(x: torch.Tensor, w: torch.Tensor, bf16: bool) -> torch.Tensor:
    return (x.bfloat16() @ w.bfloat16()).float() if bf16 else x @ w


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, bf16: bool) -> torch.Tensor:
    return F.linear(x.bfloat16(), w.T.bfloat16()).float() + b if bf16 else F.linear(x, w.T, b)


def _parts(spec: Spec) -> Blocks:
    """A net's blocks; none for a block."""
    return tuple(spec.blocks()) if hasattr(spec, "blocks") else ()


def _stepped(leaves: Tensors, grads: Tensors, lr: float) -> Tensors:
    """Every parameter after a plain step of SGD."""
    stepped = {s: leaves[s].detach().requires_grad_() for s in grads}
    for s, theta in stepped.items():
        theta.grad = grads[s]
    if stepped:
        torch.optim.SGD(stepped.values(), lr=lr).step()
    return stepped


def adapter(quick: bool = False) -> TorchAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return TorchAdapter()
