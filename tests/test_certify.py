"""The oracle's certification, that it can fail, and a second one that shares nothing with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
from mpmath import mpf
from numpy.typing import NDArray

from diffgrad import ops
from diffgrad.bars import PRECISIONS, Bounded, quiet, recorded
from diffgrad.certify import OPS, Certificate, certify_block, certify_op
from diffgrad.chains import chain_of
from diffgrad.ops import BatchNorm, Conv2d, Depthwise, Op, Relu, Vjp
from diffgrad.oracle import Walk
from diffgrad.specs import Drop, UibSpec
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
    """The first link's: its gradient nodes are wrong then."""
    first = next(type(link.op) for link in chain_of(specs(kind)[0]).links if link.feeds)
    monkeypatch.setattr(first, "vjp", off_by_a_thousandth(first, -1))
    assert not certify_block(kind, instances=5).holds


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
SMALL: dict[str, tuple[Op, Callable[[Tensors], NDArray[Any]], dict[str, tuple[int, ...]], int]] = {
    # op, forward, operand shapes (the input, then the parameters), output channels
    "conv2d": (Conv2d(), lambda t: conv(t["x"], t["w"]), {"x": MAP, "w": (3, 2, 3, 3)}, 3),
    "conv1x1": (Conv2d(), lambda t: conv(t["x"], t["w"]), {"x": MAP, "w": (1, 2, 1, 1)}, 1),
    "depthwise": (Depthwise(), lambda t: conv(t["x"], t["w"], True), {"x": MAP, "w": (2, 1, 3, 3)}, 2),
    "k over h": (Depthwise(), lambda t: conv(t["x"], t["w"], True), {"x": MAP, "w": (2, 1, 5, 5)}, 2),
    "batchnorm": (BatchNorm(), lambda t: bn(t["x"], t["g"], t["b"]), {"x": MAP, "g": (2,), "b": (2,)}, 2),
    "relu": (Relu(), lambda t: relu(t["x"]), {"x": MAP}, 2),
}


@pytest.mark.parametrize("name", SMALL)
def test_ops_against_fifty_digits(name: str) -> None:
    op, forward, shapes, channels = SMALL[name]
    values = drawn(shapes | {"dy": (MAP[0], channels, *MAP[2:])}, key=len(name))
    with mpmath.workdps(DIGITS):
        t = {k: dense(v.shape, lambda *i, v=v: mpf(float(v[i]))) for k, v in values.items()}
        x, *params = (recorded(values[k], P64) for k in shapes)
        with quiet():
            v = op.vjp((x,), tuple(params), recorded(values["dy"], P64))
            assert_within(op.bound((x,), tuple(params)), forward(t))
        for operand, b in zip(shapes, (*v.inputs, *v.params), strict=True):
            assert_within(b, differences(forward, t, operand))


def test_a_whole_uib_against_fifty_digits() -> None:
    spec = UibSpec(n=2, h=2, w=1, c=1, expand=2, pre_k=3, post_k=3, drop=Drop(0.8, (True, False)))
    values = drawn({t.name: t.shape for t in spec.tensors()}, key=5) | {"drop": np.array([1.25, 0.0])}
    chain = chain_of(spec)
    e = Walk(chain, values, P64).run()
    with mpmath.workdps(DIGITS):
        t = {k: dense(v.shape, lambda *i, v=v: mpf(float(v[i]))) for k, v in values.items()}
        assert_within(e.acts["out"], uib(t))
        assert_within(e.cots["x"], differences(uib, t, "x"))
        for node, b in e.grads.items():
            assert_within(b, differences(uib, t, node))
