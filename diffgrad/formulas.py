"""The ops' mathematics in a line each, for people: what a reader of a report holds a framework against."""

from __future__ import annotations

import math

from diffgrad.bars import PRECISIONS
from diffgrad.specs import EPS

_CONV = (
    "y[n,o,i,j] = b[o] + Σ_{c,a,b'} W[o,c,a,b']·x[n,c,s·i+a-lo,s·j+b'-lo]; dx, dW and db are the transposed sums of dy "
    "with W, of dy with x, and of dy"
)
_NORM = (
    f"μ = Σx/n, v = Σ(x-μ)²/n, s = (v+{EPS})^(-1/2), x̂ = (x-μ)·s, y = gamma·x̂ + beta; dgamma = Σ dy·x̂, "
    "dbeta = Σ dy, and with d = gamma·dy: dx = (s/n)·(n·d - Σd - x̂·Σ(x̂·d))"
)
_DENSE = "y = x·W + b; dx = dy·Wᵀ, dW = Σ xᵀ·dy, db = Σ dy"
_SOFTMAX = "p = softmax(z) over the last axis; dz = p·(dp - Σ_k p_k·dp_k)"
_ATTENTION = (
    "S = Q·Kᵀ/√d, P = softmax(S), O = P·V for each head; dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P·(dP - Σ P·dP), dQ = dS·K/√d, "
    "dK = dSᵀ·Q/√d"
)

FORMULAS: dict[str, str] = {
    "conv2d": _CONV,
    "depthwise": _CONV.replace("Σ_{c,a,b'} W[o,c,a,b']·x[n,c,", "Σ_{a,b'} W[o,0,a,b']·x[n,o,"),
    "batchnorm": f"per channel, over the n = N·H·W values: {_NORM}",
    "layernorm": f"per example or token, over its n values: {_NORM}",
    "relu": "y = max(x, 0); dx = dy where x > 0, else 0",
    "relu6": "y = min(max(x, 0), 6); dx = dy where 0 < x < 6, else 0",
    "swish": "y = x·s with s = 1/(1+e^(-x)); dx = dy·s·(1 + x·(1-s))",
    "gelutanh": (
        "q = √(2/π)·(x + 0.044715·x³), y = ½x·(1+tanh q); "
        "dx = dy·(½(1+tanh q) + ½x·(1-tanh² q)·√(2/π)·(1 + 3·0.044715·x²))"
    ),
    "geluerf": "y = x·Φ(x); dx = dy·(Φ(x) + x·φ(x)), with the normal distribution Φ and its density φ",
    "dense": _DENSE,
    "globalaveragepool": "y[n,c] = Σ_{h,w} x[n,c,h,w]/(H·W); dx = dy/(H·W), the same at every place",
    "flatten": "y is x in another shape; dx is dy in the shape of x",
    "layerscale": "y = gamma·x; dx = gamma·dy, dgamma = Σ x·dy",
    "droppath": "y_n = a_n·x_n with a_n either 0 or 1/keep; dx_n = a_n·dy_n",
    "copy": "y = x at a fork; the cotangent of x is the sum of its branches' ones",
    "add": "y = a + b; da = db = dy",
    "softmaxrows": _SOFTMAX,
    "scores": "S = Q·Kᵀ/√d for each head; dQ = dS·K/√d, dK = dSᵀ·Q/√d",
    "weighted": "O = P·V for each head; dP = dO·Vᵀ, dV = Pᵀ·dO",
    "attention": _ATTENTION,
    "prependcls": "y = [cls, x]; dcls = Σ_n dy[n,0,:], dx[n] = dy[n,1:,:]",
    "addposition": "y = x + pos; dx = dy, dpos = Σ_n dy[n]",
    "clsslice": "y[n] = x[n,0,:]; dx is dy in row 0 and 0 in every other",
    "smoothedcrossentropy": "L = -(1/B)·Σ_n Σ_k t·log softmax(z); dz = (softmax(z) - t)/B",
    "sgd": "every parameter becomes θ - lr·g, with g its gradient",
}
"""Op name, as in a signature's link -> its forward, then its backward. ``dy`` is the cotangent at the op's output."""


def formula(link: str) -> str:
    """The lines of a signature's link; of several ops joined by +, one after the other."""
    return ". ".join(FORMULAS[op] for op in link.split("+") if op in FORMULAS)


def bar_in_words(dtype: str) -> str:
    """What an error bar in this dtype means."""
    p = PRECISIONS[dtype]
    narrow = " (kernels sum in float32 and round the sum once)" if p.narrow else ""
    return (
        f"The bar is derived, not chosen: it bounds how far any correct {dtype} evaluation, in any order, may lie from "
        f"the exact value, by running error analysis from the operands of this very run. One operation costs "
        f"u = {_power(p.u)} of its result, a sum of k products k·u/(1 - k·u) of the sum of their absolute "
        f"values{narrow}; a result below {_power(p.tiny)} may lose {_power(p.lost)}."
    )


def _power(value: float) -> str:
    """A power of two, as one."""
    return f"2^{math.frexp(value)[1] - 1}"
