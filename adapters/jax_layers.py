"""JAX's ways to compute a norm and a convolution, by the names that ``How`` gives them. Maps are NHWC, kernels HWIO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from diffgrad.how import How
from diffgrad.specs import EPS

Padding = str | tuple[tuple[int, int], tuple[int, int]]
"""SAME, VALID, or what is added (negative: taken away) before and after each of height and width."""

NormFn = Callable[[jax.Array, tuple[int, ...], jax.Array, jax.Array], jax.Array]
"""norm(x, axes, gamma, beta), the statistics over ``axes``."""

BATCH_AXES = (0, 1, 2)


class ConvArgs(NamedTuple):
    """What a convolution is told besides its operands. ``groups`` is 1, or the number of channels for a depthwise."""

    stride: int
    padding: Padding
    groups: int


ConvFn = Callable[[jax.Array, jax.Array, ConvArgs], jax.Array]


def norm_of(how: How) -> NormFn:
    """The norm that the conditions name."""
    return _NORMS[how.norm]


def conv_of(how: How) -> ConvFn:
    """The convolution that the conditions name. The layer is channels-last only, whatever the layout."""
    return _CONVS[how.conv, how.layout]


def _composed(x: jax.Array, axes: tuple[int, ...], g: jax.Array, b: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axes, keepdims=True)
    var = jnp.var(x, axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + EPS) * g + b


def _standardize(x: jax.Array, axes: tuple[int, ...], g: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axes, epsilon=EPS) * g + b


def _flax_norm(fast: bool, x: jax.Array, axes: tuple[int, ...], g: jax.Array, b: jax.Array) -> jax.Array:
    """Flax's batch norm, or its layer norm; a gamma and beta of one element, which the latter lacks, come after it."""
    from flax import nnx

    own = axes == BATCH_AXES or (axes == (-1,) and g.shape == x.shape[-1:])
    settings: dict[str, Any] = {
        "epsilon": EPS,
        "dtype": x.dtype,
        "param_dtype": x.dtype,
        "use_scale": own,
        "use_bias": own,
        "scale_init": _given(g),
        "bias_init": _given(b),
        "use_fast_variance": fast,
        "rngs": nnx.Rngs(0),
    }
    if axes == BATCH_AXES:
        y: jax.Array = nnx.BatchNorm(x.shape[-1], **settings)(x)
    else:
        y = nnx.LayerNorm(x.shape[-1], reduction_axes=axes, **settings)(x)
    return y if own else y * g + b


def _given(v: jax.Array) -> Callable[..., jax.Array]:
    """An initializer that makes a parameter just this tensor, and so lets gradients through to it."""
    return lambda key, shape, dtype: v


def _lax_conv(x: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w,
        (args.stride, args.stride),
        args.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=args.groups,
    )


def _lax_conv_first(x: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    y = lax.conv_general_dilated(
        x.transpose(0, 3, 1, 2),
        w.transpose(3, 2, 0, 1),
        (args.stride, args.stride),
        args.padding,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=args.groups,
    )
    return y.transpose(0, 2, 3, 1)


def _unfold_conv(x: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return _product(lax.conv_general_dilated_patches(x, *_window(w, args), dimension_numbers=numbers), w, args)


def _unfold_conv_first(x: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    numbers = ("NCHW", "OIHW", "NCHW")
    x = x.transpose(0, 3, 1, 2)
    patches = lax.conv_general_dilated_patches(x, *_window(w, args), dimension_numbers=numbers)
    return _product(patches.transpose(0, 2, 3, 1), w, args)


def _window(w: jax.Array, args: ConvArgs) -> tuple[tuple[int, ...], tuple[int, int], Padding]:
    return w.shape[:2], (args.stride, args.stride), args.padding


def _product(patches: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    """Patches [N,H,W,C*kH*kW], the channel slowest, times the kernel."""
    rows = w.transpose(2, 0, 1, 3).reshape(-1, w.shape[-1])
    if args.groups == 1:
        return jnp.dot(patches, rows)
    patches = patches.reshape(*patches.shape[:3], args.groups, len(rows))
    return jnp.einsum("nhwck,kc->nhwc", patches, rows)


def _flax_conv(x: jax.Array, w: jax.Array, args: ConvArgs) -> jax.Array:
    from flax import nnx

    layer = nnx.Conv(
        x.shape[-1],
        w.shape[-1],
        w.shape[:2],
        args.stride,
        padding=args.padding,
        feature_group_count=args.groups,
        use_bias=False,
        dtype=x.dtype,
        param_dtype=x.dtype,
        kernel_init=_given(w),
        rngs=nnx.Rngs(0),
    )
    return layer(x)


_NORMS: dict[str, NormFn] = {
    "": _composed,
    "fused": _standardize,
    "layer": partial(_flax_norm, False),
    "fast": partial(_flax_norm, True),
}

_CONVS: dict[tuple[str, str], ConvFn] = {
    ("", ""): _lax_conv,
    ("", "channels_first"): _lax_conv_first,
    ("unfold", ""): _unfold_conv,
    ("unfold", "channels_first"): _unfold_conv_first,
    ("layer", ""): _flax_conv,
    ("layer", "channels_first"): _flax_conv,
}
