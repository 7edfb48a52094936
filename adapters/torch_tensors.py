"""A case's arrays as torch tensors and back: dtype, device, memory order and views; and the settings of a run."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from diffgrad.adapters.layout import buffer_of
from diffgrad.case import Case
from diffgrad.how import How, Memory
from diffgrad.trace import Arrays

Tensors = dict[str, torch.Tensor]


def set_up(how: How) -> None:
    """Put every global setting where the conditions want it, so that none leaks from one case into the next.

    Raises:
        RuntimeError: torch does not see the device.
    """
    if how.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("how.device is cuda, and torch sees no CUDA device")
    if torch.get_num_threads() != how.threads:
        torch.set_num_threads(how.threads)
    torch.use_deterministic_algorithms(how.deterministic)
    torch.backends.cuda.matmul.allow_tf32 = how.tf32
    torch.backends.cudnn.allow_tf32 = how.tf32
    torch.backends.cudnn.benchmark = how.benchmark
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")  # costs a copy, says torch


def place(case: Case, tensors: Arrays) -> Tensors:
    """The case's tensors on its device, with the strides that its conditions ask for; constants stay plain."""
    how, x = case.how, case.block.input().name
    viewed = {*case.block.differentiated(), "dy"}
    return {k: tensor(v, how, how.memory(k, x) if k in viewed else "") for k, v in tensors.items()}


def tensor(v: NDArray[Any], how: How, memory: Memory = "") -> torch.Tensor:
    """One array. The view is one in the order of the memory: with channels last, ``step`` skips channels."""
    last = how.layout == "channels_last" and v.ndim == 4
    ordered = v.transpose(0, 2, 3, 1) if last else v
    # Strides come from the permutation and not from torch's memory format, which leaves sizes of 1 as they are.
    placed = _view(ordered, memory, how.device)
    return placed.permute(0, 3, 1, 2) if last else placed


def array(t: torch.Tensor) -> NDArray[Any]:
    """The tensor as a NumPy array of its dtype."""
    t = t.detach().cpu()
    if t.dtype != torch.bfloat16:
        return t.numpy()
    return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def arrays(tensors: Tensors) -> Arrays:
    """Every tensor as a NumPy array."""
    return {k: array(t) for k, t in tensors.items()}


def _view(v: NDArray[Any], memory: Memory, device: str) -> torch.Tensor:
    if v.ndim == 0 or not memory:
        return _copy(v, device)
    buffer = _copy(buffer_of(v, memory), device)
    match memory:
        case "step":
            return buffer[..., ::2]
        case "transposed":
            return buffer.permute(*reversed(range(v.ndim)))
        case "offset":
            return buffer[1:].view(v.shape)
        case "expanded":
            return buffer.expand(v.shape)


def _copy(v: NDArray[Any], device: str) -> torch.Tensor:
    """A contiguous copy, by way of a flat one: NumPy's strides along sizes of 1 are arbitrary, and torch copies them.

    torch knows no bfloat16 of NumPy's, so its bits go as integers.
    """
    flat = v.reshape(-1)
    if flat.dtype == ml_dtypes.bfloat16:
        return torch.tensor(flat.view(np.int16), device=device).view(torch.bfloat16).view(v.shape)
    return torch.tensor(flat, device=device).view(v.shape)
