"""PyTorch: NCHW functional API, eager autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffgrad.adapters.base import Adapter, Stopwatch, Tap, Unsupported
from diffgrad.case import Case
from diffgrad.specs import EPS, UibSpec
from diffgrad.trace import Arrays, Trace

Tensors = dict[str, torch.Tensor]


def _single_statistic(case: Case) -> bool:
    spec = case.block
    return spec.n * spec.h * spec.w == 1


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
        leaves = {p.name: t[p.name].requires_grad_() for p in (spec.input(), *spec.parameters())}
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
        return (
            Trace(
                acts={s: v.detach().numpy() for s, v in sites.items()} | {"out": out.detach().numpy()},
                cots={s: g for s, g in cots.items() if s in sites or s == x},
                grads={s: g for s, g in cots.items() if s in leaves and s != x},
            ),
            clock.seconds,
        )

    def uib(self, b: UibSpec, t: Tensors, tap: Tap) -> torch.Tensor:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", t["x"].view_as(t["x"]))
        if b.pre_k:
            v = tap("qc", F.conv2d(v, t["qW"], padding=b.pre_k // 2, groups=b.c))
            v = tap("qn", _bn(v, t["qg"], t["qbt"]))
        v = tap("ec", F.conv2d(v, t["eW"]))
        v = tap("en", _bn(v, t["eg"], t["ebt"]))
        v = tap("er", F.relu(v))
        if b.post_k:
            v = tap("dc", F.conv2d(v, t["dW"], padding=b.post_k // 2, groups=b.mid))
            v = tap("dn", _bn(v, t["dg"], t["dbt"]))
            v = tap("dr", F.relu(v))
        v = tap("pc", F.conv2d(v, t["pW"]))
        v = tap("pn", _bn(v, t["pg"], t["pbt"]))
        if b.drop:
            v = tap("pd", v * t["drop"].reshape(-1, 1, 1, 1))
        return torch.add(v, t["x"])


def _bn(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, g, b, training=True, eps=EPS)


def adapter(quick: bool = False) -> TorchAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return TorchAdapter()
