"""The NumPy reference on single ops and in 16-bit formats: what the chain and the checker do not say of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from diffgrad.adapters.numpy import NumpyAdapter
from diffgrad.case import Case, Dtype, numpy_dtype
from diffgrad.how import How
from diffgrad.specs import Drop
from diffgrad.specs.ops import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    ConvOpSpec,
    DenseOpSpec,
    DropPathOpSpec,
    LayerNormOpSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
)
from diffgrad.strategies import cases, sample
from diffgrad.strategies.cases import DTYPES
from diffgrad.strategies.ops import OPS
from diffgrad.trace import Arrays, Trace
from diffgrad.values import Values
from tests.helpers import KINDS, UIB, ordinary

HALVES: tuple[Dtype, ...] = ("bfloat16", "float16")


def run(case: Case, **given: Any) -> Trace:
    """The case, with some of its tensors replaced."""
    tensors = case.tensors()
    changed = {name: np.asarray(v, tensors[name].dtype).reshape(tensors[name].shape) for name, v in given.items()}
    return NumpyAdapter().trace(case, tensors | changed)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_has_the_case_s_dtype_and_its_tensor_s_shape(kind: str, dtype: Dtype) -> None:
    case = msgspec.structs.replace(ordinary(kind), dtype=dtype, lr=0.5)
    trace, given = run(case), case.tensors()
    assert {v.dtype for part in trace.parts() for v in part.values()} == {numpy_dtype(dtype)}
    assert trace.acts["out"].shape == case.block.output_shape()
    for name, v in (trace.grads | trace.updates).items():
        assert v.shape == given[name].shape
    for site, v in trace.cots.items():
        assert v.shape == (trace.acts | given)[site].shape


@pytest.mark.parametrize("kind", OPS)
def test_generated_ops_of_16_bits_have_their_dtype_too(kind: str) -> None:
    for case in sample(cases([kind], HALVES), 30, key=3):
        limit = {"limits": 15}.get(case.values.family, case.values.exponent)
        case = msgspec.structs.replace(case, values=Values(case.values.family, 1, min(limit, case.values.exponent)))
        trace = run(case)
        assert {v.dtype for part in trace.parts() for v in part.values()} == {numpy_dtype(case.dtype)}


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_16_bits_are_taken_in_float32(dtype: Dtype) -> None:
    """A sum in bfloat16 itself would stop growing at 256, one in float16 at 2048."""
    dense = run(Case(block=DenseOpSpec(n=4096, i=1, o=1), dtype=dtype), x=np.ones((4096, 1)), dy=np.ones((4096, 1)))
    assert dense.grads["W"] == dense.grads["b"] == 4096
    case = Case(block=LayerNormOpSpec(n=4096, t=1, d=1), dtype=dtype)
    assert run(case, dy=np.ones((4096, 1, 1))).grads["bt"] == 4096
    long = run(Case(block=DenseOpSpec(n=1, i=4096, o=1), dtype=dtype), x=np.ones((1, 4096)), W=np.ones((4096, 1)), b=0)
    assert long.acts["out"] == 4096


def test_what_a_primitive_gives_is_rounded_to_the_format() -> None:
    case = msgspec.structs.replace(UIB, dtype="bfloat16")
    wide = run(UIB, **{k: v.astype(np.float32) for k, v in case.tensors().items()})
    first = wide.acts["qc"].astype(ml_dtypes.bfloat16)
    assert (first == run(case).acts["qc"]).all()
    assert (first != wide.acts["qc"]).any()


def test_a_float16_result_beyond_its_range_is_infinite() -> None:
    trace = run(Case(block=DenseOpSpec(n=1, i=2, o=1), dtype="float16"), x=[[40000, 40000]], W=[[1], [1]], b=[0])
    assert np.isposinf(trace.acts["out"]).all()


def padded(x: NDArray[Any], pads: tuple[int, int, int, int]) -> NDArray[Any]:
    """Zeros added and rows cropped by NumPy's own means."""
    top, bottom, left, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0))))
    h, w = x.shape[2:]
    return x[:, :, max(-top, 0) : h - max(-bottom, 0), max(-left, 0) : w - max(-right, 0)]


PADS = [(0, 0, 0, 0), (4, -1, 0, 2), (-2, 5, -1, -1), (3, 3, -3, 4), (-1, 0, 0, -2), (0, 7, 6, 0)]


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("pads", PADS, ids=str)
def test_explicit_padding_is_padding_and_cropping_before_a_valid_convolution(
    pads: tuple[int, int, int, int], stride: int, depthwise: bool
) -> None:
    oc = 2 if depthwise else 3
    block = ConvOpSpec(
        n=2, h=7, w=6, ic=2, oc=oc, k=2, stride=stride, padding="explicit", pads=pads, bias=True, depthwise=depthwise
    )
    case = Case(block=block, dtype="float64", values=Values(seed=2))
    t = case.tensors()
    before = padded(t["x"], pads)
    valid = msgspec.structs.replace(block, h=before.shape[2], w=before.shape[3], padding="valid", pads=(0, 0, 0, 0))
    got, other = run(case), NumpyAdapter().trace(Case(block=valid, dtype="float64"), t | {"x": before})[0]
    assert (got.acts["out"] == other.acts["out"]).all()
    assert all((got.grads[name] == other.grads[name]).all() for name in got.grads)
    # The padding is linear, so its transpose is the same map the other way: what was cropped gets 0.
    ones = padded(np.arange(1.0, t["x"].size + 1).reshape(t["x"].shape), pads)
    expected = np.zeros(t["x"].size + 1)
    expected[ones.astype(int).ravel()] = other.cots["x"].ravel()
    assert (got.cots["x"].ravel() == expected[1:]).all()


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("padding", ["valid", "symmetric", "xla_same", "explicit"])
def test_an_empty_batch_has_an_empty_output_and_gradients_of_0(padding: Any, depthwise: bool) -> None:
    block = ConvOpSpec(n=0, h=5, w=4, ic=2, oc=2, k=3, stride=2, padding=padding, bias=True, depthwise=depthwise)
    trace = run(Case(block=block))
    assert trace.acts["out"].shape == block.output_shape()
    assert trace.cots["x"].shape == (0, 2, 5, 4)
    assert (trace.grads["W"].shape, trace.grads["b"].shape) == (block.parameters()[0].shape, (2,))
    assert not any(g.any() for g in trace.grads.values())


@pytest.mark.parametrize(
    ("act", "x", "out", "slope"),
    [
        ("relu", [-1, -0.0, 0, 2.0**-126, 7], [0, 0, 0, 2.0**-126, 7], [0, 0, 0, 1, 1]),
        ("relu6", [-1, 0, 5.5, 6, 7], [0, 0, 5.5, 6, 6], [0, 0, 1, 0, 0]),
        ("swish", [-1e30, 0, 1e30, 1e38, -1e38], [0, 0, 1e30, 1e38, 0], [0, 0.5, 1, 1, 0]),
        ("gelu_tanh", [-1e30, 0, 1e30, 1e38, -1e38], [0, 0, 1e30, 1e38, 0], [0, 0.5, 1, 1, 0]),
        ("gelu_erf", [-1e30, 0, 1e30, 1e38, -1e38], [0, 0, 1e30, 1e38, 0], [0, 0.5, 1, 1, 0]),
    ],
)
def test_activations_at_their_kinks_and_where_they_saturate(
    act: Any, x: list[float], out: list[float], slope: list[float]
) -> None:
    trace = run(Case(block=ActivationOpSpec(n=1, size=5, act=act)), x=x, dy=np.ones(5))
    assert (trace.acts["out"] == np.array(out, np.float32)).all()
    assert (trace.cots["x"] == np.array(slope, np.float32)).all()


def test_a_few_ops_by_hand() -> None:
    pool = run(Case(block=PoolOpSpec(n=1, h=2, w=4, c=1)), x=np.arange(8), dy=[8])
    assert pool.acts["out"].ravel() == [3.5]
    assert (pool.cots["x"] == 1).all()
    drop = run(Case(block=DropPathOpSpec(n=2, size=1, drop=Drop(0.5, (True, False)))), x=[3, 3], dy=[1, 1])
    assert drop.acts["out"].ravel().tolist() == [6, 0]
    assert drop.cots["x"].ravel().tolist() == [2, 0]
    soft = run(Case(block=SoftmaxOpSpec(n=1, size=2)), x=[0, 0], dy=[1, 0])
    assert soft.acts["out"].ravel().tolist() == [0.5, 0.5]
    assert soft.cots["x"].ravel().tolist() == [0.25, -0.25]


def test_the_attention_core_reads_each_head_s_own_slab() -> None:
    case = Case(block=AttentionCoreOpSpec(n=2, t=3, heads=2, head_dim=4), dtype="float64", values=Values(seed=4))
    t, trace = case.tensors(), run(case)
    for head in (slice(0, 4), slice(4, 8)):
        one = Case(block=AttentionCoreOpSpec(n=2, t=3, heads=1, head_dim=4), dtype="float64")
        alone = NumpyAdapter().trace(one, {name: v[..., head] for name, v in t.items()})[0]
        everything: Arrays = {"out": alone.acts["out"], "x": alone.cots["x"], **alone.grads}
        whole: Arrays = {"out": trace.acts["out"], "x": trace.cots["x"], **trace.grads}
        for name, v in everything.items():
            np.testing.assert_allclose(whole[name][..., head], v, rtol=1e-12)


@pytest.mark.parametrize("kind", ["uib", "stem", "op_conv", "op_sdpa", "loss"])
def test_a_bare_run_gives_the_ends_of_the_observed_one(kind: str) -> None:
    case = msgspec.structs.replace(ordinary(kind), how=How(bare=True))
    trace = run(case)
    assert set(trace.bare) == {"out", *case.block.differentiated()}
    observed = {"out": trace.acts["out"], **{k: trace.cots[k] for k in trace.cots if k == "x"}, **trace.grads}
    assert all((v == observed[name]).all() for name, v in trace.bare.items())
    assert run(ordinary(kind)).bare == {}
