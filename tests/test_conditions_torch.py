"""torch under every condition that it offers: the same quantities as in its plain run, and no wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from diffgrad.adapters.registry import OFFERS
from diffgrad.case import Case, Dtype
from diffgrad.how import How
from diffgrad.specs import (
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    ConvNeXtStemSpec,
    ConvOpSpec,
    LayerNormOpSpec,
    LossSpec,
    TowerSpec,
    UibSpec,
)
from diffgrad.specs.ops import OpPadding
from diffgrad.worker import Answer
from tests.conditions import DTYPES, MEMORIES, case_of, same_quantities, traces
from tests.conftest import GetWorkers
from tests.helpers import python

OFFER = OFFERS["torch"]
INTERPRETED = tuple(m for m in OFFER.modes if m != "compile")
"""The modes that cost next to nothing."""

UIB = UibSpec(n=2, h=3, w=4, c=2, expand=2, pre_k=3, post_k=3)
LAYER_NORM = LayerNormOpSpec(n=2, t=3, d=4)
TOWER = TowerSpec(n=2, t=3, heads=2, head_dim=2, mlp=3, depth=2)
BLOCKS = (
    UIB,
    ConvNeXtStemSpec(n=2, ic=2, oc=3, h=4, w=4, k=2, norm="scalar", dx=True),
    BatchNormOpSpec(n=2, h=3, w=2, c=3),
    LAYER_NORM,
    AttentionCoreOpSpec(n=2, t=3, heads=2, head_dim=2, core="fused_math"),
    TOWER,
    LossSpec(n=3, classes=4),
)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.kind)


def answers(workers: GetWorkers, *cases: Case) -> Iterator[Answer]:
    return workers("torch").run(cases)


@each_block
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mode_delivers_every_quantity_in_the_cases_dtype(dtype: Dtype, block: Any, workers: GetWorkers) -> None:
    modes = [m for m in INTERPRETED if m != "jvp" or dtype != "float16"]  # its forward mode of norms overflows
    for mode, trace in zip(
        modes, traces(workers("torch"), *(case_of(block, dtype, mode=m) for m in modes)), strict=True
    ):
        assert {v.dtype.name for part in trace.parts() for v in part.values()} == {dtype}
        if mode == "eager":
            plain = trace
        elif mode == "jvp":
            assert set(trace.tangents) == set(trace.acts) == set(plain.acts)
            assert (trace.cots, trace.grads) == ({}, {})
        else:
            same_quantities(trace, plain)


@pytest.mark.parametrize(
    "case",
    [
        case_of(UIB, "float32", mode="compile", bare=True),
        case_of(LAYER_NORM, "bfloat16", mode="compile", bare=True, norm="layer", dy="step"),
        case_of(TOWER, mode="compile", x="offset"),
    ],
    ids=lambda case: case.block.kind,
)
def test_a_compiled_program_delivers_the_same(case: Case, workers: GetWorkers) -> None:
    plain, *compiled = traces(workers("torch"), msgspec.structs.replace(case, how=How()), case)
    for trace in compiled:
        same_quantities(trace, plain)
        assert set(trace.bare) == ({"out", *case.block.differentiated()} if case.how.bare else set())


@each_block
def test_tangents_and_gradients_are_adjoint(block: Any, workers: GetWorkers) -> None:
    case = case_of(block)
    backward, forward = traces(workers("torch"), case, case_of(block, mode="jvp"))
    x = block.input().name
    grads = {x: backward.cots[x], **backward.grads}
    there = case.tensors()["dy"] * forward.tangents["out"]
    here = np.concatenate([(v * grads[k]).reshape(-1) for k, v in case.tangents().items()])
    assert abs(there.sum() - here.sum()) <= 1e-12 * np.abs(here).sum()


@each_block
def test_the_bare_run_exposes_inputs_and_outputs_only(block: Any, workers: GetWorkers) -> None:
    modes = [m for m in INTERPRETED if m != "jvp"]
    for trace in traces(workers("torch"), *(case_of(block, mode=m, bare=True) for m in modes)):
        x = block.input().name
        observed = {"out": trace.acts["out"], x: trace.cots[x], **trace.grads}
        assert {k: v.shape for k, v in trace.bare.items()} == {k: v.shape for k, v in observed.items()}
        for name, v in trace.bare.items():
            np.testing.assert_allclose(v, observed[name], rtol=0, atol=1e-12 * np.abs(observed[name]).max())


@pytest.mark.parametrize(
    "how",
    [
        *({"norm": norm, "layout": layout} for norm in ("", *OFFER.norms) for layout in ("", *OFFER.layouts)),
        *({"conv": conv, "layout": layout} for conv in OFFER.convs for layout in ("", *OFFER.layouts)),
        *(dict.fromkeys(("x", "dy", "params"), memory) for memory in MEMORIES),
        *({"x": memory, "dy": memory, "layout": "channels_last", "mode": "func"} for memory in MEMORIES),
        {"deterministic": True, "threads": 2},
    ],
    ids=str,
)
def test_no_realization_layout_or_memory_changes_the_function(how: dict[str, Any], workers: GetWorkers) -> None:
    traces(workers("torch"), *(case_of(block, **how) for block in BLOCKS))


@pytest.mark.parametrize("conv", ["", *OFFER.convs])
@pytest.mark.parametrize("depthwise", [False, True], ids=("full", "depthwise"))
@pytest.mark.parametrize("layout", ["", *OFFER.layouts])
def test_every_convolution_takes_every_padding(conv: str, depthwise: bool, layout: str, workers: GetWorkers) -> None:
    def drawn(padding: OpPadding, n: int = 2, k: int = 3, **sizes: Any) -> Case:
        oc = 2 if depthwise else 3
        block = ConvOpSpec(n=n, h=5, w=6, ic=2, oc=oc, k=k, padding=padding, depthwise=depthwise, **sizes)
        return case_of(block, "float32", conv=conv, layout=layout)

    paddings: tuple[OpPadding, ...] = ("symmetric", "xla_same", "valid")
    cases = [drawn(p, bias=True, stride=s) for p in paddings for s in (1, 2)]
    cases += [drawn("explicit", pads=pads) for pads in ((1, 1, 2, 2), (1, 0, 2, 1), (-1, 2, 0, -2), (4, 4, 4, 4))]
    cases += [drawn("valid", n=0), drawn("xla_same", k=4)]
    traces(workers("torch"), *cases)


def test_a_step_is_taken_along_every_gradient_that_can_be_written_to(workers: GetWorkers) -> None:
    for memory in ("", "step", "offset", "transposed"):
        case = msgspec.structs.replace(case_of(UIB, params=memory, mode="checkpoint"), lr=0.1)
        (trace,) = traces(workers("torch"), case)
        assert set(trace.updates) == set(trace.grads)


# In a process of its own, where torch may be imported.

_PREPARED = """
import torch
from diffgrad.adapters.torch import TorchAdapter
from diffgrad.case import Case
from diffgrad.how import How
from diffgrad.specs import *
from tests.test_conditions_torch import case_of
"""


def said(program: str) -> list[str]:
    """What a program about the adapter prints."""
    ran = python("-c", _PREPARED + program)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_torch_refuses_what_is_listed_as_unsupported_and_no_more() -> None:
    lines = said("""
from msgspec.structs import replace
class Open(TorchAdapter):
    unsupported = ()
core = AttentionCoreOpSpec(n=1, t=2)
point, norm = (BatchNormOpSpec(n=n, h=1, w=1, c=2) for n in (1, 2))
tower = TowerSpec(n=1, t=2, mlp=1, depth=2, core="fused")
for refused, case in [
    (True, case_of(core, mode="jvp")), (True, case_of(tower, mode="jvp")),
    (False, case_of(replace(core, core="fused_math"), mode="jvp")), (False, case_of(core, mode="func")),
    (True, case_of(point)), (True, case_of(point, norm="layer")), (False, case_of(point, norm="composed")),
    (True, replace(case_of(norm, params="expanded"), lr=0.1)),
    (False, replace(case_of(norm, params="step"), lr=0.1)), (False, case_of(norm, params="expanded")),
    (False, replace(case_of(replace(norm, c=1), params="expanded"), lr=0.1)),
    (True, case_of(norm, params="expanded", mode="jvp")), (True, case_of(norm, x="expanded", mode="jvp")),
    (False, case_of(replace(norm, c=1), params="expanded", mode="jvp")), (False, case_of(norm, x="step", mode="jvp")),
    (False, case_of(replace(norm, n=1, w=2), x="expanded", mode="jvp")), (False, case_of(norm, x="expanded")),
]:
    print(bool(TorchAdapter().refusal(case)) == refused == (Open().run(case).status == "error"))
""")
    assert lines == ["True"] * 17


def test_views_and_memory_orders_reach_the_kernels() -> None:
    """Where sizes are 1 too, for which torch's own memory formats would change nothing."""
    lines = said("""
class Spy(TorchAdapter):
    def op_bn(self, b, t, tap):
        out = super().op_bn(b, t, tap)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda g: print(t["x"].stride(), t["g"].stride(), g[0].stride()))
        return out
for c, h, how in [
    (3, 4, dict()), (3, 4, dict(layout="channels_last")), (1, 4, dict(layout="channels_last")),
    (3, 1, dict(layout="channels_last")), (3, 4, dict(x="step", params="step", dy="expanded")),
    (3, 4, dict(layout="channels_last", x="step", params="expanded", dy="transposed")),
]:
    assert Spy().run(case_of(BatchNormOpSpec(n=2, h=h, w=h, c=c), **how)).status == "ok"
""")
    assert lines == [
        "(48, 16, 4, 1) (1,) (48, 16, 4, 1)",
        "(48, 1, 12, 3) (1,) (48, 1, 12, 3)",
        "(16, 1, 4, 1) (1,) (16, 1, 4, 1)",
        "(3, 1, 3, 3) (1,) (3, 1, 3, 3)",
        "(96, 32, 8, 2) (2,) (0, 16, 4, 1)",
        "(96, 2, 24, 6) (0,) (1, 32, 2, 8)",
    ]


def test_no_setting_leaks_from_one_case_into_the_next() -> None:
    lines = said("""
adapter = TorchAdapter()
block = LossSpec(n=2, classes=3)
for how in ({}, {"deterministic": True, "threads": 2}, {}):
    assert adapter.run(case_of(block, **how)).status == "ok"
    print(torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
""")
    assert lines == ["False 1", "True 2", "False 1"]


def test_a_device_that_is_not_there_is_no_run_on_another() -> None:
    lines = said("""
torch.cuda.is_available = lambda: False
print(TorchAdapter().run(case_of(LossSpec(n=2, classes=3), device="cuda")).reason)
""")
    assert lines == ["RuntimeError: how.device is cuda, and torch sees no CUDA device"]


def test_programs_do_not_count_as_recompilations_of_one_another() -> None:
    lines = said("""
import functools, torch._dynamo.utils
torch.compile = functools.partial(torch.compile, backend="eager")
adapter = TorchAdapter()
def run(size, **how):
    outcome = adapter.run(case_of(ActivationOpSpec(n=1, size=size), mode="compile", **how))
    assert outcome.status == "ok", outcome.reason
for size in range(1, 41):
    run(size)
for size in range(1, 41):
    run(size)
    adapter.run(case_of(LayerNormOpSpec(n=1, t=1, d=size), norm="layer"))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
""")
    assert lines == ["40"]


def test_every_condition_that_is_offered_has_a_realization() -> None:
    lines = said("""
from diffgrad.adapters import torch_layers, torch_modes
print(*torch_modes.MODES)
print(*torch_layers.CONVS)
print(*torch_layers.BATCH_NORMS)
print(*torch_layers.LAYER_NORMS)
""")
    modes, *realizations = [line.split(" ") for line in lines]
    assert tuple(modes) == OFFER.modes
    assert realizations == [["", *OFFER.convs], ["", *OFFER.norms], ["", *OFFER.norms]]
