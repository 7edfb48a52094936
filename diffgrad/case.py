"""A case: one block with its sizes, dtype and values, as small readable JSON. It is also the corpus format."""

from __future__ import annotations

import hashlib
import re
import sys
from typing import Any, Literal, TypeVar

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from diffgrad.how import PLAIN, How
from diffgrad.specs import BLOCKS, AnySpec, CaseError
from diffgrad.values import Bits, Values, check_values, draw_tensor

SCHEMA = 1
"""Version of the case format. Raise it when an old reader could misunderstand a new file."""

Dtype = Literal["float32", "float64", "bfloat16", "float16"]

_MOST_ELEMENTS = 2**28

T = TypeVar("T")


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is run: a block, a dtype, values and conditions. Hashable, comparable, identified by its JSON's hash.

    ``lr`` is the learning rate of a plain SGD step after the backward, 0 for none. ``overrides`` replaces single
    elements after the draw: tensor name -> flat index -> value.
    """

    schema: int = msgspec.field(default_factory=lambda: SCHEMA)  # by a factory, so that it is always written
    block: AnySpec
    dtype: Dtype = "float32"
    lr: float = 0.0
    values: Values = Values()
    overrides: dict[str, dict[str, float]] = {}
    how: How = PLAIN

    def __post_init__(self) -> None:
        # Only the very object that is the default is left out of the JSON, so equal ones have to be that object.
        msgspec.structs.force_setattr(self, "dtype", sys.intern(self.dtype))
        if self.how == PLAIN:
            msgspec.structs.force_setattr(self, "how", PLAIN)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> bytes:
        """Canonical JSON: fields in a fixed order, defaults left out, the schema version always there."""
        return msgspec.json.encode(self, order="deterministic")

    @property
    def id(self) -> str:
        """Twelve hex digits that name the case for ever."""
        return hashlib.blake2b(self.to_json(), digest_size=6).hexdigest()

    def check(self) -> Case:
        """Return the case itself, or raise CaseError naming the field and value that make no sense."""
        self.block.check()
        check_values(self.values)
        self.how.check()
        if not 0.0 <= self.lr <= 1.0:
            raise CaseError(f"lr = {self.lr}: must be from 0 (no step) to 1")
        if getattr(self.block, "bf16", False) and self.dtype != "float32":
            raise CaseError(f"{self.block.kind}.bf16 with dtype {self.dtype}: the flag rounds float32 operands")
        if self.how.mode == "jvp" and self.lr:
            raise CaseError(f"lr = {self.lr} with how.mode jvp: forward mode has no gradients to step along")
        tensors = {t.name: t.shape for t in self.block.tensors()}
        elements = sum(int(np.prod(s, dtype=object)) for s in tensors.values())
        if elements > _MOST_ELEMENTS:
            raise CaseError(f"{self.block.kind}: its tensors hold {elements} elements, more than {_MOST_ELEMENTS}")
        for name, changes in self.overrides.items():
            if name not in tensors:
                raise CaseError(f"overrides.{name}: {self.block.kind} has no such tensor; it has {', '.join(tensors)}")
            size = int(np.prod(tensors[name], dtype=np.int64))
            for index in changes:
                if not index.isdecimal() or int(index) >= size:
                    raise CaseError(f"overrides.{name}[{index}]: must be a flat index from 0 to {size - 1}")
        return self

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The input, parameters, constants and upstream cotangent ``dy``, in the case's dtype and canonical layout.

        Raises:
            CaseError: when a value is not finite in the case's dtype.
        """
        out: dict[str, NDArray[Any]] = {}
        for t in self.block.tensors():
            v = draw_tensor(self.block, t, self.values)
            for index, value in self.overrides.get(t.name, {}).items():
                v.reshape(-1)[int(index)] = value
            given = t.role in ("drop", "target")
            if not given and self.how.memory(t.name, self.block.input().name) == "expanded":
                v = expand(v)
            with np.errstate(over="ignore"):
                cast = v.astype(numpy_dtype(self.dtype))
            if not np.isfinite(cast).all():
                raise CaseError(
                    f"values: {t.name} overflows {self.dtype} at family {self.values.family}, "
                    f"exponent {self.values.exponent}, or by an override"
                )
            out[t.name] = cast
        return out

    def tangents(self) -> dict[str, NDArray[Any]]:
        """For forward mode: a tangent of every differentiated tensor, in the case's dtype and canonical layout."""
        shapes = {t.name: t.shape for t in self.block.tensors()}
        return {
            name: Bits(self.values.seed, f"tangent of {name}").normal(shapes[name]).astype(numpy_dtype(self.dtype))
            for name in self.block.differentiated()
        }


def expand(v: NDArray[Any]) -> NDArray[Any]:
    """The values of a view with stride 0 along axis 0: the first slice, over and over."""
    return np.array(np.broadcast_to(v[:1], v.shape)) if v.ndim else v


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a case's dtype; bfloat16 is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def case_from_json(text: bytes | str) -> Case:
    """Read and validate a case.

    Raises:
        CaseError: one sentence naming the field and the value that do not fit.
    """
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as e:
        raise CaseError(f"not JSON: {e}") from None
    return case_from_object(raw)


def case_from_object(raw: Any) -> Case:
    """Validate a case that is already decoded JSON. Raises CaseError like case_from_json."""
    check_schema(raw)
    block = raw.get("block")
    if isinstance(block, dict) and str(block.get("kind")) not in BLOCKS:
        raise CaseError(f"block.kind = {block.get('kind')!r}: no such block; known are {', '.join(BLOCKS)}")
    return convert(raw, Case).check()


def check_schema(raw: Any) -> None:
    """Raise CaseError unless ``raw`` is an object of a schema version that this program reads."""
    if not isinstance(raw, dict):
        raise CaseError(f"a case must be a JSON object, not {type(raw).__name__}")
    schema = raw.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema < 1:
        raise CaseError(f"schema = {schema!r}: must be a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise CaseError(f"schema = {schema}: written by a newer diffgrad; this one reads up to {SCHEMA}, so upgrade it")


def convert(raw: Any, kind: type[T]) -> T:
    """msgspec.convert with the offending value added to its message, as a CaseError."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        message = str(e)
        found = re.search(r" - at `\$\.?([^`]*)`$", message)
        if found is None:
            raise CaseError(message) from None
        value: Any = raw
        for part in re.findall(r"[^.\[\]]+", found[1]):
            value = value[int(part)] if isinstance(value, list) else value.get(part, "missing")
            if not isinstance(value, dict | list):
                break
        shown = "" if isinstance(value, dict | list) else f" = {value!r}"
        raise CaseError(f"{found[1]}{shown}: {message[: found.start()]}") from None
