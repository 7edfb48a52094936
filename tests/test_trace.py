"""Traces cross the process boundary bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffgrad.trace import SPOOLED, Outcome, Trace, pack, unpack

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


LARGE = np.arange(SPOOLED // 4 + 1, dtype=np.float32).reshape(1, -1)


def test_large_arrays_go_by_way_of_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    sent = Outcome("ok", Trace({"large": LARGE[:, ::-1], "small": ODD}, {"large": LARGE.T}, {}))
    data = pack(sent, spool)
    assert len(data) < 1000 < spool.stat().st_size
    trace = unpack(data, spool).trace
    assert trace is not None
    assert not spool.exists()
    assert trace.acts["large"].tobytes() == LARGE[:, ::-1].tobytes()
    assert trace.acts["small"].tobytes() == ODD.tobytes()
    assert (trace.cots["large"].shape, trace.cots["large"].dtype) == (LARGE.T.shape, LARGE.dtype)
    assert np.array_equal(trace.cots["large"], LARGE.T)


def test_small_traces_need_no_file(tmp_path: Path) -> None:
    outcome = Outcome("ok", Trace({"x": ODD}, {}, {}))
    assert pack(outcome, tmp_path / "spool") == pack(outcome)
    assert list(tmp_path.iterdir()) == []


def test_without_room_on_the_disk_a_large_trace_is_sent_whole(tmp_path: Path) -> None:
    spool = tmp_path / "no such folder" / "spool"
    trace = unpack(pack(Outcome("ok", Trace({"large": LARGE}, {}, {})), spool), spool).trace
    assert trace is not None
    assert np.array_equal(trace.acts["large"], LARGE)


def test_a_message_that_needs_a_file_says_so(tmp_path: Path) -> None:
    data = pack(Outcome("ok", Trace({"large": LARGE}, {}, {})), tmp_path / "spool")
    with pytest.raises(ValueError, match="refers to a file"):
        unpack(data)


def test_an_outcome_without_a_trace_keeps_its_reason() -> None:
    assert unpack(pack(Outcome("error", reason="ValueError: no"))) == Outcome("error", reason="ValueError: no")


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot send a complex"):
        pack(Outcome("ok", Trace({"x": 1j}, {}, {})))  # type: ignore[dict-item]
