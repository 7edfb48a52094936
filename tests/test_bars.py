"""The floating-point model against real float32 and float64 arithmetic, in many orders, with and without flushing."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffgrad.bars import (
    PRECISIONS,
    U_BF16,
    Bounded,
    Precision,
    add,
    bilinear,
    gamma,
    grid_exponent,
    moments,
    mul,
    quiet,
    recorded,
    scale,
    settle,
    to_bfloat16,
    total,
)
from diffgrad.specs import EPS
from diffgrad.values import Bits

P32, P64 = PRECISIONS["float32"], PRECISIONS["float64"]
Run = NDArray[Any]

ORDERS = ("sequential", "reversed", "shuffled", "pairwise", "wide")
orders = st.sampled_from(ORDERS)


def flushed(v: Run, flush: bool) -> Run:
    """The value, or 0 where it is subnormal and the machine flushes."""
    return np.where(np.abs(v) < np.finfo(v.dtype).tiny, v.dtype.type(0), v) if flush else v


def add_up(terms: Run, order: str, flush: bool) -> Run:
    """The sum over the first axis, really evaluated in the terms' dtype; ``wide`` accumulates in twice the bits."""
    v = flushed(terms, flush)
    if order == "wide":
        return flushed(v.astype(np.longdouble).sum(0).astype(v.dtype), flush)
    if order == "pairwise":
        while len(v) > 1:
            odd = v[-1:] if len(v) % 2 else v[:0]
            v = np.concatenate([flushed(v[: len(v) - len(odd) : 2] + v[1::2], flush), odd])
        return np.asarray(v[0])
    index = np.arange(len(v))
    index = index[::-1] if order == "reversed" else index
    index = np.random.default_rng(len(v)).permutation(index) if order == "shuffled" else index
    acc = v[index[0]]
    for i in index[1:]:
        acc = flushed(acc + v[i], flush)
    return np.asarray(acc)


def within(run: Run, b: Bounded) -> bool:
    """As the checker compares: nothing is asked where the bar is infinite."""
    with quiet():
        return bool((np.isinf(b.err) | (np.abs(run.astype(np.float64) - b.val) <= b.err)).all())


@st.composite
def tensors(draw: st.DrawFn, p: Precision = P32, most: int = 40, width: int = 3) -> Run:
    """[k, width]: ordinary, far from zero, near the smallest or largest number, or of very mixed magnitude."""
    k, seed = draw(st.integers(1, most)), draw(st.integers(0, 2**32))
    kind = draw(st.sampled_from(("ordinary", "offset", "tiny", "huge", "mixed", "dyadic")))
    bits = Bits(seed, "x")
    v = bits.normal((k, width))
    v = {
        "ordinary": lambda: v,
        "offset": lambda: v + 2.0 ** (seed % 14),
        "tiny": lambda: v * p.tiny,
        "huge": lambda: v * (p.largest / 2.0 ** (2 + seed % 4)),
        "mixed": lambda: v * 2.0 ** bits.integers(-30, 30, (k, width)),
        "dyadic": lambda: np.rint(8 * v) / 8,
    }[kind]()
    return v.astype(p.name)


def precise(p: Precision) -> st.SearchStrategy[tuple[Precision, Run]]:
    return st.tuples(st.just(p), tensors(p))


either = st.one_of(precise(P32), precise(P64))


@given(either, orders, st.booleans())
def test_a_sum_in_any_order_is_within_its_bar(drawn: tuple[Precision, Run], order: str, flush: bool) -> None:
    p, x = drawn
    with quiet():
        b = total(recorded(x.astype(np.float64), p), (0,))
        assert within(add_up(x, order, flush)[None], b)


@given(either)
def test_the_float64_value_of_a_sum_is_itself_within_the_float64_bar_of_the_exact_one(
    drawn: tuple[Precision, Run],
) -> None:
    x = drawn[1].astype(np.float64)
    with quiet():
        b = total(recorded(x, P64), (0,))
    for j in range(x.shape[1]):
        if np.isfinite(b.err[0, j]):
            exact = sum(Fraction(v) for v in x[:, j].tolist())
            assert abs(Fraction(float(b.val[0, j])) - exact) <= Fraction(float(b.err[0, j]))


def matmul(a: Run, b: Run) -> Run:
    return np.asarray(a @ b)


@given(tensors(), tensors(), orders, st.booleans(), st.booleans())
def test_products_summed_in_any_order_are_within_their_bar(
    x: Run, y: Run, order: str, flush: bool, fused: bool
) -> None:
    k = min(len(x), len(y))
    x, y = x[:k], y[:k]
    with quiet():
        b = bilinear(matmul, recorded(x.T.astype(np.float64), P32), recorded(y.astype(np.float64), P32), k)
        if fused:  # the product is not rounded: exact in float64
            acc = np.zeros((3, 3), np.float32)
            for i in range(k):
                acc = flushed((acc + np.multiply.outer(x[i], y[i], dtype=np.float64)).astype(np.float32), flush)
            assert within(acc, b)
        else:
            products = flushed(flushed(x, flush)[:, :, None] * flushed(y, flush)[:, None, :], flush)
            assert within(add_up(products, order, flush), b)


@given(tensors(), orders, st.booleans(), st.integers(-1, 1))
def test_two_pass_statistics_in_any_order_are_within_their_bars(x: Run, order: str, flush: bool, ulps: int) -> None:
    n = np.float32(len(x))
    with quiet():
        m = moments(recorded(x.astype(np.float64), P32), (0,), EPS)
        mean = flushed(add_up(x, order, flush) / n, flush)
        centred = flushed(flushed(x, flush) - mean, flush)
        variance = flushed(add_up(flushed(centred * centred, flush), order, flush) / n, flush)
        inv_std = 1 / np.sqrt(variance + np.float32(EPS))
        inv_std = inv_std + ulps * np.spacing(inv_std)  # rsqrt is not correctly rounded everywhere
        assert within(mean[None], m.mean)
        assert within(centred, m.centred)
        assert within(inv_std[None], m.inv_std)
        assert within(flushed(centred * inv_std, flush), m.normalised)


Loose = tuple[Run, Bounded]


@st.composite
def loose(draw: st.DrawFn) -> Loose:
    """A run's tensor, and an expectation that is some ulps away from it with a bar that says so."""
    run = draw(tensors(most=6))
    val = (run + draw(st.integers(-4, 4)) * np.spacing(run)).astype(np.float64)
    read_as_zero = np.where(np.abs(run) < P32.tiny, np.abs(run), np.float32(0))
    return run, Bounded(val, np.abs(val - run) + read_as_zero, P32)


OPERATIONS: dict[str, tuple[Callable[[Bounded, Bounded], Bounded], Callable[[Run, Run], Run]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (mul, lambda a, b: a * b),
    "add3": (lambda a, b: add(a, b, a), lambda a, b: (a + b) + a),
    "third": (lambda a, b: scale(a, 1 / 3, roundings=2.0), lambda a, b: a * (np.float32(1) / np.float32(3))),
    "total": (lambda a, b: total(a, (0,)), lambda a, b: add_up(a, "sequential", False)[None]),
    "dot": (
        lambda a, b: bilinear(lambda x, y: (x * y).sum(0), a, b, len(a.val)),
        lambda a, b: add_up(a * b, "sequential", False),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(loose(), loose(), st.booleans())
def test_the_errors_of_operands_are_carried(name: str, one: Loose, other: Loose, flush: bool) -> None:
    k = min(len(one[0]), len(other[0]))
    (a, ba), (b, bb) = ((r[:k], Bounded(e.val[:k], e.err[:k], P32)) for r, e in (one, other))
    bound, run = OPERATIONS[name]
    with quiet():
        assert within(flushed(run(flushed(a, flush), flushed(b, flush)), flush), bound(ba, bb))


@given(loose())
def test_statistics_carry_the_errors_of_their_operand(drawn: Loose) -> None:
    run, b = drawn
    with quiet():
        m = moments(b, (0,), EPS)
        mean = run.mean(0, keepdims=True)
        inv_std = 1 / np.sqrt(((run - mean) ** 2).mean(0, keepdims=True) + np.float32(EPS))
        assert within(mean, m.mean)
        assert within(inv_std, m.inv_std)
        assert within((run - mean) * inv_std, m.normalised)


dyadic = st.integers(1, 40).flatmap(
    lambda k: st.integers(0, 2**32).map(lambda seed: Bits(seed, "x").integers(-16, 16, (k, 3)) / 8)
)


@given(dyadic, dyadic, orders)
def test_small_dyadic_operands_have_a_bar_of_zero_and_deserve_it(x: Run, y: Run, order: str) -> None:
    k = min(len(x), len(y))
    bx, by = (recorded(v[:k], P32) for v in (x, y))
    terms = x[:k].astype(np.float32)
    summed = total(bx, (0,))
    assert not summed.err.any()
    assert (add_up(terms, order, False) == summed.val[0]).all()
    product = bilinear(lambda a, b: (a * b).sum(0), bx, by, k)
    assert not product.err.any()
    assert (add_up(terms * y[:k].astype(np.float32), order, False) == product.val).all()


def bounded(*values: float, p: Precision = P32) -> Bounded:
    return recorded(np.array(values), p)


def test_whole_numbers_are_exact_up_to_the_significand_and_no_further() -> None:
    assert total(bounded(2.0**24 - 1, 1.0), (0,)).err[0] == 0
    beyond = total(bounded(2.0**24, 1.0), (0,))
    assert beyond.err[0] >= 1.0 == beyond.val[0] - float(np.float32(2**24) + np.float32(1))


@pytest.mark.parametrize(
    ("values", "grid"),
    [((1.0, 2.0), 0), ((0.5, 3.0), 1), ((2.0**-12,), 12), ((2.0**-13,), None), ((0.1, 1.0), None), ((0.0,), 0)],
)
def test_the_grid_of_some_numbers(values: tuple[float, ...], grid: int | None) -> None:
    assert grid_exponent(bounded(*values)) == grid


def test_a_number_with_an_error_is_on_no_grid() -> None:
    assert grid_exponent(Bounded(np.ones(2), np.full(2, 1e-9), P32)) is None


@pytest.mark.parametrize("m", [1, 10, 1000])
def test_the_bar_of_a_sum_is_attained(m: int) -> None:
    """1 + u + u + ... rounds back to 1 every time: a bar of one rounding fewer would be too small."""
    x = np.array([1.0, *[P32.u] * m], np.float32)
    b = total(recorded(x.astype(np.float64), P32), (0,))
    error = b.val[0] - float(add_up(x, "sequential", False))
    assert gamma(m - 1, P32) * b.val[0] < error <= b.err[0]


def test_gamma() -> None:
    assert gamma(0, P32) == 0
    assert gamma(1, P32) == float(Fraction(P32.u) / (1 - Fraction(P32.u)))
    assert gamma(2**24, P32) == float("inf")


SUBNORMAL = 1e-40

UNDERFLOW: dict[str, tuple[Bounded, float]] = {
    # what may be flushed to zero, and its value
    "read": (bounded(SUBNORMAL), SUBNORMAL),
    "product": (mul(bounded(1e-20), bounded(1e-20)), 1e-40),
    "sum": (total(bounded(SUBNORMAL, SUBNORMAL), (0,)), 2 * SUBNORMAL),
    "scaled": (scale(bounded(1.2e-38), 0.5), 0.6e-38),
    "difference": (bounded(3e-38) - bounded(2e-38), 1e-38),
    "dot": (bilinear(lambda a, b: (a * b).sum(keepdims=True), bounded(1e-20), bounded(1e-20), 1), 1e-40),
}


@pytest.mark.parametrize("name", UNDERFLOW)
def test_a_result_that_may_be_flushed_to_zero_has_a_bar_for_that(name: str) -> None:
    b, value = UNDERFLOW[name]
    assert b.err[0] >= value
    assert b.err[0] < 4 * P32.tiny


HUGE = 3e38

with quiet():
    OVERFLOW: dict[str, Bounded] = {
        "product": mul(bounded(1e20), bounded(1e20)),
        "sum": total(bounded(HUGE, HUGE), (0,)),
        "a partial sum": total(bounded(HUGE, HUGE, -HUGE, -HUGE), (0,)),
        "dot": bilinear(lambda a, b: (a * b).sum(keepdims=True), bounded(1e20), bounded(1e20), 1),
        "a product that padding multiplies by 0": bilinear(
            lambda a, b: a * b, recorded(np.array([np.inf]), P32), bounded(0.0), 1
        ),
        "variance": moments(bounded(1e20, -1e20), (0,), EPS).inv_std,
        "what was recorded as NaN": bounded(float("nan")),
        "what was recorded as infinite": bounded(float("-inf")),
        "a value beyond the format": settle(np.array([1e39]), np.array([0.0]), P32),
        "NaN": settle(np.array([np.nan]), np.array([0.0]), P32),
    }


@pytest.mark.parametrize("name", OVERFLOW)
def test_nothing_is_promised_where_the_run_may_overflow(name: str) -> None:
    assert np.isinf(OVERFLOW[name].err).all()


def test_the_same_sizes_are_bounded_in_float64() -> None:
    assert np.isfinite(mul(bounded(1e20, p=P64), bounded(1e20, p=P64)).err).all()
    assert np.isfinite(total(bounded(HUGE, HUGE, p=P64), (0,)).err).all()


def test_one_value_is_its_own_mean_and_has_no_variance() -> None:
    m = moments(bounded(0.1), (0,), EPS)
    assert (m.mean.err[0], m.centred.val[0]) == (0, 0)
    assert m.normalised.err[0] <= m.centred.err[0] * m.inv_std.mag[0] + 4 * P32.tiny * m.inv_std.mag[0]


def test_statistics_are_taken_once() -> None:
    x = bounded(1.0, 2.0)
    assert moments(x, (0,), EPS) is moments(x, (0,), EPS)
    assert moments(x, (0,), EPS) is not moments(x, (0,), EPS, one_pass=True)


def test_an_alternative_evaluation_only_widens() -> None:
    b = bounded(1.0).widen(np.array([0.25]))
    assert (b.val[0], b.err[0], b.mag[0], b.exact) == (1.0, 0.25, 1.25, False)


def test_numbers_are_moved_with_their_bounds_and_what_was_summed() -> None:
    b = total(Bounded(np.arange(6.0).reshape(2, 3), np.full((2, 3), 0.5), P32), (1,)).moved(lambda v: v[::-1].T)
    assert (b.val.shape, b.err.shape, b.reach.shape) == ((1, 2), (1, 2), (1, 2))
    assert b.val.tolist() == [[12.0, 3.0]]
    assert b.reach.tolist() == [[13.5, 4.5]]


# bfloat16


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (1 + 3 * 2**-8 - 2**-20, 1 + 2**-7),
        (-1 - 2**-8, -1.0),
        (-1 - 3 * 2**-8, -1 - 2**-6),
        (2.0**-126, 2.0**-126),
        (0.0, 0.0),
    ],
)
def test_bfloat16_is_the_nearest_number_and_the_even_one_of_two(value: float, nearest: float) -> None:
    b = to_bfloat16(bounded(value))
    assert (b.val[0], b.err[0]) == (nearest, 0.0)


def test_what_rounds_beyond_the_largest_bfloat16_has_no_bound() -> None:
    with quiet():
        assert np.isinf(to_bfloat16(bounded(P32.largest, -P32.largest)).err).all()
        assert to_bfloat16(bounded(2.0**127)).err[0] == 0


def bfloat16(v: Run) -> Run:
    with quiet():
        return np.asarray(v.astype(ml_dtypes.bfloat16).astype(v.dtype))


@given(tensors())
def test_a_rounding_to_bfloat16_errs_by_its_unit_roundoff(x: Run) -> None:
    normal = np.abs(x) >= P32.tiny
    with quiet():
        b = to_bfloat16(recorded(x.astype(np.float64), P32))
    assert within(bfloat16(x), b)
    assert (np.abs(b.val - x)[normal & np.isfinite(b.err)] <= (U_BF16 * np.abs(x))[normal & np.isfinite(b.err)]).all()


@given(tensors(most=6), st.integers(0, 2**32), st.integers(-20, 2))
def test_what_an_uncertain_operand_rounds_to_is_within_its_bound(x: Run, seed: int, doubt: int) -> None:
    """Its run is anywhere in the operand's interval, the ends included."""
    bits = Bits(seed, "doubt")
    val = x.astype(np.float64)
    err = np.abs(val) * 2.0**doubt * np.abs(bits.normal(x.shape))
    with quiet():
        b = to_bfloat16(Bounded(val, err, P32))
        for share in (-1.0, 0.0, 1.0, bits.normal(x.shape) / 4):
            run = (val + share * err).astype(np.float32)
            inside = np.abs(run.astype(np.float64) - val) <= err
            assert within(np.where(inside, bfloat16(run), b.val), b)


def test_an_operand_in_doubt_about_a_tie_may_round_either_way() -> None:
    tie = 1 + 2**-8
    b = to_bfloat16(Bounded(np.array([tie, 1.0]), np.full(2, 2.0**-20), P32))
    assert (b.val.tolist(), b.err.tolist()) == ([1.0, 1.0], [2**-7, 0.0])
