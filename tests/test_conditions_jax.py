"""JAX under every condition that it offers: the same quantities as in its plain run, and no wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from diffgrad.adapters.registry import OFFERS
from diffgrad.case import Case, Dtype
from diffgrad.how import Device
from diffgrad.specs import AttentionCoreOpSpec, ConvNeXtStemSpec, ConvOpSpec, LayerNormOpSpec, LossSpec, UibSpec
from diffgrad.specs.ops import OpPadding
from diffgrad.trace import Trace
from diffgrad.worker import Answer
from tests.conditions import DTYPES, MEMORIES, case_of, same_quantities, sound, traces
from tests.conftest import GetWorkers
from tests.helpers import python

OFFER = OFFERS["jax"]

LAYER_NORM = LayerNormOpSpec(n=2, t=3, d=4, norm="scalar")
ATTENTION = AttentionCoreOpSpec(n=2, t=3, heads=2, head_dim=2)
LOSS = LossSpec(n=3, classes=4)
BLOCKS = (
    UibSpec(n=2, h=3, w=4, c=2, expand=2, pre_k=3, post_k=3),
    ConvNeXtStemSpec(n=2, ic=2, oc=3, h=4, w=4, k=2, norm="scalar", dx=True),
    LAYER_NORM,
    ATTENTION,
    LOSS,
)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.kind)


def answers(workers: GetWorkers, *cases: Case) -> Iterator[Answer]:
    return workers("jax").run(cases)


def dtypes(trace: Trace) -> set[str]:
    return {v.dtype.name for part in trace.parts() for v in part.values()}


@each_block
@pytest.mark.parametrize("mode", OFFER.modes)
def test_every_mode_delivers_the_quantities_of_the_plain_run(mode: str, block: Any, workers: GetWorkers) -> None:
    plain, other = traces(workers("jax"), case_of(block), case_of(block, mode=mode, x="offset"))
    assert set(other.acts) == set(plain.acts)
    if mode == "jvp":
        assert set(other.tangents) == set(plain.acts)
        assert (other.cots, other.grads) == ({}, {})
    else:
        same_quantities(other, plain)


@each_block
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_everywhere_and_nothing_is_wrong(block: Any, dtype: Dtype, workers: GetWorkers) -> None:
    modes = [m for m in OFFER.modes if m != "eager"]
    cases = [case_of(block, dtype, mode=m, x="step", params="offset") for m in modes]
    for answer in answers(workers, *cases):
        if (dtype, block.kind) == ("float16", "op_sdpa"):
            assert "not supported by dot_general on CPU" in answer.outcome.reason  # a finding, see corpus
        else:
            assert dtypes(sound(answer)) == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [LAYER_NORM, ATTENTION], ids=lambda b: b.kind)
def test_op_by_op_every_dtype_is_there(dtype: Dtype, block: Any, workers: GetWorkers) -> None:
    (trace,) = traces(workers("jax"), case_of(block, dtype, mode="eager"))
    assert dtypes(trace) == {dtype}


@each_block
def test_the_bare_run_exposes_inputs_and_outputs_only(block: Any, workers: GetWorkers) -> None:
    modes = [m for m in OFFER.modes if m != "jvp"]
    for trace in traces(workers("jax"), *(case_of(block, mode=m, bare=True) for m in modes)):
        x = block.input().name
        observed = {"out": trace.acts["out"], x: trace.cots[x], **trace.grads}
        assert {k: v.shape for k, v in trace.bare.items()} == {k: v.shape for k, v in observed.items()}
        for name, v in trace.bare.items():
            np.testing.assert_allclose(v, observed[name], rtol=0, atol=1e-12 * np.abs(observed[name]).max())


@pytest.mark.parametrize(
    "how",
    [
        *({"norm": norm} for norm in OFFER.norms),
        *({"conv": conv, "layout": layout} for conv in ("", *OFFER.convs) for layout in ("", *OFFER.layouts)),
        *(dict.fromkeys(("x", "dy", "params"), memory) for memory in MEMORIES),
    ],
    ids=str,
)
def test_no_realization_layout_or_memory_changes_the_function(how: dict[str, Any], workers: GetWorkers) -> None:
    traces(workers("jax"), *(case_of(block, **how) for block in BLOCKS))


@pytest.mark.parametrize("conv", ["", *OFFER.convs])
@pytest.mark.parametrize("depthwise", [False, True], ids=("full", "depthwise"))
@pytest.mark.parametrize("layout", ["", *OFFER.layouts])
def test_every_convolution_takes_every_padding(conv: str, depthwise: bool, layout: str, workers: GetWorkers) -> None:
    def drawn(padding: OpPadding, n: int = 2, **sizes: Any) -> Case:
        oc = 2 if depthwise else 3
        block = ConvOpSpec(n=n, h=5, w=6, ic=2, oc=oc, k=3, padding=padding, depthwise=depthwise, **sizes)
        return case_of(block, "float32", conv=conv, layout=layout)

    cases = [drawn(p, bias=True, stride=s) for p in ("symmetric", "xla_same", "valid") for s in (1, 2)]
    cases += [drawn("explicit", pads=pads) for pads in ((1, 0, 2, 1), (-1, 2, 0, -2), (4, 4, 4, 4))]
    cases += [drawn("valid", n=0)]
    traces(workers("jax"), *cases)


_IN_PROCESS = """
import jax, json
from diffgrad.adapters.jax import JaxAdapter
from tests.test_conditions_jax import ATTENTION, LOSS, case_of
"""


def said(program: str) -> str:
    """What a program about the adapter prints, in a process of its own."""
    ran = python("-W", "ignore", "-c", _IN_PROCESS + program, JAX_PLATFORMS="cpu")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_programs_are_kept_by_what_shapes_them() -> None:
    counts = said("""
adapter = JaxAdapter(quick=True)
from msgspec.structs import replace
case = case_of(LOSS, "float32")
runs = [
    case, case_of(LOSS, "float32", mode="jit"), replace(case, values=replace(case.values, seed=9)),
    replace(case, lr=0.5), case_of(LOSS, "float32", threads=2),
    case_of(LOSS, "float64"), case_of(LOSS, "float32", mode="linearize"),
    case_of(LOSS, "float32", x="step"), case_of(LOSS, "float32", bare=True),
    case_of(LOSS, "float32", mode="jvp"), case_of(LOSS, "float32", mode="jvp", dy="step"),
]
for run in runs:
    assert adapter.run(run).status == "ok"
    print(adapter._program.cache_info().misses)
""")
    assert counts.split() == ["1", "1", "1", "1", "1", "2", "3", "4", "5", "6", "6"]


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_device_that_is_not_there_is_no_run_on_another(platform: Device) -> None:
    program = f"""
jax.devices = lambda name=None, real=jax.devices: real("cpu") if name is None else absent(name)
def absent(name):
    raise RuntimeError(f"Unknown backend {{name}}")
outcome = JaxAdapter().run(case_of(LOSS, device={platform!r}))
print(outcome.status, outcome.reason)
"""
    assert said(program).startswith(f"error RuntimeError: how.device = {platform}: JAX sees no such device")


def test_an_output_on_another_device_is_an_error() -> None:
    assert (
        said("""
from diffgrad.adapters import jax_modes as modes
from diffgrad.how import PLAIN
modes.PLATFORMS = {"cpu": "cpu", "cuda": "cpu"}
modes.fetch(modes.Seen(jax.numpy.ones(2)), PLAIN)
modes.PLATFORMS = {"cpu": "gpu"}
try:
    modes.fetch(modes.Seen(jax.numpy.ones(2)), PLAIN)
except RuntimeError as e:
    print(e)
""")
        == "how.device = cpu: the output is on cpu"
    )


def test_every_condition_that_is_offered_has_a_realization() -> None:
    found = said("""
from diffgrad.adapters.jax_layers import _CONVS, _NORMS
from diffgrad.adapters.jax_modes import _DERIVATIVES
print(json.dumps([list(_NORMS), list(_CONVS), [*_DERIVATIVES, "jvp"]]))
""")
    norms, convs, modes = json.loads(found)
    assert norms == ["", *OFFER.norms]
    assert {tuple(pair) for pair in convs} == set(product(("", *OFFER.convs), ("", *OFFER.layouts)))
    assert set(modes) == set(OFFER.modes)
