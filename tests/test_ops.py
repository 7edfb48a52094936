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
from diffgrad.ops import (
    AddPosition,
    Attention,
    BatchNorm,
    ClsSlice,
    Conv2d,
    Dense,
    Depthwise,
    DropPath,
    GeluErf,
    GeluTanh,
    GlobalAveragePool,
    LayerNorm,
    LayerScale,
    Op,
    PrependCls,
    Products,
    Relu,
    Relu6,
    Scores,
    SoftmaxRows,
    Swish,
    Vjp,
    Weighted,
)
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


@pytest.mark.parametrize(("power", "overflows"), [(118, False), (123, True)])
def test_a_norm_may_overflow_before_its_terms_cancel(power: int, overflows: bool) -> None:
    """A fused kernel multiplies by n first, autodiff by s**3, and a small variance makes that large."""
    x, dy = Bits(1, "x").normal((1, 4)).astype(np.float32) / 8, np.array([[1, -2, 2, 0.5]], np.float32)
    dy = np.asarray(dy * np.float32(2.0**power))
    with quiet():
        centred = x - x.mean()
        s = 1 / np.sqrt((centred * centred).mean() + np.float32(EPS))
        fused = s / 4 * (4 * dy - dy.sum() - centred * s * (dy * centred * s).sum())
        composed = s * dy - centred * (s * s * s * (dy * centred).sum()) / 4
        composed -= composed.mean()
        given = x.astype(np.float64), dy.astype(np.float64)
        (dx,) = back(LayerNorm(kind="token"), given[:1], (np.ones(4), np.zeros(4)), given[1], P32).inputs
    assert np.isfinite(np.stack((fused, composed))).all() != overflows
    assert np.isinf(dx.err).all() == overflows
    assert np.isfinite(dx.val).all()
    assert (np.abs(dx.val) < P32.largest).all()
    assert overflows or (np.abs(fused - dx.val) <= dx.err).all()
    assert overflows or (np.abs(composed - dx.val) <= dx.err).all()


@pytest.mark.parametrize(("top", "bounded"), [(1e19, True), (1.9e19, False)])
def test_a_variance_may_be_merged_from_parts_whose_distance_overflows_squared(top: float, bounded: bool) -> None:
    x = np.zeros((1, 8))
    x[0, 0] = top
    with quiet():
        y = LayerNorm(kind="token").bound(held((x,), P32), held((np.ones(8), np.zeros(8)), P32))
    assert np.isfinite(y.err).all() == bounded


def test_a_constant_channel_has_no_normalised_value_but_its_shift() -> None:
    x = np.full((2, 1, 2, 2), 3.0)
    y = BatchNorm().forward((x,), (np.array([2.0]), np.array([5.0])))
    assert (y == 5.0).all()


# dense over tokens, whole numbers


def test_dense_sums_over_tokens_too() -> None:
    bits = Bits(4, "dense")
    x, w, b, dy = (bits.integers(-8, 8, shape) for shape in ((2, 3, 4), (4, 5), (5,), (2, 3, 5)))
    dx, dw, db = np.zeros_like(x), np.zeros_like(w), np.zeros_like(b)
    y = np.zeros_like(dy) + b
    for n, t, i, o in np.ndindex(2, 3, 4, 5):
        y[n, t, o] += x[n, t, i] * w[i, o]
        dx[n, t, i] += dy[n, t, o] * w[i, o]
        dw[i, o] += x[n, t, i] * dy[n, t, o]
        db[o] += dy[n, t, o] if i == 0 else 0
    assert (Dense().forward((x,), (w, b)) == y).all()
    got = back(Dense(), (x,), (w, b), dy, P32)
    for bound, value in zip((*got.inputs, *got.params), (dx, dw, db), strict=True):
        assert (bound.val == value).all()
        assert not bound.err.any()


# attention


def test_softmax_rows_by_hand() -> None:
    z, dp = np.log([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]), np.array([[8.0, 0.0, 0.0], [0.0, 4.0, 4.0]])
    (dz,) = back(SoftmaxRows(), (z,), (), dp).inputs
    assert inside(np.array([[1, 2, 5], [2, 2, 4]]) / 8, SoftmaxRows().bound(held((z,)), ()))
    assert inside(np.array([[7 / 8, -1 / 4, -5 / 8], [-3 / 4, 1 / 4, 1 / 2]]), dz)


def test_one_key_takes_all_and_hands_nothing_back() -> None:
    (dz,) = back(SoftmaxRows(), (np.array([[3.0], [-900.0]]),), (), np.array([[5.0], [7.0]])).inputs
    assert SoftmaxRows().forward((np.array([[3.0], [-900.0]]),), ()).tolist() == [[1.0], [1.0]]
    assert not dz.val.any()


def test_what_a_mask_hides_has_no_share_and_gets_no_cotangent() -> None:
    z, dp = np.log([[1.0, 900.0, 3.0], [2.0, 2.0, 9.0]]), np.array([[4.0, 7.0, 0.0], [0.0, 8.0, 7.0]])
    op = SoftmaxRows(mask=("101", "110"))
    (dz,) = back(op, (z,), (), dp).inputs
    y = op.bound(held((z,)), ())
    assert inside(np.array([[1, 0, 3], [2, 2, 0]]) / 4, y)
    assert inside(np.array([[3 / 4, 0, -3 / 4], [-2, 2, 0]]), dz)
    assert not y.err[[0, 1], [1, 2]].any()
    assert not dz.err[[0, 1], [1, 2]].any()


@pytest.mark.parametrize(("uniform", "share"), [(False, 0.0), (True, 0.5)])
def test_a_row_of_which_all_is_hidden(uniform: bool, share: float) -> None:
    op = Attention(mask=("00", "10"), uniform_empty=uniform)
    q, k, v, do = (Bits(i, "mask").normal((1, 2, 1)) for i in range(4))
    y = op.bound(held((q, k, v)), ())
    dq, dk, dv = back(op, (q, k, v), (), do).inputs
    assert inside(np.array([[[share * v.sum()], [v[0, 0, 0]]]]), y)
    assert not dq.val.any()
    assert not dk.val.any()
    assert inside(np.array([[[share * do[0, 0, 0] + do[0, 1, 0]], [share * do[0, 0, 0]]]]), dv)
    assert uniform or not y.err[0, 0].any()


@pytest.mark.parametrize(("hidden", "bounded"), [(3e4, True), (np.inf, False)])
def test_a_hidden_score_matters_only_where_it_overflows(hidden: float, bounded: bool) -> None:
    """A library adds -inf to it."""
    z = recorded(np.array([[1.0, hidden]]), PRECISIONS["float16"])
    with quiet():
        assert bool(np.isfinite(SoftmaxRows(mask=("10",)).bound((z,), ()).err).all()) is bounded


def test_a_row_below_the_number_that_hides_has_no_bound() -> None:
    z = recorded(np.array([[-6e4, 0.0]]), PRECISIONS["float16"])
    with quiet():
        assert np.isinf(SoftmaxRows(mask=("10",)).bound((z,), ()).err).all()


def attention(q: Floats, k: Floats, v: Floats, do: Floats, heads: int) -> dict[str, Floats]:
    """Every quantity of FORMULAS section 1, example by example and head by head."""
    n, t, width = q.shape
    d = width // heads
    out = {name: np.zeros((n, heads, t, t)) for name in ("S", "P", "dP", "dS")}
    out |= {name: np.zeros_like(q) for name in ("O", "dQ", "dK", "dV")}
    for m, h in np.ndindex(n, heads):
        slab = slice(h * d, (h + 1) * d)
        query, key, value, upstream = (a[m, :, slab] for a in (q, k, v, do))
        s = query @ key.T / np.sqrt(d)
        p = np.exp(s) / np.exp(s).sum(1, keepdims=True)
        dp = upstream @ value.T
        ds = p * (dp - (p * dp).sum(1, keepdims=True))
        square = {"S": s, "P": p, "dP": dp, "dS": ds}
        wide = {"O": p @ value, "dV": p.T @ upstream, "dQ": ds @ key / np.sqrt(d), "dK": ds.T @ query / np.sqrt(d)}
        for name, a in square.items():
            out[name][m, h] = a
        for name, a in wide.items():
            out[name][m, :, slab] = a
    return out


@pytest.mark.parametrize(
    ("n", "t", "heads", "d"), [(1, 1, 1, 1), (2, 3, 2, 4), (3, 3, 3, 1), (2, 4, 1, 3), (1, 5, 4, 2)]
)
def test_attention_is_its_formulas_head_by_head(n: int, t: int, heads: int, d: int) -> None:
    bits = Bits(n + 10 * t, "attention")
    q, k, v, do = (bits.normal((n, t, heads * d)) for _ in range(4))
    by_hand = attention(q, k, v, do, heads)
    s, p = by_hand["S"], by_hand["P"]
    with quiet():
        assert inside(s, Scores(heads).bound(held((q, k)), ()))
        assert inside(p, SoftmaxRows().bound(held((s,)), ()))
        assert inside(by_hand["O"], Weighted(heads).bound(held((p, v)), ()))
        assert inside(by_hand["O"], Attention(heads).bound(held((q, k, v)), ()))
    for op, xs, dy, names in (
        (Weighted(heads), (p, v), do, ("dP", "dV")),
        (SoftmaxRows(), (s,), by_hand["dP"], ("dS",)),
        (Scores(heads), (q, k), by_hand["dS"], ("dQ", "dK")),
        (Attention(heads), (q, k, v), do, ("dQ", "dK", "dV")),
    ):
        for name, bound in zip(names, back(op, xs, (), dy).inputs, strict=True):
            assert inside(by_hand[name], bound), (op, name)


def test_scores_divide_by_the_root_of_a_head_s_width() -> None:
    """Two heads of width 4, whole numbers: the root is 2, and a head reads its own slab only."""
    q, k = (Bits(6, name).integers(-8, 8, (1, 2, 8)) for name in "qk")
    s = Scores(2).forward((q, k), ())
    for h, i, j in np.ndindex(2, 2, 2):
        assert s[0, h, i, j] == sum(q[0, i, c] * k[0, j, c] for c in range(4 * h, 4 * h + 4)) / 2
    k[:, :, 4:] += 1
    assert (Scores(2).forward((q, k), ())[:, 0] == s[:, 0]).all()


@pytest.mark.parametrize(
    ("op", "shapes", "params", "stored"),
    [
        (Scores(2), [(1, 3, 4), (1, 3, 4)], [], (True, True)),
        (Scores(2), [(1, 3, 2), (1, 3, 2)], [], (False, True)),
        (Scores(2), [(1, 1, 4), (1, 1, 4)], [], (True, False)),
        (Weighted(2), [(1, 2, 3, 3), (1, 3, 4)], [], (True, True)),
        (Weighted(2), [(1, 2, 3, 3), (1, 3, 2)], [], (True, False)),
        (Weighted(2), [(1, 2, 1, 1), (1, 1, 4)], [], (False, False)),
        (Dense(), [(1, 3, 2)], [(2, 1), (1,)], (True, False)),
        (Dense(), [(1, 3, 1)], [(1, 2), (2,)], (False, True)),
        (Conv2d(), [(1, 1, 3, 3)], [(2, 1, 1, 1)], (False, True)),
        (SoftmaxRows(), [(1, 3)], [], (False, False)),
    ],
)
def test_what_is_a_sum_of_several_products_is_stored(
    op: Op, shapes: list[tuple[int, ...]], params: list[tuple[int, ...]], stored: tuple[bool, bool]
) -> None:
    xs, ps = (held(tuple(np.ones(shape) for shape in some)) for some in (shapes, params))
    assert op.stored(xs, ps) == stored


# tokens


def test_patches_stand_in_rows_behind_the_cls_token() -> None:
    x, cls = np.arange(24.0).reshape(2, 2, 2, 3), np.array([100.0, 200.0])
    dy = Bits(1, "dy").integers(-8, 8, (2, 7, 2))
    y = PrependCls().forward((x,), (cls,))
    got = back(PrependCls(), (x,), (cls,), dy, P32)
    assert (y[:, 0] == cls).all()
    for n, d, i, j in np.ndindex(*x.shape):
        assert y[n, 1 + 3 * i + j, d] == x[n, d, i, j]
        assert got.inputs[0].val[n, d, i, j] == dy[n, 1 + 3 * i + j, d]
    assert (got.params[0].val == dy[0, 0] + dy[1, 0]).all()
    assert not any(b.err.any() for b in (*got.inputs, *got.params, PrependCls().bound(held((x,)), held((cls,)))))


def test_a_position_is_fed_by_every_example() -> None:
    x, dy = (Bits(1, name).integers(-8, 8, (3, 2, 2)) for name in ("x", "dy"))
    pos = np.array([[1.0, 2.0], [3.0, 4.0]])
    got = back(AddPosition(), (x,), (pos,), dy, P32)
    assert (AddPosition().forward((x,), (pos,)) == x + np.stack([pos] * 3)).all()
    assert (got.inputs[0].val == dy).all()
    assert (got.params[0].val == dy[0] + dy[1] + dy[2]).all()
    assert not got.params[0].err.any()


def test_the_cls_slice_scatters_to_row_0_and_nothing_to_the_patches() -> None:
    x, dy = Bits(1, "x").normal((2, 3, 4)), Bits(1, "dy").normal((2, 4)).astype(np.float32).astype(np.float64)
    (dx,) = back(ClsSlice(), (x,), (), dy, P32).inputs
    assert (ClsSlice().forward((x,), ()) == x[:, 0]).all()
    assert (dx.val[:, 0] == dy).all()
    assert not dx.val[:, 1:].any()
    assert not dx.err.any()


# bf16

OFF = 1 + 2.0**-8
"""Half way between two bfloat16 numbers; rounds to 1."""


@pytest.mark.parametrize(
    ("products", "rounded", "upstream"),
    [
        (Products(), OFF, OFF),
        (Products(bf16=True), 1.0, 1.0),
        (Products(bf16=True, f32_cotangent=True), 1.0, OFF),
    ],
    ids=str,
)
def test_products_take_rounded_operands_and_a_bias_is_no_operand(
    products: Products, rounded: float, upstream: float
) -> None:
    one, row = np.full((1, 1), OFF), np.array([OFF])
    square = one[None, None]
    for op, x, w, dy in ((Dense(products), one, one, one), (Conv2d(1, "valid", products), square, square, square)):
        y, got = op.bound(held((x,)), held((w, row))), back(op, (x,), (w, row), dy)
        assert y.val.item() == rounded * rounded + OFF
        assert got.inputs[0].val.item() == upstream * rounded
        assert got.params[0].val.item() == rounded * upstream
        assert got.params[1].val.item() == OFF
    tokens = one[None]
    for core, xs, dy in (
        (Scores(1, products), (tokens, tokens), square),
        (Weighted(1, products), (square, tokens), tokens),
    ):
        assert core.bound(held(xs), ()).val.item() == rounded * rounded
        assert [b.val.item() for b in back(core, xs, (), dy).inputs] == [upstream * rounded] * 2


def test_a_rounded_result_leaves_the_bias_and_its_gradient_alone() -> None:
    loose = Products(bf16=True, bf16_result=True)
    x, w, b = np.array([[4.0]]), np.array([[2.0]]), np.array([1024.0])
    y, got = Dense(loose).bound(held((x,), P32), held((w, b), P32)), back(Dense(loose), (x,), (w, b), x, P32)
    plain = Dense(Products(bf16=True)).bound(held((x,), P32), held((w, b), P32))
    assert 8 * 2.0**-8 <= y.err.item() <= 8 * 2.0**-8 + 2 * plain.err.item()
    assert (got.inputs[0].err.item(), got.params[0].err.item()) == (8 * 2.0**-8, 16 * 2.0**-8)
    assert got.params[1].err.item() == 0


@pytest.mark.parametrize(
    ("y", "p", "names"),
    [
        (0.1, P32, {"tf32_operands"}),
        (1.5, P32, {"tf32_operands", "bf16_result"}),
        (0.1, P64, set()),
        (1.5, P64, {"bf16_result"}),
        (1.5, PRECISIONS["bfloat16"], set()),
    ],
)
def test_looser_products_are_what_the_result_does_not_refute(y: float, p: Precision, names: set[str]) -> None:
    assert set(Products().looser(recorded(np.array([y]), p))) == names
    assert all(looser.bf16 for looser in Products(bf16=True).looser(recorded(np.array([y]), P32)).values())


@pytest.mark.parametrize(("op", "kinks"), [(Relu(), (0.0,)), (Relu6(), (0.0, 6.0)), (Dense(), ())])
def test_where_a_derivative_jumps(op: Op, kinks: tuple[float, ...]) -> None:
    assert op.kinks == kinks
    for kink in kinks:
        sides = np.array([kink - 1, kink + 1])
        below, above = back(op, (sides,), (), np.ones(2)).inputs[0].val
        assert below != above


# The bars of the wide formats.

Shapes = list[tuple[int, ...]]
PINNED: dict[str, tuple[Op, Shapes, Shapes]] = {
    "conv2d": (Conv2d(2, "xla_same"), [(2, 3, 7, 6)], [(4, 3, 3, 3), (4,)]),
    "dense": (Dense(), [(5, 7)], [(7, 4), (4,)]),
    "batchnorm": (BatchNorm(), [(2, 3, 4, 5)], [(3,), (3,)]),
    "layernorm": (LayerNorm(kind="token"), [(2, 3, 8)], [(8,), (8,)]),
    "swish": (Swish(), [(3, 20)], []),
    "gelutanh": (GeluTanh(), [(3, 20)], []),
    "geluerf": (GeluErf(), [(3, 20)], []),
    "softmaxrows": (SoftmaxRows(), [(4, 9)], []),
    "attention": (Attention(2), [(2, 5, 6)] * 3, []),
    "layerscale": (LayerScale(), [(2, 3, 4, 5)], [(3,)]),
    "globalaveragepool": (GlobalAveragePool(), [(2, 3, 4, 5)], []),
}
SUMS: dict[str, tuple[float, float, float, float]] = {
    # float32: ordinary inputs, inputs near the smallest normal number; float64: the same.
    "conv2d": (0.006216404070351901, 0.002733546296178969, 2.3157868514727254e-11, 1.0183232248861811e-11),
    "dense": (0.00011481108090220606, 3.5209883654769374e-05, 4.2770445813598334e-13, 1.311670058605898e-13),
    "batchnorm": (0.0025138223078458297, 0.07686443750437098, 9.366897698251518e-12, 2.898256815465671e-10),
    "layernorm": (0.000301338647479247, 0.008611815960036141, 1.1386337437839654e-12, 3.311711128364595e-11),
    "swish": (5.060208330340663e-05, 2.2896741829195903e-05, 1.8850737105581217e-13, 8.529698345928841e-14),
    "gelutanh": (6.524254625054417e-05, 7.458830183984962e-06, 2.430473444984556e-13, 2.7786306134431993e-14),
    "geluerf": (3.753805795246879e-05, 8.5489946388358e-06, 1.3984015844284223e-13, 3.184748502079943e-14),
    "softmaxrows": (1.4740747368618301e-05, 1.3966247223798255e-05, 5.49134647403345e-14, 5.202823766615073e-14),
    "attention": (0.000958787126278174, 7.618696314661452e-05, 3.571742592782891e-12, 2.838182282109108e-13),
    "layerscale": (0.0001967745101084735, 7.04239939538367e-06, 7.330405489808608e-13, 2.6234980539209342e-14),
    "globalaveragepool": (6.267804313458338e-06, 5.757468620861399e-07, 2.3349364330105356e-14, 2.144824036851756e-15),
}
"""The sum of all bars of a forward and a backward, which work on 16-bit formats must not move."""


@pytest.mark.parametrize("name", PINNED)
def test_the_bars_of_the_wide_formats_stay_as_they_are(name: str) -> None:
    op, xs, ps = PINNED[name]
    sums = []
    for p in (P32, P64):

        def draw(i: int, shape: tuple[int, ...], factor: float = 1.0, p: Precision = p) -> Bounded:
            return recorded((factor * Bits(i, name).normal(shape)).astype(p.name).astype(np.float64), p)

        params = tuple(draw(9 + i, shape) for i, shape in enumerate(ps))
        for factor in (1.0, p.tiny):
            inputs = tuple(draw(i, shape, factor) for i, shape in enumerate(xs))
            with quiet():
                y = op.bound(inputs, params)
                got = op.vjp(inputs, params, draw(99, y.val.shape))
            sums.append(sum(float(b.err.sum()) for b in (y, *got.inputs, *got.params)))
    assert sums == pytest.approx(SUMS[name], rel=1e-6, abs=0)
