"""The ways in which JAX takes a gradient, each as one function of a case's buffers: compiled whole, or run op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diffgrad.adapters.base import Tap
from diffgrad.adapters.layout import buffer_of
from diffgrad.adapters.registry import mode_of
from diffgrad.how import How, Memory
from diffgrad.specs import Spec
from diffgrad.trace import Arrays

Tensors = dict[str, jax.Array]

PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}
"""Devices by JAX's names."""

Forward = Callable[[Tensors, Tap], jax.Array]
"""forward(tensors, tap) -> output"""

Observed = Callable[[Tensors, Tensors], tuple[jax.Array, Tensors]]
"""observed(leaves, taps) -> output and activations; ``taps`` are zeros that are added at the sites."""


class Seen(NamedTuple):
    """What came out, by name; the tangents are forward mode's, which has no gradients and cotangents."""

    out: Any
    acts: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default, never written to)
    grads: dict[str, Any] = {}  # noqa: RUF012
    cots: dict[str, Any] = {}  # noqa: RUF012
    tangents: dict[str, Any] = {}  # noqa: RUF012


Step = Callable[[Tensors, Tensors], Seen]
"""step(buffers, taps) -> what came out. In forward mode the second argument is the leaves' tangents instead."""


def observed(forward: Forward, rest: Tensors) -> Observed:
    """The forward as a function of its leaves and of zeros at its sites."""

    def run(leaves: Tensors, taps: Tensors) -> tuple[jax.Array, Tensors]:
        acts: Tensors = {}

        def tap(site: str, v: jax.Array) -> jax.Array:
            acts[site] = v + taps[site] if site in taps else v
            return acts[site]

        return forward(leaves | rest, tap), acts

    return run


def unobserved(forward: Forward, rest: Tensors) -> Observed:
    """The same with nothing exposed but its output."""
    return lambda leaves, taps: (forward(leaves | rest, lambda site, v: v), {})


def step_of(spec: Spec, how: How, bare: bool, forward: Forward, shapes: dict[str, tuple[int, ...]]) -> Step:
    """The whole of a run: the views, the forward, and the derivative that the mode takes.

    Args:
        spec: the block.
        how: the mode, by name, and what its tensors are views of.
        bare: whether to expose nothing but inputs and outputs.
        forward: the block's forward.
        shapes: its tensors' shapes in the framework's layout.
    """
    expose = unobserved if bare else observed

    def step(buffers: Tensors, taps: Tensors) -> Seen:
        t = {k: _view(v, memory_of(spec, how, k), shapes[k]) for k, v in buffers.items()}
        leaves = {k: t[k] for k in spec.differentiated()}
        run = expose(forward, {k: v for k, v in t.items() if k not in leaves and k != "dy"})
        if how.mode == "jvp":
            (out, acts), (moved, tangents) = jax.jvp(lambda p: run(p, {}), (leaves,), (taps,))
            return Seen(out, acts, tangents=tangents | {"out": moved})
        out, acts, (grads, cots) = _DERIVATIVES[how.mode](run, leaves, taps, t["dy"])
        return Seen(out, acts, grads, cots)

    return step


_Derivative = tuple[jax.Array, Tensors, tuple[Tensors, Tensors]]


def _vjp(run: Observed, leaves: Tensors, taps: Tensors, dy: jax.Array) -> _Derivative:
    out, pull, acts = jax.vjp(run, leaves, taps, has_aux=True)
    return out, acts, pull(dy)


def _checkpoint(run: Observed, leaves: Tensors, taps: Tensors, dy: jax.Array) -> _Derivative:
    """The backward runs the forward again."""
    return _vjp(jax.checkpoint(run), leaves, taps, dy)


def _linearize(run: Observed, leaves: Tensors, taps: Tensors, dy: jax.Array) -> _Derivative:
    out, push, acts = jax.linearize(run, leaves, taps, has_aux=True)
    return out, acts, jax.linear_transpose(push, leaves, taps)(dy)


_DERIVATIVES: dict[str, Callable[[Observed, Tensors, Tensors, jax.Array], _Derivative]] = {
    "jit": _vjp,
    "eager": _vjp,
    "checkpoint": _checkpoint,
    "linearize": _linearize,
}


def memory_of(spec: Spec, how: How, name: str) -> Memory:
    """What a tensor is a view of; the constants never are one."""
    return "" if name in {t.name for t in spec.constants()} else how.memory(name, spec.input().name)


def buffers_of(spec: Spec, how: How, tensors: Arrays) -> Arrays:
    """The buffers that the tensors, in the framework's layout, are views of."""
    return {k: _buffer(spec, k, v, memory_of(spec, how, k)) for k, v in tensors.items()}


def _buffer(spec: Spec, name: str, v: NDArray[Any], memory: Memory) -> NDArray[Any]:
    if not memory or not v.ndim:
        return v
    if memory == "expanded" and name in spec.kernels():
        return np.ascontiguousarray(v[..., :1])  # the output channels come last here
    return buffer_of(v, memory)


def _view(buffer: jax.Array, memory: Memory, shape: tuple[int, ...]) -> jax.Array:
    if not shape:
        return buffer
    match memory:
        case "step":
            return buffer[..., ::2]
        case "transposed":
            return buffer.T
        case "offset":
            return buffer[1:].reshape(shape)
        case "expanded":
            return jnp.broadcast_to(buffer, shape)
    return buffer


def program_conditions(how: How) -> How:
    """The conditions that shape a program: what is not JAX's, or makes no difference to it, is left out of its key."""
    return How(
        mode=mode_of("jax", how),  # type: ignore[arg-type]
        layout=how.layout,
        x=how.x,
        dy=how.dy if how.mode != "jvp" else "",
        params=how.params,
        norm=how.norm,
        conv=how.conv,
        device=how.device,
        tf32=how.tf32,
    )


def shaped(tensors: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What a program is compiled for."""
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in tensors.items()}


def on_device(*groups: Tensors) -> tuple[Tensors, ...]:
    """JAX's own arrays: what is done to NumPy's alone would be done by NumPy."""
    return tuple({k: jnp.asarray(v) for k, v in group.items()} for group in groups)


def fetch(seen: Seen, how: How) -> Seen:
    """The results as NumPy arrays, once it is sure where they were computed."""
    found = {d.platform for d in seen.out.devices()}
    if found != {PLATFORMS[how.device]}:
        raise RuntimeError(f"how.device = {how.device}: the output is on {', '.join(sorted(found))}")
    return cast(Seen, jax.tree.map(np.asarray, seen))
