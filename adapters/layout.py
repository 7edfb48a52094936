"""Canonical layout to and from channels-last, and the buffers that a case's tensors are views of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffgrad.how import Memory
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


def buffer_of(v: NDArray[Any], memory: Memory) -> NDArray[Any]:
    """The contiguous buffer that ``v`` is to be a view of; what the view leaves out is NaN, so that a read of it shows.

    ``step``: ``v = buffer[..., ::2]``. ``transposed``: ``v = buffer.T``, all axes reversed. ``offset``: flat, and
    ``v = buffer[1:].reshape(v.shape)``. ``expanded``: ``v = broadcast_to(buffer, v.shape)``, size 1 along axis 0 (the
    case's values are already the same there). Scalars are their own buffer.
    """
    if v.ndim == 0 or not memory:
        return np.asarray(v, order="C")
    match memory:
        case "step":
            buffer = np.full((*v.shape[:-1], 2 * v.shape[-1]), np.nan, v.dtype)
            buffer[..., ::2] = v
            return buffer
        case "transposed":
            return np.ascontiguousarray(v.T)
        case "offset":
            return np.concatenate((np.full(1, np.nan, v.dtype), v.reshape(-1)))
        case "expanded":
            return np.ascontiguousarray(v[:1])


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
