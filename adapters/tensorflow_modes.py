"""How TensorFlow takes a gradient, what its tensors are views of, and where it runs.

A mode is a function (forward, leaves, rest, seeds, exposed) -> (output, sites, derivatives). ``forward`` takes tensors
and a tap; ``leaves`` are differentiated and ``rest`` is not; ``seeds`` is the upstream cotangent, or the leaves'
tangents. Sites are recorded only if ``exposed``. ``derivatives`` has a cotangent for every leaf and site that got one,
or a tangent for every site and the output.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism, is_op_determinism_enabled

from diffgrad.adapters.base import Tap
from diffgrad.adapters.layout import buffer_of, to_nhwc
from diffgrad.how import How, Memory
from diffgrad.specs import Spec
from diffgrad.trace import Arrays

Tensors = dict[str, Any]
Forward = Callable[[Tensors, Tap], Any]
Result = tuple[Any, Tensors, Tensors]
Mode = Callable[[Forward, Tensors, Tensors, Any, bool], Result]

GRAPHS = ("function", "xla")
"""Modes that build a graph."""

# Otherwise XLA may leave out a rounding to bfloat16 in one consumer of a site and keep it in what is recorded.
_FAITHFUL = "--xla_allow_excess_precision=false"


def _reverse(forward: Forward, leaves: Tensors, rest: Tensors, dy: Any, exposed: bool) -> Result:
    sites: Tensors = {}
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        out = forward(leaves | rest, _recorder(sites, exposed))
    return out, sites, _present(tape.gradient(out, {**sites, **leaves}, output_gradients=dy))


def _checkpoint(forward: Forward, leaves: Tensors, rest: Tensors, dy: Any, exposed: bool) -> Result:
    """The backward runs the whole forward again; sites get cotangents through zeros that are added to them."""
    found: Tensors = {}
    forward(leaves | rest, _recorder(found, exposed))
    zeros = {site: tf.zeros_like(v) for site, v in found.items()}
    names = (*leaves, *zeros)
    runs: list[Tensors] = []

    def observed(*values: Any) -> Any:
        t = dict(zip(names, values, strict=True))
        sites: Tensors = {}
        runs.append(sites)
        record = _recorder(sites, exposed)
        return forward({k: t[k] for k in leaves} | rest, lambda site, v: record(site, v + t[site] if exposed else v))

    watched = leaves | zeros
    with tf.GradientTape() as tape:
        tape.watch(watched)
        out = tf.recompute_grad(observed)(*watched.values())
    return out, runs[0], _present(tape.gradient(out, watched, output_gradients=dy))


def _jvp(forward: Forward, leaves: Tensors, rest: Tensors, tangents: Tensors, exposed: bool) -> Result:
    sites: Tensors = {}
    with tf.autodiff.ForwardAccumulator(list(leaves.values()), [tangents[k] for k in leaves]) as moving:
        out = forward(leaves | rest, _recorder(sites, exposed))
    return out, sites, _present({name: moving.jvp(v) for name, v in (sites | {"out": out}).items()})


MODES: dict[str, Mode] = {
    "eager": _reverse,
    "function": _reverse,
    "xla": _reverse,
    "checkpoint": _checkpoint,
    "jvp": _jvp,
}
"""``How.mode`` -> how the derivatives are taken."""


def _recorder(sites: Tensors, exposed: bool) -> Tap:
    def tap(site: str, v: Any) -> Any:
        if exposed:
            sites[site] = v
        return v

    return tap


def _present(derivatives: Tensors) -> Tensors:
    """Those that the framework delivered."""
    return {k: v for k, v in derivatives.items() if v is not None}


# Memory


def buffers(spec: Spec, how: How, tensors: Arrays) -> Arrays:
    """The channels-last arrays that a case's tensors are views of."""
    memory = {name: _memory(spec, how, name) for name in tensors}
    # Equal slices lie along the canonical axis 0, which is a kernel's last one here.
    laid = to_nhwc(spec, {k: buffer_of(v, "expanded") if memory[k] == "expanded" else v for k, v in tensors.items()})
    return {k: v if memory[k] in ("", "expanded") else buffer_of(v, memory[k]) for k, v in laid.items()}


def views(spec: Spec, how: How, held: Tensors) -> Tensors:
    """The tensors that a block reads, from their buffers."""
    shapes = {t.name: t.shape for t in spec.tensors()}
    kernels = spec.kernels()
    return {k: _view(v, _memory(spec, how, k), _last(shapes[k], k in kernels)) for k, v in held.items()}


def _memory(spec: Spec, how: How, name: str) -> Memory:
    """What a tensor is a view of; constants are plain always."""
    constant = any(t.name == name for t in spec.constants())
    return "" if constant else how.memory(name, spec.input().name)


def _view(buffer: Any, memory: Memory, shape: tuple[int, ...]) -> Any:
    if not memory or not shape:
        return buffer
    match memory:
        case "step":
            return buffer[..., ::2]
        case "transposed":
            return tf.transpose(buffer)
        case "offset":
            return tf.reshape(buffer[1:], shape)
        case "expanded":
            return tf.broadcast_to(buffer, shape)


def _last(shape: tuple[int, ...], kernel: bool) -> tuple[int, ...]:
    """A canonical shape in channels-last order."""
    if len(shape) != 4:
        return shape
    return tuple(shape[i] for i in ((2, 3, 1, 0) if kernel else (0, 2, 3, 1)))


# Where and with what


def configure() -> None:
    """What can be set only before TensorFlow's first run in a process."""
    threads = int(os.environ.get("DIFFGRAD_NUM_THREADS", "1"))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if _FAITHFUL not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAITHFUL}".strip()


def settle(how: How) -> Any:
    """Apply a case's settings, all of them so that none is left from the case before; return its device's scope.

    Raises:
        RuntimeError: TensorFlow sees no such device.
    """
    tf.config.experimental.enable_tensor_float_32_execution(how.tf32)
    if how.deterministic != is_op_determinism_enabled():
        (tf.config.experimental.enable_op_determinism if how.deterministic else disable_op_determinism)()
    if how.device == "cuda" and not tf.config.list_physical_devices("GPU"):
        raise RuntimeError("device cuda: TensorFlow sees no GPU here")
    return tf.device(_PLACES[how.device])


def check_place(out: Any, how: How) -> None:
    """Raise RuntimeError if the output does not live where it was asked for."""
    if not out.device.endswith(_PLACES[how.device]):
        raise RuntimeError(f"device {how.device}: the output lives on {out.device}")


_PLACES = {"cpu": "CPU:0", "cuda": "GPU:0"}


def arrays(tensors: Tensors) -> Arrays:
    """Tensors -> NumPy arrays."""
    return {k: np.asarray(v.numpy()) for k, v in tensors.items()}  # a bfloat16 scalar is no array by itself
