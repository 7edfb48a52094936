"""PyTorch: NCHW functional API, eager autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffgrad.adapters.base import Adapter, Stopwatch, Tap, Unsupported
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

Tensors = dict[str, torch.Tensor]


def _single_statistic(case: Case) -> bool:
    return case.block.fewest_statistics() == 1


class TorchAdapter(Adapter):
    """torch eager on CPU."""

    name = "torch"
    mode = "eager"
    unsupported = (
        Unsupported(_single_statistic, "torch refuses batch norm over one value per channel in training mode"),
    )

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}

    def devices(self) -> tuple[str, ...]:
        return ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        t = {name: torch.tensor(v) for name, v in tensors.items()}
        leaves = {name: t[name].requires_grad_() for name in spec.differentiated()}
        sites: Tensors = {}

        def tap(site: str, v: torch.Tensor) -> torch.Tensor:
            sites[site] = v
            return v

        with Stopwatch() as clock:
            out = self.block(spec)(spec, t, tap)
            wanted = {**sites, **leaves}
            got = torch.autograd.grad(out, list(wanted.values()), t["dy"], allow_unused=True)
        cots = {name: g.numpy() for name, g in zip(wanted, got, strict=True) if g is not None}
        x = spec.input().name
        stepped = {s: leaves[s] for s in cots if s in leaves and s != x} if case.lr else {}
        if stepped:
            for s, theta in stepped.items():
                theta.grad = torch.from_numpy(cots[s])
            torch.optim.SGD(stepped.values(), lr=case.lr).step()
        return (
            Trace(
                acts={s: v.detach().numpy() for s, v in sites.items()} | {"out": out.detach().numpy()},
                cots={s: g for s, g in cots.items() if s in sites or s == x},
                grads={s: g for s, g in cots.items() if s in leaves and s != x},
                updates={s: theta.detach().numpy() for s, theta in stepped.items()},
            ),
            clock.seconds,
        )

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
            v = tap("qc", F.conv2d(v, t["qW"], stride=pre_stride, padding=b.pre_k // 2, groups=v.shape[1]))
            v = tap("qn", _bn(v, t["qg"], t["qbt"]))
            if b.pre_act == "relu":
                v = tap("qr", F.relu(v))
        v = tap("ec", F.conv2d(v, t["eW"]))
        v = tap("en", _bn(v, t["eg"], t["ebt"]))
        v = tap("er", F.relu(v))
        if b.post_k:
            v = tap("dc", F.conv2d(v, t["dW"], stride=post_stride, padding=b.post_k // 2, groups=b.mid))
            v = tap("dn", _bn(v, t["dg"], t["dbt"]))
            v = tap("dr", F.relu(v))
        v = tap("pc", F.conv2d(v, t["pW"]))
        return _bn(v, t["pg"], t["pbt"])

    def stem(self, b: StemSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """conv 3x3 stride 2, BN, relu."""
        if b.padding == "xla_same":
            rows, cols = (((size + 1) // 2 - 1) * 2 + 3 - size for size in (b.h, b.w))
            x = F.pad(t["x"], (cols // 2, cols - cols // 2, rows // 2, rows - rows // 2))
            v = tap("sc", F.conv2d(x, t["sW"], stride=2))
        else:
            v = tap("sc", F.conv2d(t["x"], t["sW"], stride=2, padding=1))
        return F.relu(tap("sn", _bn(v, t["sg"], t["sbt"])))

    def fused(self, b: FusedSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The fused stage."""
        v = tap("f0cc", F.conv2d(t["x"], t["f0cW"], stride=2, padding=b.k // 2))
        v = tap("f0cn", _bn(v, t["f0cg"], t["f0cbt"]))
        v = tap("f0cr", F.silu(v) if b.act == "swish" else F.relu(v))
        v = tap("f0pc", F.conv2d(v, t["f0pW"]))
        return _bn(v, t["f0pg"], t["f0pbt"])

    def head(self, b: HeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The head."""
        v = tap("h1c", F.conv2d(t["x"], t["h1W"]))
        v = tap("h1n", _bn(v, t["h1g"], t["h1bt"]))
        v = tap("h1r", F.relu(v))
        if b.pool_first:
            v = tap("pool", F.adaptive_avg_pool2d(v, 1))
        if b.oc:
            v = tap("hc", F.conv2d(v, t["hW"]))
            v = tap("hn", _bn(v, t["hg"], t["hbt"]))
            v = tap("hr", F.relu(v))
        if not b.pool_first:
            v = tap("pool", F.adaptive_avg_pool2d(v, 1))
        return F.linear(tap("flat", torch.flatten(v, 1)), t["Wd"].T, t["bd"])

    def mobilenetv4(self, b: MobileNetV4Spec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        logits = self.run_blocks(b.blocks(), b.boundaries(), t, tap)
        return F.cross_entropy(logits, t["target"])

    def convnext(self, b: ConvNeXtSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """ConvNeXt block."""
        v = tap("xb", t["x"].view_as(t["x"]))
        v = tap("d", F.conv2d(v, t["dW"], t["db"], padding=b.k // 2, groups=b.c))
        v = tap("nl", _ln(v, b.norm, t["lng"], t["lnbt"]))
        v = tap("e", F.conv2d(v, t["exW"], t["exb"]))
        v = tap("g", F.gelu(v, approximate="tanh" if b.act == "gelu_tanh" else "none"))
        v = tap("p", F.conv2d(v, t["prW"], t["prb"]))
        v = tap("ls", v * (t["lsg"].reshape(-1, 1, 1) if b.scale == "channel" else t["lsg"]))
        if b.drop:
            v = tap("pd", v * t["drop"].reshape(-1, 1, 1, 1))
        return torch.add(v, t["x"])

    def convnext_stem(self, b: ConvNeXtStemSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Patchify, LN."""
        v = tap("st", F.conv2d(t["x"], t["stW"], t["stb"], stride=b.k))
        return _ln(v, b.norm, t["stng"], t["stnbt"])

    def convnext_down(self, b: ConvNeXtDownSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """LN, conv 2x2 stride 2."""
        return F.conv2d(tap("dsn", _ln(t["x"], b.norm, t["dsng"], t["dsnbt"])), t["dsW"], t["dsb"], stride=2)

    def convnext_head(self, b: ConvNeXtHeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Pooling, LN, dense."""
        v = tap("pool", F.adaptive_avg_pool2d(t["x"], 1))
        v = tap("hn", _ln(v, b.norm, t["hng"], t["hnbt"]))
        return F.linear(tap("flat", torch.flatten(v, 1)), t["Wd"].T, t["bd"])

    def convnext_net(self, b: ConvNeXtNetSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        return F.cross_entropy(self.run_blocks(b.blocks(), b.boundaries(), t, tap), t["target"])

    def attention(self, b: AttentionSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Multi-head self-attention."""
        return _mhsa(b, t["x"], t, tap)

    def encoder(self, b: EncoderSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Encoder block."""
        v = tap("xa", t["x"].view_as(t["x"]))
        v = tap("ao", _mhsa(b, tap("n1", _token_ln(v, b.norm, t["ln1g"], t["ln1bt"])), t, tap))
        if b.drop_a:
            v = tap("ad", v * t["drop_a"].reshape(-1, 1, 1))
        h = tap("h", torch.add(v, t["x"]))
        v = tap("n2", _token_ln(tap("hm", h.view_as(h)), b.norm, t["ln2g"], t["ln2bt"]))
        v = tap("g", F.gelu(tap("f1", _linear(v, t["Wfc1"], t["bfc1"], b.bf16)), approximate="tanh"))
        v = tap("f2", _linear(v, t["Wfc2"], t["bfc2"], b.bf16))
        if b.drop_m:
            v = tap("md", v * t["drop_m"].reshape(-1, 1, 1))
        return torch.add(v, h)

    def tower(self, b: TowerSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Encoder blocks in series."""
        return self.run_blocks(b.blocks(), (*b.boundaries(), "out"), t, tap)  # type: ignore[no-any-return]

    def patch_embed(self, b: PatchEmbedSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Patchify, cls in front, positions."""
        if b.bf16 and b.bf16_conv:
            v = F.conv2d(t["x"].bfloat16(), t["peW"].bfloat16(), stride=b.p).float() + t["peb"].reshape(-1, 1, 1)
        else:
            v = F.conv2d(t["x"], t["peW"], t["peb"], stride=b.p)
        patches = tap("pe", v).flatten(2).transpose(1, 2)
        return tap("seq", torch.cat((t["cls"].expand(b.n, 1, -1), patches), 1)) + t["pos"]  # type: ignore[no-any-return]

    def vit_head(self, b: VitHeadSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """LN, the cls token, dense."""
        v = tap("fn", _token_ln(t["x"], b.norm, t["fng"], t["fnbt"]))
        return F.linear(tap("fc", v[:, 0]), t["Wd"].T, t["bd"])

    def vit(self, b: VitSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The whole net and its loss."""
        return F.cross_entropy(self.run_blocks(b.blocks(), b.boundaries(), t, tap), t["target"])

    def loss(self, b: LossSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """The smoothed cross entropy alone."""
        return F.cross_entropy(t["x"], t["target"])


def _mhsa(b: AttentionSpec | EncoderSpec, v: torch.Tensor, t: Tensors, tap: Tap) -> torch.Tensor:
    q, k, u = (tap(s, _linear(v, t[f"W{s}"], t[f"b{s}"], b.bf16)) for s in "qkv")
    # Each head's slab of columns: [N,T,D] -> [N,heads,T,d]
    q, k, u = (x.unflatten(2, (b.heads, b.head_dim)).transpose(1, 2) for x in (q, k, u))
    if b.core == "composed":
        s = tap("attnS", _matmul(q, k.transpose(2, 3), b.bf16) * b.head_dim**-0.5)
        o = _matmul(tap("attnP", torch.softmax(s, -1)), u, b.bf16)
    else:
        backends = [SDPBackend.MATH] if b.core == "fused_math" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends):
            if b.bf16:
                o = F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), u.bfloat16()).float()
            else:
                o = F.scaled_dot_product_attention(q, k, u)
    return _linear(tap("o", o.transpose(1, 2).flatten(2)), t["Wo"], t["bo"], b.bf16)


def _matmul(x: torch.Tensor, w: torch.Tensor, bf16: bool) -> torch.Tensor:
    return (x.bfloat16() @ w.bfloat16()).float() if bf16 else x @ w


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, bf16: bool) -> torch.Tensor:
    return F.linear(x.bfloat16(), w.T.bfloat16()).float() + b if bf16 else F.linear(x, w.T, b)


def _token_ln(x: torch.Tensor, norm: str, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Layer norm of every token, gamma and beta per number or one of each."""
    if norm == "vector":
        return F.layer_norm(x, g.shape, g, b, EPS)
    return F.layer_norm(x, x.shape[2:], eps=EPS) * g + b


def _ln(x: torch.Tensor, norm: str, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Layer norm over the channels, or over the whole map with one gamma and beta."""
    if norm == "channel":
        return F.layer_norm(x.permute(0, 2, 3, 1), g.shape, g, b, EPS).permute(0, 3, 1, 2)
    return F.layer_norm(x, x.shape[1:], eps=EPS) * g + b


def _bn(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, g, b, training=True, eps=EPS)


def adapter(quick: bool = False) -> TorchAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return TorchAdapter()
