"""TensorFlow under every condition that it offers: the same quantities as in its plain run, and no wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from diffgrad.adapters.registry import OFFERS
from diffgrad.case import Case, Dtype
from diffgrad.specs import (
    BatchNormOpSpec,
    ConvNeXtStemSpec,
    ConvOpSpec,
    LayerNormOpSpec,
    LossSpec,
    SoftmaxOpSpec,
    UibSpec,
)
from diffgrad.specs.ops import OpPadding
from tests.conditions import DTYPES, MEMORIES, case_of, same_quantities, traces
from tests.conftest import GetWorkers
from tests.helpers import python

OFFER = OFFERS["tensorflow"]

UIB = UibSpec(n=2, h=3, w=4, c=2, expand=2, pre_k=3, post_k=3)
BLOCKS = (
    UIB,
    ConvNeXtStemSpec(n=2, ic=2, oc=3, h=4, w=4, k=2, norm="scalar", dx=True),
    LayerNormOpSpec(n=2, t=3, d=4, norm="scalar"),
    SoftmaxOpSpec(n=2, size=3),
    LossSpec(n=3, classes=4),
)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.kind)


@each_block
@pytest.mark.parametrize("mode", OFFER.modes)
def test_every_mode_delivers_the_quantities_of_the_plain_run(mode: str, block: Any, workers: GetWorkers) -> None:
    plain, other = traces(workers("tensorflow"), case_of(block), case_of(block, mode=mode, x="offset"))
    assert set(other.acts) == set(plain.acts)
    if mode == "jvp":
        assert set(other.tangents) == set(plain.acts)
        assert (other.cots, other.grads) == ({}, {})
    else:
        same_quantities(other, plain)


@each_block
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_everywhere_and_nothing_is_wrong(block: Any, dtype: Dtype, workers: GetWorkers) -> None:
    cases = [case_of(block, dtype, mode=m, x="step", params="offset") for m in OFFER.modes]
    for trace in traces(workers("tensorflow"), *cases):
        assert {v.dtype.name for part in trace.parts() for v in part.values()} == {dtype}


@each_block
def test_the_bare_run_exposes_inputs_and_outputs_only(block: Any, workers: GetWorkers) -> None:
    modes = [m for m in OFFER.modes if m != "jvp"]
    for trace in traces(workers("tensorflow"), *(case_of(block, mode=m, bare=True) for m in modes)):
        x = block.input().name
        observed = {"out": trace.acts["out"], x: trace.cots[x], **trace.grads}
        assert {k: v.shape for k, v in trace.bare.items()} == {k: v.shape for k, v in observed.items()}


def _conditions() -> Iterator[dict[str, Any]]:
    for field, memory in product(("x", "dy", "params"), MEMORIES):
        yield {field: memory}
    for norm in OFFER.norms:
        yield {"norm": norm}
    yield from ({"conv": "layer"}, {"deterministic": True}, {"mode": "xla", "layout": "channels_first"})
    yield {"mode": "xla", "conv": "grouped"}


@pytest.mark.parametrize("how", list(_conditions()), ids=lambda how: "-".join(map(str, how.values())))
def test_no_realization_layout_or_memory_is_wrong(how: dict[str, Any], workers: GetWorkers) -> None:
    blocks = (UIB, BatchNormOpSpec(n=3, c=2, h=2, w=2), LayerNormOpSpec(n=2, t=3, d=4))
    for block in blocks:
        traces(workers("tensorflow"), case_of(block, "float32", **how))


@pytest.mark.parametrize("conv", ["", "layer"])
@pytest.mark.parametrize("depthwise", [False, True], ids=["full", "depthwise"])
def test_every_convolution_takes_every_padding(conv: str, depthwise: bool, workers: GetWorkers) -> None:
    def drawn(padding: OpPadding, n: int = 2, **sizes: Any) -> Case:
        sizes = {"h": 5, "w": 4, "ic": 2, "oc": 2, "k": 3} | sizes
        spec = ConvOpSpec(n=n, padding=padding, depthwise=depthwise, bias=True, **sizes)
        return case_of(spec, conv=conv)

    traces(
        workers("tensorflow"),
        *(drawn(padding, stride=stride) for padding in ("symmetric", "xla_same", "valid") for stride in (1, 2)),
        drawn("explicit", pads=(1, 0, 2, 1)),
        drawn("explicit", pads=(-1, 2, 0, -1)),
        drawn("explicit", pads=(4, -1, 0, 0), stride=2),
    )


REFUSED = """
import json
from diffgrad.adapters.tensorflow import TensorFlowAdapter
from diffgrad.case import Case
from diffgrad.how import How
from diffgrad.specs import BatchNormOpSpec, ConvOpSpec
adapter = TensorFlowAdapter()
conv = ConvOpSpec(n=2, h=4, w=4, ic=2, oc=2, k=3, padding="symmetric", depthwise=True)
cases = [
    Case(block=conv, how=How(layout="channels_first")),
    Case(block=conv, how=How(conv="grouped")),
    Case(block=BatchNormOpSpec(n=2, c=2, h=2, w=2), dtype="float64", how=How(norm="fused")),
]
said = {}
for case in cases:
    try:
        adapter.trace(case, case.tensors())
        said[adapter.refusal(case)] = ""
    except Exception as e:
        said[adapter.refusal(case)] = type(e).__name__
print(json.dumps([said, [u.reason for u in adapter.unsupported]]))
"""


def test_tensorflow_refuses_what_is_listed_as_unsupported_and_no_more() -> None:
    ran = python("-c", REFUSED)
    assert ran.returncode == 0, ran.stderr
    said, reasons = json.loads(ran.stdout)
    assert set(said) == set(reasons)
    assert all(said.values()), said


def test_a_device_that_is_not_there_is_no_run_on_another(workers: GetWorkers) -> None:
    ran = python(
        "-c",
        "from diffgrad.adapters.tensorflow import TensorFlowAdapter\n"
        "from diffgrad.case import Case\n"
        "from diffgrad.how import How\n"
        "from diffgrad.specs import SoftmaxOpSpec\n"
        "print(TensorFlowAdapter().run(Case(block=SoftmaxOpSpec(n=1, size=2), how=How(device='cuda'))).reason)",
    )
    assert ran.stdout.strip() == "RuntimeError: device cuda: TensorFlow sees no GPU here"
