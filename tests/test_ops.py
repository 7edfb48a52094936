"""Each op against its formula in FORMULAS section 1, written out in loops, and against real float32 runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffgrad.bars import PRECISIONS, Bounded, Precision, quiet, recorded
from diffgrad.certify import OPS
from diffgrad.ops import BatchNorm, Conv2d, Depthwise, DropPath, Op, Relu, Vjp
from diffgrad.ops.conv import Padding
from diffgrad.specs import EPS
from diffgrad.values import Bits

P32, P64 = PRECISIONS["float32"], PRECISIONS["float64"]
Floats = NDArray[np.float64]
Instance = tuple[Op, tuple[Floats, ...], tuple[Floats, ...]]


@cache
def instance(name: str, key: int) -> Instance:
    """An instance of an op as the certification draws it."""
    sizes, values = Bits(key, "sizes"), Bits(key, "values")
    return OPS[name](
        lambda low, high: int(sizes.integers(low, high, (1,))[0]),
        lambda *shape: values.normal(shape),  # type: ignore[arg-type]
    )


def held(arrays: tuple[Floats, ...], p: Precision = P64) -> tuple[Bounded, ...]:
    return tuple(recorded(a, p) for a in arrays)


def inside(run: NDArray[Any], b: Bounded) -> bool:
    return run.shape == b.val.shape and bool((np.abs(run.astype(np.float64) - b.val) <= b.err).all())


def back(op: Op, xs: tuple[Floats, ...], ps: tuple[Floats, ...], dy: Floats, p: Precision = P64) -> Vjp:
    with quiet():
        return op.vjp(held(xs, p), held(ps, p), recorded(dy, p))


every_instance = pytest.mark.parametrize("key", range(8))
every_op = pytest.mark.parametrize("name", OPS)


@every_op
@every_instance
def test_the_bounded_forward_is_the_forward(name: str, key: int) -> None:
    op, xs, ps = instance(name, key)
    with quiet():
        assert inside(np.asarray(op.forward(xs, ps)), op.bound(held(xs), held(ps)))


@every_op
@every_instance
def test_a_float32_run_of_the_forward_is_within_the_float32_bar(name: str, key: int) -> None:
    op, xs, ps = instance(name, key)
    xs, ps = (tuple(a.astype(np.float32).astype(np.float64) for a in arrays) for arrays in (xs, ps))
    run = op.forward(*(tuple(a.astype(np.float32) for a in arrays) for arrays in (xs, ps)))
    with quiet():
        b = op.bound(held(xs, P32), held(ps, P32))
    assert run.dtype == np.float32
    assert inside(run, b)
    assert np.isfinite(b.err).all()


@every_op
@every_instance
def test_a_vjp_has_its_operands_shapes_and_is_linear_in_the_cotangent(name: str, key: int) -> None:
    op, xs, ps = instance(name, key)
    dy = Bits(key, "dy").normal(np.asarray(op.forward(xs, ps)).shape)
    one, doubled, none = (back(op, xs, ps, factor * dy) for factor in (1.0, 2.0, 0.0))
    assert [b.val.shape for b in one.inputs] == [x.shape for x in xs]
    assert [b.val.shape for b in one.params] == [p.shape for p in ps[: len(one.params)]]
    for b, b2, b0 in zip(*((*v.inputs, *v.params) for v in (one, doubled, none)), strict=True):
        assert b.err.shape == b.val.shape
        assert np.isfinite(b.err).all()
        assert (b2.val == 2 * b.val).all()
        assert not b0.val.any()


@every_op
@every_instance
def test_a_looser_model_explains_a_healthy_result_and_no_wild_one(name: str, key: int) -> None:
    op, xs, ps = instance(name, key)
    y = np.asarray(op.forward(xs, ps))
    with quiet():
        for looser in op.looser(held(xs, P32), held(ps, P32), recorded(y, P32)).values():
            assert inside(y, looser.bound(held(xs, P32), held(ps, P32)))
        wild = 3 * y + 1000
        for looser in op.looser(held(xs, P32), held(ps, P32), recorded(wild, P32)).values():
            assert not inside(wild, looser.bound(held(xs, P32), held(ps, P32)))


# conv2d and depthwise: four loops, straight from the formulas, on whole numbers, so that equality is exact.


def axis(padding: Padding, size: int, k: int, stride: int) -> tuple[int, int]:
    """Output size and low padding, as FORMULAS section 1 states them."""
    if padding == "xla_same":
        out = -(-size // stride)
        return out, max((out - 1) * stride + k - size, 0) // 2
    lo = (k - 1) // 2 if padding == "symmetric" else 0
    return (size + 2 * lo - k) // stride + 1, lo


def taps(
    x: tuple[int, ...], k: int, stride: int, padding: Padding
) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
    """Every (output position, kernel tap, input position) that is in range."""
    (oh, lo_h), (ow, lo_w) = axis(padding, x[2], k, stride), axis(padding, x[3], k, stride)
    for i, j, a, b in np.ndindex(oh, ow, k, k):
        p, q = stride * i + a - lo_h, stride * j + b - lo_w
        if 0 <= p < x[2] and 0 <= q < x[3]:
            yield (i, j), (a, b), (p, q)


def naive(
    x: Floats, w: Floats, dy: Floats | None, stride: int, padding: Padding, depthwise: bool
) -> tuple[Floats, Floats, Floats]:
    """y, dx and dW; dy is all ones where it is not given."""
    n, outs = len(x), len(w)
    size = [axis(padding, s, w.shape[2], stride)[0] for s in x.shape[2:]]
    y, dx, dw = np.zeros((n, outs, *size)), np.zeros_like(x), np.zeros_like(w)
    dy = np.ones_like(y) if dy is None else dy
    pairs = [(o, o, 0) for o in range(outs)] if depthwise else [(o, c, c) for o, c in np.ndindex(w.shape[:2])]
    for (i, j), (a, b), (p, q) in taps(x.shape, w.shape[2], stride, padding):
        for m in range(n):
            for o, c, slot in pairs:
                y[m, o, i, j] += w[o, slot, a, b] * x[m, c, p, q]
                dx[m, c, p, q] += w[o, slot, a, b] * dy[m, o, i, j]
                dw[o, slot, a, b] += x[m, c, p, q] * dy[m, o, i, j]
    return y, dx, dw


@pytest.mark.parametrize("padding", get_args(Padding))
@pytest.mark.parametrize("op", [Conv2d, Depthwise])
@pytest.mark.parametrize(
    ("h", "w", "k", "stride"),
    [(4, 5, 3, 1), (5, 4, 3, 2), (7, 6, 5, 2), (1, 1, 1, 1), (6, 4, 2, 2), (5, 7, 1, 3), (2, 1, 5, 1), (1, 3, 7, 2)],
)
def test_convolutions_are_their_formulas(
    op: type[Conv2d], padding: Padding, h: int, w: int, k: int, stride: int
) -> None:
    if padding == "symmetric":
        k += 1 - k % 2
    if padding == "valid":
        h, w = max(h, k), max(w, k)
    bits = Bits(h + 10 * k, padding)
    depthwise = op is Depthwise
    x, kernel = (bits.integers(-8, 8, s) for s in ((2, 3, h, w), (3, 1, k, k) if depthwise else (4, 3, k, k)))
    bias = bits.integers(-8, 8, (len(kernel),))
    y, _, _ = naive(x, kernel, None, stride, padding, depthwise)
    dy = bits.integers(-8, 8, y.shape)
    y, dx, dw = naive(x, kernel, dy, stride, padding, depthwise)
    conv = op(stride, padding)
    assert (conv.forward((x,), (kernel,)) == y).all()
    assert (conv.forward((x,), (kernel, bias)) == y + bias[:, None, None]).all()
    got = back(conv, (x,), (kernel, bias), dy, P32)
    expected = (dx, dw, dy.sum((0, 2, 3)))
    for b, value in zip((*got.inputs, *got.params), expected, strict=True):
        assert (b.val == value).all()
        assert not b.err.any()
    assert not conv.bound(held((x,), P32), held((kernel,), P32)).err.any()


# relu


def test_relu_is_one_sided_at_exactly_zero() -> None:
    z, dy = np.array([0.0, -0.0, 2.0**-20, -(2.0**-20)]), np.array([3.0, 5.0, 7.0, 9.0])
    (dx,) = back(Relu(), (z,), (), dy, P32).inputs
    assert dx.val.tolist() == [0.0, 0.0, 7.0, 0.0]
    assert not dx.err.any()
    assert Relu().forward((z,), ()).tolist() == [0.0, 0.0, 2.0**-20, 0.0]


def test_an_uncertain_mask_widens_the_bar_by_the_whole_contribution() -> None:
    z = Bounded(np.array([1e-9, -1e-9, 1.0, -1.0]), np.full(4, 1e-8), P32)
    (dx,) = Relu().vjp((z,), (), recorded(np.full(4, 3.0), P32)).inputs
    assert dx.err.tolist() == [3.0, 3.0, 0.0, 0.0]
    assert Relu().bound((z,), ()).err.tolist() == [1e-8, 1e-8, 1e-8, 0.0]


def test_a_subnormal_may_be_read_as_zero_by_the_mask() -> None:
    (dx,) = back(Relu(), (np.array([1e-40]),), (), np.array([3.0]), P32).inputs
    assert dx.err[0] == 3.0


# drop path


@pytest.mark.parametrize(("scale", "exact"), [(0.0, True), (1.0, True), (2.0, True), (4.0, True), (1.25, False)])
def test_scaling_by_a_power_of_two_is_exact(scale: float, exact: bool) -> None:
    x = Bits(1, "x").normal((2, 3, 2, 2)).astype(np.float32).astype(np.float64)
    a = np.array([scale, 0.0])
    (dx,) = back(DropPath(), (x,), (a,), x, P32).inputs
    y = DropPath().bound(held((x,), P32), held((a,), P32))
    for b in (dx, y):
        assert (b.val == x * a[:, None, None, None]).all()
        assert (not b.err.any()) is exact


def test_scaling_into_the_subnormals_is_not_exact() -> None:
    (dx,) = back(DropPath(), (np.ones((1, 1)),), (np.array([0.5]),), np.array([[P32.tiny]]), P32).inputs
    assert dx.err[0, 0] > 0


# batch norm


def batchnorm(x: Floats, g: Floats, b: Floats, dy: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """y, dx, dgamma and dbeta per channel, the formula's symbols in its order."""
    y, dx, dg = np.zeros_like(x), np.zeros_like(x), np.zeros_like(g)
    for c in range(x.shape[1]):
        v = x[:, c]
        n = v.size
        mu = v.sum() / n
        var = ((v - mu) ** 2).sum() / n
        s = (var + EPS) ** -0.5
        xhat = (v - mu) * s
        d = g[c] * dy[:, c]
        y[:, c] = g[c] * xhat + b[c]
        dx[:, c] = (s / n) * (n * d - d.sum() - xhat * (xhat * d).sum())
        dg[c] = (dy[:, c] * xhat).sum()
    return y, dx, dg, dy.sum((0, 2, 3))


@every_instance
def test_batchnorm_is_its_formula(key: int) -> None:
    op, (x,), (g, b) = instance("batchnorm", key)
    dy = Bits(key, "dy").normal(x.shape)
    y, dx, dg, db = batchnorm(x, g, b, dy)
    got = back(op, (x,), (g, b), dy)
    with quiet():
        assert inside(y, op.bound(held((x,)), held((g, b))))
    for value, bound in zip((dx, dg, db), (*got.inputs, *got.params), strict=True):
        assert inside(value, bound)


def float32_forms(x: Any, g: Any, b: Any, dy: Any) -> dict[str, tuple[Any, Any, Any]]:
    """y, dx and dgamma in float32 as libraries write them: plain, and with the affine map folded."""
    m, f = (0, 2, 3), np.float32
    n = f(x.size // x.shape[1])
    mean = x.mean(m, keepdims=True)
    c = x - mean
    s = 1 / np.sqrt((c * c).mean(m, keepdims=True) + f(EPS))
    g, b = g[:, None, None], b[:, None, None]
    xhat, d = c * s, g * dy
    alpha = g * s
    along = (c * dy).sum(m, keepdims=True)
    return {
        "plain": (
            g * xhat + b,
            (s / n) * (n * d - d.sum(m, keepdims=True) - xhat * (xhat * d).sum(m, keepdims=True)),
            (dy * xhat).sum(m),
        ),
        "folded": (
            x * alpha + (b - mean * alpha),
            (dy - dy.mean(m, keepdims=True) - c * (along * s * s / n)) * alpha,
            ((dy * x).sum(m, keepdims=True) - mean * dy.sum(m, keepdims=True))[0, :, 0, 0] * s[0, :, 0, 0],
        ),
    }


@pytest.mark.parametrize("form", ["plain", "folded"])
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.integers(-6, 12))
def test_batchnorm_as_libraries_write_it_is_within_the_bar(form: str, key: int, n: int, w: int, offset: int) -> None:
    bits = Bits(key, "bn")
    shape = (n, 2, 3, w)
    x, dy = bits.normal(shape) + 2.0**offset, bits.normal(shape)
    g, b = bits.normal((2,)), bits.normal((2,))
    run = [v.astype(np.float32) for v in (x, g, b, dy)]
    y, dx, dg = float32_forms(*run)[form]
    x, g, b, dy = (v.astype(np.float64) for v in run)
    with quiet():
        assert inside(y, BatchNorm().bound(held((x,), P32), held((g, b), P32)))
    got = back(BatchNorm(), (x,), (g, b), dy, P32)
    assert inside(dx, got.inputs[0])
    assert inside(dg, got.params[0])


def test_a_constant_channel_has_no_normalised_value_but_its_shift() -> None:
    x = np.full((2, 1, 2, 2), 3.0)
    y = BatchNorm().forward((x,), (np.array([2.0]), np.array([5.0])))
    assert (y == 5.0).all()
