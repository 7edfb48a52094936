"""TensorFlow: NHWC, eager, GradientTape with respect to parameters and tapped activations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from diffgrad.adapters.base import Adapter, Stopwatch, Tap
from diffgrad.adapters.layout import from_nhwc, to_nhwc
from diffgrad.case import Case
from diffgrad.specs import EPS, UibSpec
from diffgrad.trace import Arrays, Trace

Tensors = dict[str, Any]


class TensorFlowAdapter(Adapter):
    """TensorFlow eager on CPU."""

    name = "tensorflow"
    mode = "eager"

    def __init__(self) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)

    def versions(self) -> dict[str, str]:
        return {"tensorflow": tf.__version__}

    def devices(self) -> tuple[str, ...]:
        return tuple(d.name for d in tf.config.list_physical_devices())

    def trace(self, case: Case, tensors: Arrays) -> tuple[Trace, float]:
        spec = case.block
        t = {name: tf.constant(v) for name, v in to_nhwc(spec, tensors).items()}
        leaves = {p.name: t[p.name] for p in (spec.input(), *spec.parameters())}
        sites: Tensors = {}

        def tap(site: str, v: Any) -> Any:
            sites[site] = v
            return v

        with Stopwatch() as clock:
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                out = self.block(spec)(spec, t, tap)
            wanted = {**sites, **leaves}
            got = tape.gradient(out, wanted, output_gradients=t["dy"])
        cots = {name: g.numpy() for name, g in got.items() if g is not None}
        x = spec.input().name
        return (
            Trace(
                acts=from_nhwc(spec, {s: v.numpy() for s, v in sites.items()} | {"out": out.numpy()}),
                cots=from_nhwc(spec, {s: g for s, g in cots.items() if s in sites or s == x}),
                grads=from_nhwc(spec, {s: g for s, g in cots.items() if s in leaves and s != x}),
            ),
            clock.seconds,
        )

    def uib(self, b: UibSpec, t: Tensors, tap: Tap) -> Any:
        """Universal inverted bottleneck, stride 1."""
        v = tap("xb", tf.identity(t["x"]))
        if b.pre_k:
            v = tap("qc", _depthwise(v, t["qW"]))
            v = tap("qn", _bn(v, t["qg"], t["qbt"]))
        v = tap("ec", tf.nn.conv2d(v, t["eW"], 1, "VALID"))
        v = tap("en", _bn(v, t["eg"], t["ebt"]))
        v = tap("er", tf.nn.relu(v))
        if b.post_k:
            v = tap("dc", _depthwise(v, t["dW"]))
            v = tap("dn", _bn(v, t["dg"], t["dbt"]))
            v = tap("dr", tf.nn.relu(v))
        v = tap("pc", tf.nn.conv2d(v, t["pW"], 1, "VALID"))
        v = tap("pn", _bn(v, t["pg"], t["pbt"]))
        if b.drop:
            v = tap("pd", v * t["drop"][:, None, None, None])
        return v + t["x"]


def _depthwise(x: Any, w: Any) -> Any:
    """[kH,kW,1,C] -> TensorFlow's [kH,kW,C,1], stride 1, symmetric padding."""
    return tf.nn.depthwise_conv2d(x, tf.transpose(w, (0, 1, 3, 2)), (1, 1, 1, 1), "SAME")


def _bn(x: Any, g: Any, b: Any) -> Any:
    mean, variance = tf.nn.moments(x, (0, 1, 2))
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def adapter(quick: bool = False) -> TensorFlowAdapter:
    """The adapter of this file; nothing is compiled, so ``quick`` changes nothing."""
    return TensorFlowAdapter()
