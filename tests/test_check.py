"""Verdicts: what is flagged, at which link, in which words, and what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from diffgrad.adapters.numpy import Floats, NumpyAdapter, Var
from diffgrad.bars import PRECISIONS, Bounded
from diffgrad.case import Case, Dtype
from diffgrad.chains import Chain, Link, chain_of
from diffgrad.check import Quantity, Report, check_links, check_run
from diffgrad.ops import BatchNorm, Copy, Dense, Products
from diffgrad.oracle import Expected, Walk
from diffgrad.specs import EPS, AttentionSpec, EncoderSpec, PatchEmbedSpec, Spec, TowerSpec, VitSpec
from diffgrad.specs.ops import Mask
from diffgrad.trace import Trace
from diffgrad.values import Bits, Values
from tests.helpers import KINDS, UIB, altered, ordinary, poked, run_numpy

P32 = PRECISIONS["float32"]
FIELDS = {"activation": "acts", "cotangent": "cots", "gradient": "grads"}


def check(trace: Trace, case: Case = UIB) -> Report:
    return check_run(chain_of(case.block), case.tensors(), trace, case.dtype)


def arrays(part: Trace | Expected, what: str) -> dict[str, Any]:
    return getattr(part, FIELDS[what])  # type: ignore[no-any-return]


def faults(report: Report) -> list[tuple[str, str, str, str]]:
    return [(q.verdict, q.link, q.what, q.name) for q in report.quantities if q.faulty]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_ok_and_everything_was_looked_at(kind: str, dtype: Dtype) -> None:
    case = ordinary(kind, dtype)
    chain = chain_of(case.block)
    report = check(run_numpy(case), case)
    assert report.verdict == "ok", report.first_fault
    assert (report.links, report.nodes) == (len(chain.links), len(case.block.parameters()))
    compared = {(q.what, q.name) for q in report.quantities}
    assert {name for what, name in compared if what == "gradient"} == set(chain.nodes)
    assert {name for what, name in compared if what == "activation"} == {link.writes for link in chain.links}
    assert {name for what, name in compared if what == "cotangent"} == {
        name for site, name in chain.cotangents().items() if site != chain.output
    }
    # In float64 the whole chain is compared end to end as well.
    assert len(report.quantities) == len(compared) * (2 if dtype == "float64" else 1)
    assert 0 <= report.worst_ratio <= 1
    assert report.elements > report.vacuous


# What cannot be compared, or is not finite: one row each.

NODE = ("conv2d@pc", "gradient", "pW")
SITE = ("batchnorm@en", "activation", "en")
COTANGENT = ("conv2d@ec", "cotangent", "CotQn")
SITE_OF = {"pW": "pW", "en": "en", "CotQn": "qn"}

UNFIT: tuple[tuple[tuple[str, str, str], NDArray[Any] | None, str], ...] = (
    (NODE, None, "wrong at conv2d@pc: gradient pW: not delivered (None or missing)"),
    (SITE, None, "wrong at batchnorm@en: activation en: not delivered (None or missing)"),
    (COTANGENT, None, "wrong at conv2d@ec: cotangent CotQn: not delivered (None or missing)"),
    (NODE, np.zeros((4, 2), np.float32), "wrong at conv2d@pc: gradient pW: shape (4, 2), expected (2, 4, 1, 1)"),
    (NODE, np.zeros((), np.float32), "wrong at conv2d@pc: gradient pW: shape (), expected (2, 4, 1, 1)"),
    (SITE, np.zeros((2, 3), np.float32), "wrong at batchnorm@en: activation en: shape (2, 3), expected (2, 4, 3, 4)"),
    (SITE, np.zeros((2, 3, 4, 4), np.float32), "wrong at batchnorm@en: activation en: shape (2, 3, 4, 4), expected"),
    (NODE, np.zeros((2, 4, 1, 1), np.float64), "wrong at conv2d@pc: gradient pW: dtype float64, expected float32"),
    (NODE, np.zeros((2, 4, 1, 1), np.float16), "wrong at conv2d@pc: gradient pW: dtype float16, expected float32"),
    (NODE, np.zeros((2, 4, 1, 1), np.int32), "wrong at conv2d@pc: gradient pW: dtype int32, expected float32"),
)  # fmt: skip


@pytest.mark.parametrize(("quantity", "array", "sentence"), UNFIT, ids=lambda v: str(v)[-50:])
def test_what_cannot_be_compared_is_wrong(
    quantity: tuple[str, str, str], array: NDArray[Any] | None, sentence: str
) -> None:
    _, what, name = quantity
    fault = check(altered(run_numpy(UIB), what, SITE_OF[name], array)).first_fault
    assert fault is not None
    assert fault.sentence().startswith(sentence)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("quantity", [NODE, SITE, COTANGENT], ids=str)
def test_one_element_that_is_not_finite_is_a_fault(quantity: tuple[str, str, str], value: float) -> None:
    link, what, name = quantity
    trace = run_numpy(UIB)
    array = arrays(trace, what)[SITE_OF[name]]
    index = tuple(s - 1 for s in array.shape)
    fault = check(altered(trace, what, SITE_OF[name], poked(array, value, index))).first_fault
    assert fault is not None
    assert (fault.verdict, fault.link, fault.name, fault.index) == ("nonfinite", link, name, index)
    assert (
        f"nonfinite at {link}: {what} {name}[{','.join(map(str, index))}]: got {value}, expected " in fault.sentence()
    )


@pytest.mark.parametrize("what", FIELDS)
def test_what_the_block_does_not_have_is_reported(what: str) -> None:
    trace = altered(run_numpy(UIB), what, "zz", np.zeros(1, np.float32))
    report = check(trace)
    assert [q.sentence() for q in report.quantities if q.faulty] == [
        f"wrong at block: {what} zz: delivered, but this block has none"
    ]


def test_a_sentence_names_link_node_index_got_expected_error_and_bar() -> None:
    trace = run_numpy(UIB)
    right = Walk(chain_of(UIB.block), UIB.tensors(), P32, trace).run().grads["eg"]
    fault = check(altered(trace, "gradient", "eg", poked(trace.grads["eg"], 1000.0, (2,)))).first_fault
    assert fault is not None
    val, bar = float(right.val[2]), float(right.err[2])
    assert fault.sentence() == (
        f"wrong at batchnorm@en: gradient eg[2]: got 1000, expected {val:.9g}, error {1000 - val:.3g}, bar {bar:.3g}"
    )
    assert (fault.got, fault.expected, fault.bar, fault.ratio) == (1000.0, val, bar, (1000 - val) / bar)


# Tightness: the first float32 beyond a bar is flagged, the last one within it is not.


def edge(b: Bounded, beyond: bool) -> tuple[tuple[int, ...], float]:
    """An element with a finite bar, and the float32 next to the upper end of what is allowed there."""
    flat = int(np.argmax(np.isfinite(b.err)))
    index = tuple(int(i) for i in np.unravel_index(flat, b.err.shape))
    top = float(b.val[index] + b.err[index])
    value = np.float32(top)
    while float(value) > top:
        value = np.nextafter(value, np.float32(-np.inf))
    while beyond and float(value) - float(b.val[index]) <= float(b.err[index]):
        value = np.nextafter(value, np.float32(np.inf))
    return index, float(value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantity_is_blamed_one_ulp_beyond_its_bar_and_not_within_it(kind: str) -> None:
    case = ordinary(kind)
    chain, trace = chain_of(case.block), run_numpy(case)
    expected = Walk(chain, case.tensors(), P32, trace).run()
    names = {"cotangent": chain.cotangents()}
    everything = [(what, name) for what in FIELDS for name in arrays(expected, what)]
    for what, name in everything[:: 1 + len(everything) // 25]:
        shown = names.get(what, {}).get(name, name)
        for beyond in (True, False):
            index, value = edge(arrays(expected, what)[name], beyond)
            report = check(altered(trace, what, name, poked(arrays(trace, what)[name], value, index)), case)
            mine = next(q for q in report.quantities if (q.what, q.name) == (what, shown))
            assert (mine.ratio > 1 or mine.error > mine.bar) is beyond, mine
            if not beyond:
                assert mine.verdict in ("ok", "vacuous")
            elif not mine.verdict.startswith("lossy"):  # a cheaper algorithm may fit, and is named then
                assert report.first_fault is mine
                assert (mine.verdict, mine.index) == ("wrong", index)


# Blame: forward links first, then backward from the output.


@pytest.mark.parametrize(
    ("one", "other", "blamed"),
    [
        (("gradient", "qW"), ("gradient", "pW"), "pW"),
        (("gradient", "pbt"), ("gradient", "pg"), "pg"),
        (("activation", "out"), ("gradient", "pW"), "out"),
        (("activation", "dn"), ("activation", "qc"), "qc"),
        (("cotangent", "ec"), ("gradient", "eg"), "eg"),
        (("cotangent", "x"), ("cotangent", "pn"), "CotPn"),
        (("cotangent", "x"), ("gradient", "qW"), "qW"),
    ],
    ids=str,
)
def test_the_first_fault_in_blame_order_is_blamed(one: tuple[str, str], other: tuple[str, str], blamed: str) -> None:
    trace = run_numpy(UIB)
    for what, name in (one, other):
        trace = altered(trace, what, name, arrays(trace, what)[name] + np.float32(1000))
    fault = check(trace).first_fault
    assert fault is not None
    assert fault.name == blamed


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_shape_is_delivered_the_answer_is_a_verdict(kind: str) -> None:
    case = ordinary(kind)
    chain, trace = chain_of(case.block), run_numpy(case)
    everything = [(what, name) for what in FIELDS for name in arrays(trace, what)]
    for what, name in everything[:: 1 + len(everything) // 12]:
        whole = arrays(trace, what)[name]
        for array in (None, np.atleast_1d(whole)[..., :0], whole[None], np.zeros(3, np.float32), whole.astype(np.int8)):
            fault = check(altered(trace, what, name, array), case).first_fault
            assert fault is not None
            assert (fault.verdict, fault.what) == ("wrong", what)
            assert fault.name == chain.cotangents().get(name, name) if what == "cotangent" else name


def test_a_fan_in_is_answered_for_by_all_its_readers() -> None:
    trace = run_numpy(UIB)
    fault = check(altered(trace, "cotangent", "x", trace.cots["x"] + np.float32(1))).first_fault
    assert fault is not None
    assert (fault.link, fault.name) == ("copy@xb+add@out", "CotIn")


# A chain of one link, so that a run can be written by hand.


def alone(link: Link) -> Chain:
    return Chain((link,), "x", "CotIn")


BN = alone(Link(BatchNorm(), ("x",), "out", "dyOut", ("g", "bt")))
COPY = alone(Link(Copy(), ("x",), "out", "dyOut"))


def judged(report: Report) -> dict[str, str]:
    return {q.name: q.verdict for q in report.quantities}


def test_a_vacuous_element_is_counted_and_fails_nothing() -> None:
    """A subnormal may be read as zero: it proves nothing. Its neighbour does."""
    v = np.array([[1e-40, 1.0]], np.float32)
    report = check_links(COPY, {"x": v, "dy": v}, Trace({"out": v}, {"x": v}, {}), P32)
    assert (report.verdict, report.vacuous, report.elements) == ("ok", 2, 4)


def test_a_sum_that_cancels_proves_something_although_its_value_is_zero() -> None:
    """Its bar is above 0 and so above the value, but far below what was summed."""
    v = Bits(1, "v").normal((1, 1, 1, 8)).astype(np.float32)
    dy = np.concatenate([v, -v], axis=3)
    tensors = {"x": Bits(1, "x").normal(dy.shape).astype(np.float32), "dy": dy}
    tensors |= {"g": np.ones(1, np.float32), "bt": np.zeros(1, np.float32)}
    run = altered(batchnorm(tensors, "two_pass"), "gradient", "bt", np.zeros(1, np.float32))
    assert judged(check_links(BN, tensors, run, P32))["bt"] == "ok"
    masked = altered(run, "gradient", "bt", v.sum(keepdims=True)[0, 0, 0])
    assert judged(check_links(BN, tensors, masked, P32))["bt"] == "wrong"


def test_a_run_in_which_nothing_proves_anything_is_vacuous() -> None:
    tensors = {k: np.full((1, 2), 1e-40, np.float32) for k in ("x", "dy")}
    trace = Trace({"out": tensors["x"]}, {"x": np.zeros((1, 2), np.float32)}, {})
    report = check_links(COPY, tensors, trace, P32)
    assert (report.verdict, report.first_fault, report.vacuous, report.elements) == ("vacuous", None, 4, 4)


def test_nothing_is_asked_where_the_oracle_itself_overflows() -> None:
    one, nan = (np.full((1, 1, 1, 2), v, np.float32) for v in (1.0, np.nan))
    channel = np.ones(1, np.float32)
    tensors: dict[str, NDArray[Any]] = {"x": 3e38 * one, "dy": one, "g": channel, "bt": 0 * channel}
    run = Trace({"out": nan}, {"x": nan}, {"g": nan[0, 0, 0, :1], "bt": 2 * channel})
    report = check_links(BN, tensors, run, P32)
    assert report.first_fault is None
    assert judged(report) == {"out": "vacuous", "g": "vacuous", "bt": "ok", "CotIn": "vacuous"}


def test_of_arrays_without_elements_the_shape_is_checked() -> None:
    empty = {"x": np.zeros((0, 2), np.float32), "dy": np.zeros((0, 2), np.float32)}
    right = Trace({"out": empty["x"]}, {"x": empty["x"]}, {})
    assert check_links(COPY, empty, right, P32).verdict == "ok"
    wrong = Trace({"out": np.zeros((2, 0), np.float32)}, {"x": empty["x"]}, {})
    assert check_links(COPY, empty, wrong, P32).verdict == "wrong"


# Named looser models.


def batchnorm(t: dict[str, NDArray[Any]], how: str) -> Trace:
    """Batch norm in float32 with the variance taken in one pass, in two, or without bias."""
    f, m = np.float32, (0, 2, 3)
    x, dy, g = t["x"], t["dy"], t["g"][:, None, None]
    n = f(x.size // x.shape[1])
    mean = x.mean(m, keepdims=True)
    c = x - mean
    variance = {
        "two_pass": lambda: (c * c).mean(m, keepdims=True),
        "one_pass": lambda: (x * x).mean(m, keepdims=True) - mean * mean,
        "unbiased": lambda: (c * c).sum(m, keepdims=True) / (n - f(1)),
    }[how]()
    s = 1 / np.sqrt(variance + f(EPS))
    xhat = c * s
    d = g * dy
    dx = (s / n) * (n * d - d.sum(m, keepdims=True) - xhat * (xhat * d).sum(m, keepdims=True))
    out = g * xhat + t["bt"][:, None, None]
    return Trace({"out": out}, {"x": dx}, {"g": (dy * xhat).sum(m), "bt": dy.sum(m)})


def bn_tensors(offset: float) -> dict[str, NDArray[Any]]:
    bits, shape = Bits(3, "bn"), (2, 2, 4, 4)
    t = {"x": bits.normal(shape) + offset, "g": 1 + 0.5 * bits.normal((2,)), "bt": bits.normal((2,))}
    return {k: v.astype(np.float32) for k, v in (t | {"dy": bits.normal(shape)}).items()}


@pytest.mark.parametrize(
    ("offset", "how", "verdict"),
    [
        (0.0, "two_pass", "ok"),
        (64.0, "two_pass", "ok"),
        (64.0, "one_pass", "lossy:one_pass_variance"),
        (0.0, "unbiased", "wrong"),
        (64.0, "unbiased", "wrong"),
    ],
)
def test_a_one_pass_variance_is_named_and_hides_nothing(offset: float, how: str, verdict: str) -> None:
    tensors = bn_tensors(offset)
    report = check_links(BN, tensors, batchnorm(tensors, how), P32)
    assert report.verdict == verdict
    assert (report.first_fault is None) is (verdict != "wrong")


@pytest.mark.parametrize("node", ["g", "bt"])
def test_a_looser_model_must_explain_all_that_its_link_delivered(node: str) -> None:
    tensors = bn_tensors(64.0)
    run = batchnorm(tensors, "one_pass")
    report = check_links(BN, tensors, altered(run, "gradient", node, run.grads[node] + np.float32(1)), P32)
    assert report.verdict == "wrong"
    assert judged(report)[node] == "wrong"


def test_a_missing_gradient_is_never_lossy() -> None:
    tensors = bn_tensors(64.0)
    report = check_links(BN, tensors, altered(batchnorm(tensors, "one_pass"), "gradient", "g", None), P32)
    assert (report.verdict, judged(report)["g"]) == ("wrong", "wrong")


# Rounded operands, and what a framework's mixed precision rounds besides.

DENSE = alone(Link(Dense(Products(bf16=True)), ("x",), "out", "dyOut", ("W", "b")))


def bf16(v: NDArray[Any]) -> NDArray[Any]:
    return NumpyAdapter().operand(v, True)


def mixed(t: dict[str, NDArray[Any]], how: str) -> Trace:
    """A dense layer in float32 with operands rounded to bfloat16, as several frameworks would."""
    x, w, dy = t["x"], t["W"], t["dy"]
    if how != "operands as they are":
        x, w = bf16(x), bf16(w)
        dy = dy if "float32 cotangent" in how else bf16(dy)
    products = {"out": x @ w, "x": dy @ w.T, "W": x.T @ dy}
    if "rounded results" in how:
        products = {name: bf16(v) for name, v in products.items()}
    if "larger" in how:
        products["x"] = products["x"] * np.float32(1.05)
    if "a term short" in how:
        products["W"] = products["W"] - np.multiply.outer(x[-1], dy[-1])
    if "a key short" in how:
        products["out"] = products["out"] - np.multiply.outer(x[:, -1], w[-1])
    bias = bf16(t["b"]) if "rounded bias" in how else t["b"]
    return Trace({"out": products["out"] + bias}, {"x": products["x"]}, {"W": products["W"], "b": t["dy"].sum(0)})


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ("plain", "ok"),
        ("rounded results", "lossy:bf16_result"),
        ("float32 cotangent", "lossy:f32_cotangent"),
        ("rounded results, float32 cotangent", "lossy:bf16_result+f32_cotangent"),
        ("operands as they are", "wrong"),
        ("rounded bias", "wrong"),
        ("larger", "wrong"),
        ("a term short", "wrong"),
        ("a key short", "wrong"),
        ("rounded results, larger", "wrong"),
        ("rounded results, a term short", "wrong"),
        ("rounded results, a key short", "wrong"),
        ("float32 cotangent, larger", "wrong"),
        ("rounded results, float32 cotangent, a term short", "wrong"),
    ],
)
def test_rounded_products_are_named_and_hide_nothing(how: str, verdict: str) -> None:
    bits = Bits(3, "mixed")
    tensors = {"x": bits.normal((6, 12)), "W": bits.normal((12, 8)), "b": bits.normal((8,)), "dy": bits.normal((6, 8))}
    tensors = {name: v.astype(np.float32) for name, v in tensors.items()}
    assert check_links(DENSE, tensors, mixed(tensors, how), P32).verdict == verdict


class RoundsResults(NumpyAdapter):
    """Rounds what the products of a dense layer give, and passes on ``factor`` of its input's cotangent."""

    factor = 1.0

    def dense(self, x: Var, w: Var, b: Var, bf16: bool = False) -> Var:
        y = super().dense(x, w, Var(np.zeros_like(b.value)), bf16)

        def pull(dy: Floats) -> tuple[Floats, ...]:
            dx, dw, db = y.pull(dy)
            return self.operand(dx * dx.dtype.type(self.factor), bf16), self.operand(dw, bf16), db

        return Var(self.operand(y.value, bf16) + b.value, (x, w, b), pull)


class RoundsTooLarge(RoundsResults):
    factor = 1.05


def run(adapter: NumpyAdapter, case: Case) -> Report:
    return check(adapter.trace(case, case.tensors())[0], case)


def encoder(dtype: Dtype = "float32", **fields: Any) -> Case:
    return Case(block=EncoderSpec(n=2, t=5, heads=2, head_dim=4, mlp=8, **fields), dtype=dtype, values=Values(seed=1))


@pytest.mark.parametrize("core", ["composed", "fused"])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(n=2, t=5, heads=2, head_dim=3),
        EncoderSpec(n=2, t=5, heads=2, head_dim=3, mlp=8),
        TowerSpec(n=2, t=5, heads=2, head_dim=3, mlp=8, depth=2),
        VitSpec(n=2, h=4, w=4, p=2, heads=2, head_dim=3, mlp=8, depth=2, classes=4),
        PatchEmbedSpec(n=2, h=4, w=4, p=2, d=3),
    ],
    ids=lambda s: s.kind,
)
def test_a_healthy_run_with_rounded_operands_is_ok(spec: Spec, core: str) -> None:
    flags = {"bf16": True, "bf16_conv": True, "core": core}
    block = msgspec.structs.replace(spec, **{k: v for k, v in flags.items() if k in spec.__struct_fields__})
    case = Case(block=block, values=Values(seed=1))  # type: ignore[arg-type]
    assert check(run_numpy(case), case).verdict == "ok"
    plain = Case(block=spec, values=Values(seed=1))  # type: ignore[arg-type]
    assert check(run_numpy(plain), case).verdict == "wrong"


def test_one_model_may_explain_all_links_of_a_fan_in() -> None:
    """Three projections read n1: what each hands back is rounded, and their sum is no bfloat16 number."""
    report = run(RoundsResults(), encoder(bf16=True))
    assert report.first_fault is None
    assert report.verdict == "lossy:bf16_result"
    fan_in = next(q for q in report.quantities if q.name == "dN1")
    assert (fan_in.link, fan_in.verdict) == ("dense@q+dense@k+dense@v", "lossy:bf16_result")


def test_a_fault_of_a_fan_in_is_not_explained() -> None:
    wrong = {q.name for q in run(RoundsTooLarge(), encoder(bf16=True)).quantities if q.faulty}
    assert wrong >= {"dN1", "dN2", "dG", "dConcat"}


def test_without_the_flag_no_rounding_is_explained() -> None:
    class Rounds(RoundsResults):
        def operand(self, v: Floats, bf16: bool) -> Floats:
            return super().operand(v, True)

    assert run(Rounds(), encoder()).verdict == "wrong"


class Float32Softmax(NumpyAdapter):
    """Takes its softmax in float32, forward and backward, in a float64 run as well."""

    factor = 1.0

    def softmax(self, z: Var, axis: int = -1, mask: Mask = ()) -> Var:
        low, real = super().softmax(Var(z.value.astype(np.float32)), axis, mask), z.value.dtype

        def pull(dp: Floats) -> tuple[Floats, ...]:
            (dz,) = low.pull(dp.astype(np.float32))
            return (dz.astype(real) * self.factor,)

        return Var(low.value.astype(real), (z,), pull)


class Float32SoftmaxTooLarge(Float32Softmax):
    factor = 1.05


class Float32SoftmaxWithoutItsSum(Float32Softmax):
    def softmax_back(self, p: Floats, dp: Floats, axis: int) -> Floats:
        return np.asarray(p * dp)


@pytest.mark.parametrize(
    ("adapter", "core", "dtype", "verdict"),
    [
        (NumpyAdapter, "fused", "float64", "ok"),
        (Float32Softmax, "fused", "float64", "lossy:f32_softmax"),
        (Float32Softmax, "fused", "float32", "ok"),
        (Float32Softmax, "composed", "float64", "wrong"),
        (Float32SoftmaxTooLarge, "fused", "float64", "wrong"),
        (Float32SoftmaxWithoutItsSum, "fused", "float64", "wrong"),
    ],
)
def test_a_softmax_in_float32_is_named_and_hides_nothing(
    adapter: type[NumpyAdapter], core: Any, dtype: Dtype, verdict: str
) -> None:
    report = run(adapter(), encoder(dtype, core=core))
    assert report.verdict == verdict
    if verdict == "lossy:f32_softmax":
        assert {q.link for q in report.quantities if q.verdict == verdict} <= {"attention@o"}


@pytest.mark.parametrize(
    ("verdicts", "overall"),
    [
        (("ok", "ok"), "ok"),
        (("vacuous", "ok"), "ok"),
        (("vacuous", "vacuous"), "vacuous"),
        (("ok", "lossy:tf32"), "lossy:tf32"),
        (("lossy:tf32", "nonfinite", "wrong"), "nonfinite"),
        (("ok", "wrong", "nonfinite"), "wrong"),
    ],
    ids=str,
)
def test_the_verdict_of_a_run(verdicts: tuple[str, ...], overall: str) -> None:
    assert Report(tuple(Quantity("l", "gradient", "g", v) for v in verdicts), 1, 1).verdict == overall
