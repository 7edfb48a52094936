"""dense, global average pooling and the relabelling between them (FORMULAS section 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from diffgrad.bars import Bounded, biased, bilinear, scale, total
from diffgrad.ops.base import Numbers, Op, Vjp
from diffgrad.ops.products import EXACT, Products


@dataclass(frozen=True)
class Dense(Op):
    """y = xW + b over the last axis of x [..., in]. Parameters: W [in,out], b [out]."""

    products: Products = EXACT

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        return {name: replace(self, products=p) for name, p in self.products.looser(y).items()}

    def stored(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> tuple[bool, bool]:
        inputs, outputs = ps[0].val.shape
        return inputs > 1, outputs > 1

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return np.asarray(xs[0] @ ps[0] + ps[1])

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        x, w = self.products.operand(xs[0]), self.products.operand(ps[0])
        product = bilinear(lambda a, b: np.asarray(a @ b), x, w, w.val.shape[0])
        return biased(self.products.result(product), ps[1].reshape(*(1,) * (x.val.ndim - 1), -1), w.val.shape[0])

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        x, w, d = self.products.operand(xs[0]), self.products.operand(ps[0]), self.products.upstream(dy)
        inputs, outputs = w.val.shape
        rows = dy.val.size // outputs
        dx = bilinear(lambda a, b: np.asarray(a @ b.T), d, w, outputs)
        dw = bilinear(lambda a, b: np.asarray(a.T @ b), x.reshape(rows, inputs), d.reshape(rows, outputs), rows)
        db = total(dy.reshape(rows, outputs), (0,)).reshape(-1)
        return Vjp((self.products.result(dx),), (self.products.result(dw, len(dy.val)), db))


@dataclass(frozen=True)
class GlobalAveragePool(Op):
    """Mean over the map, [N,C,H,W] -> [N,C,1,1]; its backward spreads dy/(H*W) and reads no input."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return np.asarray(xs[0].mean((2, 3), keepdims=True))

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        h, w = xs[0].val.shape[2:]
        return scale(total(xs[0], (2, 3)), 1.0 / (h * w), roundings=2.0 if h * w > 1 else 0.0)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        shape = xs[0].val.shape
        n = shape[2] * shape[3]
        d = scale(dy, 1.0 / n, roundings=2.0 if n > 1 else 0.0)
        spread = Bounded(np.broadcast_to(d.val, shape), np.broadcast_to(d.err, shape), d.p)
        return Vjp((spread,), ())


@dataclass(frozen=True)
class Flatten(Op):
    """[N,C,1,1] read as [N,C]: a relabelling, exact."""

    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        return xs[0].reshape(xs[0].shape[0], -1)

    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        return xs[0].reshape(xs[0].val.shape[0], -1)

    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        return Vjp((dy.reshape(*xs[0].val.shape),), ())
