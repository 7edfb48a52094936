"""What an adapter returns: every activation and cotangent at the named sites, and every parameter gradient."""

from __future__ import annotations

from typing import Any

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
    """

    acts: Arrays
    cots: Arrays
    grads: Arrays
    updates: Arrays = {}


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


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def _dec(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def pack(outcome: Outcome) -> bytes:
    """Outcome -> bytes, bit for bit."""
    return msgspec.msgpack.encode(outcome, enc_hook=_enc)


def unpack(data: bytes) -> Outcome:
    """The inverse of pack."""
    return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(Outcome, dec_hook=_dec)
