"""Traces cross the process boundary bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffgrad.trace import Outcome, Trace, pack, unpack

ODD = np.array([0.1, -0.0, np.nan, np.inf, 1e-45], np.float32)
ARRAYS: dict[str, NDArray[Any]] = {
    "specials": ODD,
    "nan_payload": np.array([0x7FC00123], np.uint32).view(np.float32),
    "float64": ODD.astype(np.float64),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "strided": np.arange(10.0)[::3],
    "expanded": np.broadcast_to(np.float32(3), (2, 2)),
    "scalar": np.array(1.5),
    "integers": np.array([1, 2]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_survive_bit_for_bit(name: str) -> None:
    v = ARRAYS[name]
    outcome = unpack(pack(Outcome("ok", Trace({name: v}, {}, {name: v}), cpu_s=0.25)))
    assert outcome.trace is not None
    assert (outcome.status, outcome.cpu_s, outcome.trace.cots) == ("ok", 0.25, {})
    for got in (outcome.trace.acts[name], outcome.trace.grads[name]):
        assert (got.dtype, got.shape, got.tobytes()) == (v.dtype, v.shape, v.tobytes())


def test_an_outcome_without_a_trace_keeps_its_reason() -> None:
    assert unpack(pack(Outcome("error", reason="ValueError: no"))) == Outcome("error", reason="ValueError: no")


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot send a complex"):
        pack(Outcome("ok", Trace({"x": 1j}, {}, {})))  # type: ignore[dict-item]
