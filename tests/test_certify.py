"""The oracle's certification, that it can fail, and a second one that shares nothing with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from mpmath import mpf
from numpy.typing import NDArray

from diffgrad import ops, tangents
from diffgrad.bars import PRECISIONS, Bounded, quiet, recorded
from diffgrad.certify import OPS, Certificate, certify_block, certify_op
from diffgrad.chains import chain_of
from diffgrad.ops import Attention, BatchNorm, Conv2d, Depthwise, LayerNorm, Op, Relu, SoftmaxRows, Vjp
from diffgrad.oracle import Walk
from diffgrad.specs import Drop, EncoderSpec, Spec, UibSpec
from diffgrad.values import Bits
from tests.helpers import KINDS, specs

P64 = PRECISIONS["float64"]
CLASSES: dict[str, type[Op]] = {
    name.lower(): op
    for name in ops.__all__
    if isinstance(op := getattr(ops, name), type) and issubclass(op, Op) and op is not Op
}


def test_every_op_has_a_row() -> None:
    assert set(OPS) == set(CLASSES)


@pytest.mark.parametrize("name", OPS)
def test_every_vjp_is_the_derivative_of_its_forward(name: str) -> None:
    certificate = certify_op(name)
    assert certificate.holds, certificate
    assert certificate.checks >= 40


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_is_the_derivative_of_its_forward(kind: str) -> None:
    certificate = certify_block(kind)
    assert certificate.holds, certificate


# The certification must itself be able to fail.


def off_by_a_thousandth(op: type[Op], position: int) -> Callable[..., Vjp]:
    """The op's VJP with one cotangent (inputs first) 0.1% too large."""
    right = op.vjp

    def wrong(self: Op, *args: Any) -> Vjp:
        v = right(self, *args)
        both = [*v.inputs, *v.params]
        i = position % len(both)
        both[i] = Bounded(both[i].val * 1.001, both[i].err, both[i].p)
        return Vjp(tuple(both[: len(v.inputs)]), tuple(both[len(v.inputs) :]))

    return wrong


@pytest.mark.parametrize("position", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", OPS)
def test_a_vjp_off_by_a_thousandth_is_not_certified(name: str, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLASSES[name], "vjp", off_by_a_thousandth(CLASSES[name], position))
    certificate = certify_op(name)
    assert not certificate.holds
    assert certificate.worst_over_bar > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_such_a_vjp_is_not_certified(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first link's that has gradient nodes, if any has: they are wrong then."""
    links = chain_of(specs(kind)[0]).links
    first = next(type(link.op) for link in (*(link for link in links if link.feeds), *links))
    monkeypatch.setattr(first, "vjp", off_by_a_thousandth(first, -1))
    assert not certify_block(kind, instances=5).holds


def tangents_off_by_a_thousandth(monkeypatch: pytest.MonkeyPatch, *ops: type[Op]) -> None:
    """Make the tangents of some ops 0.1% too large."""
    for op in ops:
        right = tangents.RULES[op]

        def wrong(*args: Any, right: Callable[..., Bounded] = right) -> Bounded:
            t = right(*args)
            return Bounded(t.val * 1.001, t.err, t.p, t.cancelled)

        monkeypatch.setitem(tangents.RULES, op, wrong)


@pytest.mark.parametrize("name", OPS)
def test_a_tangent_off_by_a_thousandth_is_not_certified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tangents_off_by_a_thousandth(monkeypatch, CLASSES[name])
    assert not certify_op(name).holds


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_such_a_tangent_is_not_certified(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last link's, through which every tangent goes."""
    tangents_off_by_a_thousandth(monkeypatch, type(chain_of(specs(kind)[0]).links[-1].op))
    assert not certify_block(kind, instances=5).holds


def test_every_op_has_a_rule_for_its_tangent() -> None:
    assert set(tangents.RULES) == set(CLASSES.values())


@pytest.mark.parametrize(("over_bar", "holds"), [(0.0, True), (1.0, True), (1.01, False), (float("nan"), False)])
def test_a_certificate_holds_only_within_its_bar(over_bar: float, holds: bool) -> None:
    assert Certificate("op", 1, 0.0, over_bar).holds is holds


def test_a_nan_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relu, "forward", lambda self, xs, ps: xs[0] * float("nan"))
    assert not certify_op("relu", instances=2).holds


# The second certification: forwards written here in mpmath, differentiated by central differences. The 50 digits that
# are wanted and 20 more, so that a difference over a step of a power of two is exact where the map is linear.

Tensors = Mapping[str, Any]
DIGITS = 70
H = mpf(2) ** -66  # about 1e-20


def dense(shape: tuple[int, ...], at: Callable[..., Any]) -> NDArray[Any]:
    out = np.empty(shape, object)
    for index in np.ndindex(*shape):
        out[index] = at(*index)
    return out


def conv(x: NDArray[Any], w: NDArray[Any], depthwise: bool = False) -> NDArray[Any]:
    """Stride 1, symmetric."""
    (n, _, height, width), (outs, ins, k, _) = x.shape, w.shape
    lo = (k - 1) // 2

    def at(m: int, o: int, i: int, j: int) -> Any:
        total = mpf(0)
        for c, a, b in np.ndindex(ins, k, k):
            p, q = i + a - lo, j + b - lo
            if 0 <= p < height and 0 <= q < width:
                total += w[o, c, a, b] * x[m, o if depthwise else c, p, q]
        return total

    return dense((n, outs, height, width), at)


def bn(x: NDArray[Any], g: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    out = np.empty(x.shape, object)
    for c in range(x.shape[1]):
        v = x[:, c]
        mean = v.sum() / v.size
        variance = ((v - mean) ** 2).sum() / v.size
        out[:, c] = g[c] * (v - mean) / mpmath.sqrt(variance + mpf(1e-5)) + b[c]
    return out


def relu(x: NDArray[Any]) -> NDArray[Any]:
    return dense(x.shape, lambda *i: x[i] if x[i] > 0 else mpf(0))


def uib(t: Tensors) -> NDArray[Any]:
    v = bn(conv(t["x"], t["qW"], True), t["qg"], t["qbt"])
    v = relu(bn(conv(v, t["eW"]), t["eg"], t["ebt"]))
    v = relu(bn(conv(v, t["dW"], True), t["dg"], t["dbt"]))
    v = bn(conv(v, t["pW"]), t["pg"], t["pbt"])
    return np.asarray(v * t["drop"][:, None, None, None] + t["x"])


def norm(x: NDArray[Any], g: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Layer norm of each token."""
    out = np.empty(x.shape, object)
    for n, t in np.ndindex(x.shape[:2]):
        v = x[n, t]
        mean = v.sum() / v.size
        variance = ((v - mean) ** 2).sum() / v.size
        out[n, t] = g * (v - mean) / mpmath.sqrt(variance + mpf(1e-5)) + b
    return out


def softmax(z: NDArray[Any]) -> NDArray[Any]:
    powers = dense(z.shape, lambda *i: mpmath.exp(z[i]))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], heads: int) -> NDArray[Any]:
    out = np.empty(q.shape, object)
    d = q.shape[2] // heads
    for n, h in np.ndindex(q.shape[0], heads):
        slab = slice(h * d, (h + 1) * d)
        p = softmax(q[n, :, slab] @ k[n, :, slab].T / mpmath.sqrt(d))
        out[n, :, slab] = p @ v[n, :, slab]
    return out


def gelu(x: NDArray[Any]) -> NDArray[Any]:
    root = mpmath.sqrt(2 / mpmath.pi)
    return dense(x.shape, lambda *i: x[i] / 2 * (1 + mpmath.tanh(root * (x[i] + mpf("0.044715") * x[i] ** 3))))


def encoder(t: Tensors) -> NDArray[Any]:
    """Two heads, both drop sites."""
    v = norm(t["x"], t["ln1g"], t["ln1bt"])
    q, k, u = (v @ t[f"W{s}"] + t[f"b{s}"] for s in "qkv")
    v = attention(q, k, u, 2) @ t["Wo"] + t["bo"]
    h = v * t["drop_a"][:, None, None] + t["x"]
    v = norm(h, t["ln2g"], t["ln2bt"]) @ t["Wfc1"] + t["bfc1"]
    v = gelu(v) @ t["Wfc2"] + t["bfc2"]
    return np.asarray(v * t["drop_m"][:, None, None] + h)


def differences(forward: Callable[[Tensors], NDArray[Any]], t: Tensors, name: str) -> NDArray[Any]:
    """d<dy, forward>/d name by central differences, elementwise."""

    def loss(index: tuple[int, ...], step: Any) -> Any:
        moved = t[name].copy()
        moved[index] += step
        return (t["dy"] * forward({**t, name: moved})).sum()

    return dense(t[name].shape, lambda *i: (loss(i, H) - loss(i, -H)) / (2 * H))


def drawn(shapes: Mapping[str, tuple[int, ...]], key: int) -> dict[str, NDArray[np.float64]]:
    return {name: Bits(key, name).normal(shape) for name, shape in shapes.items()}


def assert_within(b: Bounded, exact: NDArray[Any]) -> None:
    assert b.val.shape == exact.shape
    for index in np.ndindex(*exact.shape):
        assert abs(mpf(float(b.val[index])) - exact[index]) <= mpf(float(b.err[index])), index


MAP = (2, 2, 2, 3)
TOKENS = (2, 2, 4)
SMALL: dict[str, tuple[Op, Callable[[Tensors], NDArray[Any]], dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    # op, forward, operand shapes (the inputs, then the parameters), output shape
    "conv2d": (Conv2d(), lambda t: conv(t["x"], t["w"]), {"x": MAP, "w": (3, 2, 3, 3)}, (2, 3, 2, 3)),
    "conv1x1": (Conv2d(), lambda t: conv(t["x"], t["w"]), {"x": MAP, "w": (1, 2, 1, 1)}, (2, 1, 2, 3)),
    "depthwise": (Depthwise(), lambda t: conv(t["x"], t["w"], True), {"x": MAP, "w": (2, 1, 3, 3)}, MAP),
    "k over h": (Depthwise(), lambda t: conv(t["x"], t["w"], True), {"x": MAP, "w": (2, 1, 5, 5)}, MAP),
    "batchnorm": (BatchNorm(), lambda t: bn(t["x"], t["g"], t["b"]), {"x": MAP, "g": (2,), "b": (2,)}, MAP),
    "relu": (Relu(), lambda t: relu(t["x"]), {"x": MAP}, MAP),
    "layernorm": (
        LayerNorm(kind="token"),
        lambda t: norm(t["x"], t["g"], t["b"]),
        {"x": TOKENS, "g": (4,), "b": (4,)},
        TOKENS,
    ),
    "softmax": (SoftmaxRows(), lambda t: softmax(t["x"]), {"x": MAP}, MAP),
    "attention": (
        Attention(2),
        lambda t: attention(t["x"], t["k"], t["v"], 2),
        {"x": TOKENS, "k": TOKENS, "v": TOKENS},
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_ops_against_fifty_digits(name: str) -> None:
    op, forward, shapes, output = SMALL[name]
    values = drawn(shapes | {"dy": output}, key=len(name))
    with mpmath.workdps(DIGITS):
        t = {k: dense(v.shape, lambda *i, v=v: mpf(float(v[i]))) for k, v in values.items()}
        operands = tuple(recorded(values[k], P64) for k in shapes)
        inputs = 3 if isinstance(op, Attention) else 1
        with quiet():
            v = op.vjp(operands[:inputs], operands[inputs:], recorded(values["dy"], P64))
            assert_within(op.bound(operands[:inputs], operands[inputs:]), forward(t))
        for operand, b in zip(shapes, (*v.inputs, *v.params), strict=True):
            assert_within(b, differences(forward, t, operand))


DROP = Drop(0.8, (True, False))
WHOLE: dict[str, tuple[Spec, Callable[[Tensors], NDArray[Any]]]] = {
    "uib": (UibSpec(n=2, h=2, w=1, c=1, expand=2, pre_k=3, post_k=3, drop=DROP), uib),
    "encoder": (
        EncoderSpec(n=2, t=2, heads=2, head_dim=1, mlp=3, drop_a=DROP, drop_m=Drop(0.5, (True, True))),
        encoder,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_block_against_fifty_digits(name: str) -> None:
    spec, forward = WHOLE[name]
    values = drawn({t.name: t.shape for t in spec.tensors()}, key=5)
    values |= {t.name: np.array(spec.scales(t.name)) for t in spec.constants()}
    chain = chain_of(spec)
    e = Walk(chain, values, P64).run()
    with mpmath.workdps(DIGITS):
        t = {k: dense(v.shape, lambda *i, v=v: mpf(float(v[i]))) for k, v in values.items()}
        assert_within(e.acts["out"], forward(t))
        assert_within(e.cots["x"], differences(forward, t, "x"))
        for node, b in e.grads.items():
            assert_within(b, differences(forward, t, node))
