"""What an adapter returns: every activation and cotangent at the named sites, and every parameter gradient."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


class Trace(msgspec.Struct, frozen=True):
    """One framework's run of one case, in canonical layout (NCHW, OIHW, [C,1,kH,kW]).

    Attributes:
        acts: activation site -> array.
        cots: activation site -> cotangent there. The output's cotangent is given, so it is not repeated.
        grads: parameter -> gradient. A gradient that the framework did not deliver is absent.
        updates: parameter -> its value after the SGD step, where the case asks for one.
        tangents: activation site -> its tangent, in forward mode (which has no cotangents and gradients).
        bare: the output (``out``), the input's cotangent and the gradients of a second run that exposes nothing else,
            where the case asks for one.
    """

    acts: Arrays
    cots: Arrays
    grads: Arrays
    updates: Arrays = {}
    tangents: Arrays = {}
    bare: Arrays = {}

    def parts(self) -> tuple[Arrays, ...]:
        """Every group of arrays."""
        return self.acts, self.cots, self.grads, self.updates, self.tangents, self.bare


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended: with a trace, or with ``status`` and the reason why there is none.

    ``status`` is ``ok``, ``unsupported``, ``error``, ``crash`` or ``hang``.
    """

    status: str
    trace: Trace | None = None
    reason: str = ""
    cpu_s: float = 0.0
    """CPU seconds spent inside the framework's calls, all threads."""
    total_cpu_s: float = 0.0
    """CPU seconds of the worker process since its previous answer."""


SPOOLED = 2**20
"""Bytes from which an array is worth a place in a file instead of one in a message."""


def pack(outcome: Outcome, spool: Path | None = None) -> bytes:
    """Outcome -> bytes, bit for bit.

    Large arrays go to the file ``spool``, if one is named: a message would hold them in memory several times over.
    A disk that has no room for them is no loss: they are then sent like the others.
    """
    if spool is not None and is_large(outcome.trace):
        with contextlib.suppress(OSError), spool.open("wb") as file:
            return msgspec.msgpack.encode(outcome, enc_hook=partial(_enc, file=file))
    return msgspec.msgpack.encode(outcome, enc_hook=_enc)


def is_large(trace: Trace | None) -> bool:
    """Whether a trace has arrays that are better kept in a file."""
    parts = trace.parts() if trace is not None else ()
    return any(v.nbytes >= SPOOLED for part in parts for v in part.values())


def _enc(value: Any, file: BinaryIO | None = None) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot send a {type(value).__name__}")
    data = np.ascontiguousarray(value)
    if file is None or data.nbytes < SPOOLED:
        return [_name(value.dtype), list(value.shape), data.tobytes()]
    at = file.tell()
    file.write(data.data)
    return [_name(value.dtype), list(value.shape), at]


def unpack(data: bytes, spool: Path | None = None) -> Outcome:
    """The inverse of pack. The arrays in ``spool`` are mapped, and the file is gone with the last of them."""
    outcome = msgspec.msgpack.decode(data, type=Outcome, dec_hook=partial(_dec, spool=spool))
    if spool is not None:
        spool.unlink(missing_ok=True)
    return outcome


def _dec(kind: type, value: Any, spool: Path | None) -> Any:
    name, shape, data = value
    dtype = _dtype(name)
    if isinstance(data, int):
        if spool is None:
            raise ValueError("the message refers to a file of arrays, and none is given")
        return np.asarray(np.memmap(spool, dtype, "r", data, tuple(shape)))
    return np.frombuffer(data, dtype).reshape(shape)


def _name(dtype: np.dtype[Any]) -> str:
    return dtype.str if dtype.kind != "V" else dtype.name


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
