"""TensorFlow's convolutions and norms, each in the realizations that a run's conditions name.

Maps are NHWC, kernels HWIO, depthwise kernels [kH,kW,1,C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.context import eager_mode

from diffgrad.how import How
from diffgrad.specs import EPS

Pads = tuple[int, int, int, int]
Padding = str | Pads
"""``VALID``, ``SAME``, or top, bottom, left and right; a negative one crops."""

_SPATIAL = {"NHWC": slice(1, 3), "NCHW": slice(2, 4)}
_DATA_FORMAT = {"NHWC": "channels_last", "NCHW": "channels_first"}


class Layers:
    """The layers that blocks are made of, under the conditions of one run."""

    def __init__(self, how: How) -> None:
        self._form = "NCHW" if how.layout == "channels_first" else "NHWC"
        self._conv = CONVS.get(how.conv, CONVS[""])
        self._depthwise = DEPTHWISE.get(how.conv, DEPTHWISE[""])
        self._batch_norm = BATCH_NORMS.get(how.norm, BATCH_NORMS[""])
        self._layer_norm = LAYER_NORMS.get(how.norm, LAYER_NORMS[""])

    def conv(self, x: Any, w: Any, stride: int = 1, padding: Padding = "VALID") -> Any:
        """A convolution without bias."""
        return self._in_form(self._conv, x, w, stride, padding)

    def depthwise(self, x: Any, w: Any, stride: int = 1, padding: Padding | None = None) -> Any:
        """A depthwise convolution without bias, symmetrically padded unless another padding is named."""
        return self._in_form(self._depthwise, x, w, stride, padding or symmetric(w.shape[0]))

    def bn(self, x: Any, g: Any, b: Any) -> Any:
        """Batch norm in training mode."""
        return self._batch_norm(x, g, b)

    def ln(self, x: Any, norm: str, g: Any, b: Any) -> Any:
        """Layer norm over the last axis, or with ``scalar`` over the whole map with one gamma and beta."""
        return self._layer_norm(x, (1, 2, 3) if norm == "scalar" else (-1,), g, b)

    def token_ln(self, x: Any, g: Any, b: Any) -> Any:
        """Layer norm of every token, gamma and beta per number or one of each."""
        return self._layer_norm(x, (-1,), g, b)

    def _in_form(self, convolve: Callable[..., Any], x: Any, w: Any, stride: int, padding: Padding) -> Any:
        """Convolve in the run's memory order; whatever is around stays NHWC."""
        if not isinstance(padding, str) and min(padding) < 0:
            x, padding = _cropped(x, padding), "VALID"
        if self._form == "NHWC":
            return convolve(x, w, stride, padding, "NHWC")
        y = convolve(tf.transpose(x, (0, 3, 1, 2)), w, stride, padding, "NCHW")
        return tf.transpose(y, (0, 2, 3, 1))


def symmetric(k: int) -> Pads:
    """The padding that keeps the size at stride 1, for an odd kernel."""
    return (k // 2,) * 4


def _cropped(x: Any, pads: Pads) -> Any:
    """Padded by what is positive, then cropped by what is negative: a crop may reach into the other side's padding."""
    top, bottom, left, right = pads
    v = tf.pad(x, _spread((max(top, 0), max(bottom, 0), max(left, 0), max(right, 0)), "NHWC"))
    rows = slice(max(-top, 0), v.shape[1] - max(-bottom, 0))
    return v[:, rows, max(-left, 0) : v.shape[2] - max(-right, 0)]


def _spread(pads: Pads, form: str) -> list[list[int]]:
    """Paddings as TensorFlow writes them, a pair for each axis."""
    pairs = [[0, 0]] * 4
    pairs[_SPATIAL[form]] = [list(pads[:2]), list(pads[2:])]
    return pairs


def _explicit(padding: Padding, form: str) -> Any:
    return padding if isinstance(padding, str) else _spread(padding, form)


# Convolutions: (x, w, stride, padding, memory order) -> y.


def _conv2d(x: Any, w: Any, stride: int, padding: Padding, form: str) -> Any:
    return tf.nn.conv2d(x, w, stride, _explicit(padding, form), data_format=form)


def _conv2d_layer(x: Any, w: Any, stride: int, padding: Padding, form: str) -> Any:
    x, word = _padded(x, padding, form)
    options = {"data_format": _DATA_FORMAT[form], "use_bias": False, "kernel_initializer": "zeros"}
    return _called(keras.layers.Conv2D(w.shape[3], w.shape[:2], stride, word, dtype=x.dtype.name, **options), (w,), x)


def _depthwise_conv2d(x: Any, w: Any, stride: int, padding: Padding, form: str) -> Any:
    strides = [1, 1, 1, 1]
    strides[_SPATIAL[form]] = [stride, stride]
    kernel = tf.transpose(w, (0, 1, 3, 2))
    return tf.nn.depthwise_conv2d(x, kernel, strides, _explicit(padding, form), data_format=form)


def _depthwise_layer(x: Any, w: Any, stride: int, padding: Padding, form: str) -> Any:
    x, word = _padded(x, padding, form)
    options = {"data_format": _DATA_FORMAT[form], "use_bias": False, "depthwise_initializer": "zeros"}
    layer = keras.layers.DepthwiseConv2D(w.shape[:2], stride, word, dtype=x.dtype.name, **options)
    return _called(layer, (tf.transpose(w, (0, 1, 3, 2)),), x)


def _padded(x: Any, padding: Padding, form: str) -> tuple[Any, str]:
    """Keras's layers know padding by word only."""
    return (x, padding.lower()) if isinstance(padding, str) else (tf.pad(x, _spread(padding, form)), "valid")


CONVS: dict[str, Callable[..., Any]] = {"": _conv2d, "layer": _conv2d_layer}
"""``How.conv`` -> convolution over all channels."""

DEPTHWISE: dict[str, Callable[..., Any]] = {"": _depthwise_conv2d, "grouped": _conv2d, "layer": _depthwise_layer}
"""``How.conv`` -> depthwise convolution; a kernel [kH,kW,1,C] makes conv2d a grouped one."""


# Batch norms (x, gamma, beta) -> y, and layer norms (x, axes, gamma, beta) -> y.


def _bn(x: Any, g: Any, b: Any) -> Any:
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def _bn_composed(x: Any, g: Any, b: Any) -> Any:
    return _composed(x, (0, 1, 2), g, b)


def _bn_fused(x: Any, g: Any, b: Any) -> Any:
    low = x.dtype in (tf.bfloat16, tf.float16)  # the op takes its pair in float32 then
    g, b = (tf.cast(v, tf.float32) if low else v for v in (g, b))
    return tf.compat.v1.nn.fused_batch_norm(x, g, b, epsilon=EPS)[0]


def _bn_layer(x: Any, g: Any, b: Any) -> Any:
    return _called(keras.layers.BatchNormalization(epsilon=EPS, dtype=x.dtype.name), (g, b), x, training=True)


def _ln(x: Any, axes: tuple[int, ...], g: Any, b: Any) -> Any:
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def _ln_layer(x: Any, axes: tuple[int, ...], g: Any, b: Any) -> Any:
    if g.shape != x.shape[-1:] or axes != (-1,):  # the layer has no scalar gamma
        return _ln(x, axes, g, b)
    return _called(keras.layers.LayerNormalization(epsilon=EPS, dtype=x.dtype.name), (g, b), x)


def _composed(x: Any, axes: tuple[int, ...], g: Any, b: Any) -> Any:
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), axes, keepdims=True)
    return centred * tf.math.rsqrt(variance + EPS) * g + b


BATCH_NORMS: dict[str, Callable[..., Any]] = {
    "": _bn,
    "composed": _bn_composed,
    "fused": _bn_fused,
    "layer": _bn_layer,
}
"""``How.norm`` -> batch norm."""

LAYER_NORMS: dict[str, Callable[..., Any]] = {"": _ln, "composed": _composed, "layer": _ln_layer}
"""``How.norm`` -> layer norm."""


def _called(layer: Any, parameters: tuple[Any, ...], x: Any, **options: bool) -> Any:
    """A Keras layer applied with our tensors in the place of its variables, so that they get the gradients."""
    with tf.Graph().as_default(), eager_mode():  # a graph that is being built would not let it make variables
        layer.build(x.shape)
    running = [tf.zeros(v.shape, v.dtype) for v in layer.non_trainable_variables]  # statistics that training ignores
    return layer.stateless_call(parameters, running, x, **options)[0]
