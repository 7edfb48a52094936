"""Canonical layout to and from channels-last, for the adapters whose framework prefers it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffgrad.specs import Spec
from diffgrad.trace import Arrays


def to_nhwc(spec: Spec, tensors: Arrays) -> Arrays:
    """Activations NCHW -> NHWC, kernels OIHW -> HWIO, depthwise [C,1,kH,kW] -> [kH,kW,1,C]; the rest as it is."""
    kernels = spec.kernels()
    return {k: _to_hwio(v) if k in kernels else _to_last(v) for k, v in tensors.items()}


def from_nhwc(spec: Spec, tensors: Arrays) -> Arrays:
    """The inverse of to_nhwc."""
    kernels = spec.kernels()
    return {k: _back(v, k in kernels, k.endswith(_SQUARE)) for k, v in tensors.items()}


# Attention's matrices, [N,heads,T,T] in every framework.
_SQUARE = ("attnS", "attnP")


def _back(v: NDArray[Any], kernel: bool, square: bool) -> NDArray[Any]:
    if v.ndim != 4 or square:
        return v
    return v.transpose(3, 2, 0, 1) if kernel else v.transpose(0, 3, 1, 2)


def _to_hwio(v: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(v.transpose(2, 3, 1, 0))


def _to_last(v: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(v.transpose(0, 2, 3, 1)) if v.ndim == 4 else v
