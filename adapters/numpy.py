"""NumPy: the same-precision reference, a small reverse-mode tape of its own. Also the fastest way to test the checker.

Every operation rounds in the case's dtype, as a plain framework would. The planted faults of ``diffgrad mutants`` are
subclasses of this adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.case import Case
from diffgrad.specs import EPS, UibSpec
from diffgrad.trace import Arrays, Trace

Floats = NDArray[Any]


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
        nodes = {s: v.cot for s, v in (sites | {x: t[x]}).items()}
        grads = {p.name: t[p.name].cot for p in spec.parameters()}
        return (
            Trace(
                acts={s: v.value for s, v in sites.items()} | {"out": out.value},
                cots={s: g for s, g in nodes.items() if g is not None},
                grads={s: g for s, g in grads.items() if g is not None},
            ),
            clock.seconds,
        )

    def uib(self, b: UibSpec, t: dict[str, Var], tap: Tap) -> Var:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", self.copy(t["x"]))
        v = self.pre(b, t, tap, v)
        v = tap("ec", self.conv(v, t["eW"]))
        v = tap("en", self.bn(v, t["eg"], t["ebt"]))
        v = tap("er", self.relu(v))
        v = self.post(b, t, tap, v)
        v = tap("pc", self.conv(v, t["pW"]))
        v = tap("pn", self.bn(v, t["pg"], t["pbt"]))
        return self.join(b, t, tap, v)

    def pre(self, b: UibSpec, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The pre-depthwise and its batch norm, where the row has one."""
        if not b.pre_k:
            return v
        v = tap("qc", self.depthwise(v, t["qW"]))
        return self.pre_act(tap("qn", self.bn(v, t["qg"], t["qbt"])))

    def pre_act(self, v: Var) -> Var:
        """Nothing follows the pre-depthwise's batch norm."""
        return v

    def post(self, b: UibSpec, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The post-depthwise, its batch norm and relu, where the row has one."""
        if not b.post_k:
            return v
        v = tap("dc", self.depthwise(v, t["dW"]))
        v = tap("dn", self.bn(v, t["dg"], t["dbt"]))
        return tap("dr", self.relu(v))  # type: ignore[no-any-return]

    def join(self, b: UibSpec, t: dict[str, Var], tap: Tap, v: Var) -> Var:
        """The drop site on the branch, then the skip."""
        if b.drop:
            v = tap("pd", self.scale(v, t["drop"].value))
        return self.add(v, t["x"])

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

    def conv(self, x: Var, w: Var) -> Var:
        """Stride 1, symmetric padding, by gathered patches [N,C,H,W,kH,kW]."""
        patches, kernel = _patches(x.value, w.value.shape), w.value

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            flipped = kernel[:, :, ::-1, ::-1]
            dx = np.einsum("nohwab,ocab->nchw", _patches(dy, w.value.shape), flipped)
            return dx, self.weight_sum(np.einsum("nchwab,nohw->ocab", patches, dy), len(dy))

        return Var(np.einsum("nchwab,ocab->nohw", patches, kernel), (x, w), pull)

    def depthwise(self, x: Var, w: Var) -> Var:
        """One kernel per channel, stride 1, symmetric padding."""
        patches, kernel = _patches(x.value, w.value.shape), w.value[:, 0]

        def pull(dy: Floats) -> tuple[Floats, Floats]:
            dx = np.einsum("nchwab,cab->nchw", _patches(dy, w.value.shape), kernel[:, ::-1, ::-1])
            return dx, self.weight_sum(np.einsum("nchwab,nchw->cab", patches, dy)[:, None], len(dy))

        return Var(np.einsum("nchwab,cab->nchw", patches, kernel), (x, w), pull)

    def weight_sum(self, dw: Floats, batch: int) -> Floats:
        """A kernel's gradient is the *sum* over the batch."""
        return dw

    def bn(self, x: Var, g: Var, b: Var) -> Var:
        """Batch norm with live statistics: mean, then the mean square of the centred values."""
        centred = x.value - x.value.mean((0, 2, 3), keepdims=True)
        inv_std = self.inverse_root(self.variance(centred))
        normed = centred * inv_std
        gain = g.value[:, None, None]

        def pull(dy: Floats) -> tuple[Floats, Floats, Floats]:
            dx = self.bn_back(gain * dy, normed, inv_std)
            return dx, *self.bn_nodes(dy, dx, normed)

        return Var(gain * normed + b.value[:, None, None], (x, g, b), pull)

    def variance(self, centred: Floats) -> Floats:
        return np.asarray(np.mean(centred * centred, (0, 2, 3), keepdims=True))

    def inverse_root(self, variance: Floats) -> Floats:
        return np.asarray(1 / np.sqrt(variance + variance.dtype.type(EPS)))

    def bn_back(self, d: Floats, normed: Floats, inv_std: Floats) -> Floats:
        """Cotangent at the batch norm's input, for d = gamma * dy."""
        along = (normed * d).mean((0, 2, 3), keepdims=True)
        return np.asarray(inv_std * (d - d.mean((0, 2, 3), keepdims=True) - normed * along))

    def bn_nodes(self, dy: Floats, dx: Floats, normed: Floats) -> tuple[Floats, Floats]:
        """Gradients of gamma and beta, from the cotangent at the batch norm's *output*."""
        return (dy * normed).sum((0, 2, 3)), dy.sum((0, 2, 3))


def _patches(x: Floats, kernel: tuple[int, ...]) -> Floats:
    """[N,C,H,W] -> [N,C,H,W,kH,kW], zero-padded symmetrically."""
    kh, kw = kernel[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (kh // 2, kh // 2), (kw // 2, kw // 2)))
    return sliding_window_view(padded, (kh, kw), axis=(2, 3))


def adapter(quick: bool = False) -> NumpyAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return NumpyAdapter()
