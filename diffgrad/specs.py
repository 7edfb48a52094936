"""Block specifications: the rows of the documents' tables, and the tensors that each row implies.

A spec is the only place where a block's sizes live. Its tensors (inputs, parameters, upstream cotangent) are derived
from it, so widths that disagree with their row cannot be built.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import msgspec

Role = Literal["input", "kernel", "gamma", "beta", "drop", "cotangent"]


EPS = 1e-5
"""The epsilon inside every normalisation's root."""


class CaseError(ValueError):
    """A case that makes no sense; the message names the field, its value and what would do."""


class Tensor(NamedTuple):
    """A tensor that a spec implies: its name, shape and the role that decides how its values are drawn."""

    name: str
    shape: tuple[int, ...]
    role: Role


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stochastic-depth site: ``keep`` is the survival probability, ``kept`` one flag per example.

    Example n's branch is scaled by 1/keep if kept, else by 0.
    """

    keep: float
    kept: tuple[bool, ...]

    def scales(self) -> tuple[float, ...]:
        """a_n for each example."""
        return tuple(1.0 / self.keep if k else 0.0 for k in self.kept)


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"):
    """What every block spec offers. ``n`` is the batch size, ``h`` and ``w`` are the *input* map's sizes."""

    n: int
    h: int
    w: int

    @property
    def kind(self) -> str:
        """The block's name, as written in a case file."""
        return str(self.__struct_config__.tag)

    def check(self) -> None:
        """Raise CaseError when the sizes are impossible."""
        for field in ("n", "h", "w"):
            self.at_least(field, 1)

    def at_least(self, field: str, low: int) -> None:
        """Raise CaseError unless ``field`` is at least ``low``."""
        if getattr(self, field) < low:
            raise CaseError(f"{self.kind}.{field} = {getattr(self, field)}: must be at least {low}")

    def one_of(self, field: str, allowed: tuple[object, ...]) -> None:
        """Raise CaseError unless ``field`` is one of ``allowed``."""
        if getattr(self, field) not in allowed:
            choice = ", ".join(str(a) for a in allowed)
            raise CaseError(f"{self.kind}.{field} = {getattr(self, field)}: must be one of {choice}")

    def parameters(self) -> tuple[Tensor, ...]:
        """Differentiated parameters, in forward order; each is one gradient node."""
        raise NotImplementedError

    def input(self) -> Tensor:
        """The block input."""
        raise NotImplementedError

    def output_shape(self) -> tuple[int, ...]:
        """Shape of the block output and of the upstream cotangent."""
        raise NotImplementedError

    def constants(self) -> tuple[Tensor, ...]:
        """Tensors that the block reads but does not differentiate (drop masks)."""
        return ()

    def kernels(self) -> frozenset[str]:
        """Names of the convolution kernels, [O,I,kH,kW]; a depthwise one is [C,1,kH,kW]."""
        return frozenset(t.name for t in self.parameters() if t.role == "kernel")

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything a case must supply: input, parameters, constants and the upstream cotangent ``dy``."""
        upstream = Tensor("dy", self.output_shape(), "cotangent")
        return (self.input(), *self.parameters(), *self.constants(), upstream)


def bn_pair(stem: str, channels: int) -> tuple[Tensor, Tensor]:
    """A batch norm's gamma and beta, named as in the documents."""
    return Tensor(f"{stem}g", (channels,), "gamma"), Tensor(f"{stem}bt", (channels,), "beta")


class UibSpec(Spec, frozen=True, kw_only=True, tag="uib"):
    """Universal inverted bottleneck, stride 1, identity skip (FORMULAS section 2).

    ``c`` channels in and out, ``c * expand`` in the middle; ``pre_k`` and ``post_k`` are the depthwise kernel sizes,
    0 where the depthwise is absent; ``drop`` is the stochastic-depth site on the branch, if any.
    """

    c: int
    expand: int = 1
    pre_k: int = 0
    post_k: int = 0
    drop: Drop | None = None

    @property
    def mid(self) -> int:
        """Expanded channels."""
        return self.c * self.expand

    def check(self) -> None:
        super().check()
        self.at_least("c", 1)
        self.at_least("expand", 1)
        for field in ("pre_k", "post_k"):
            k = getattr(self, field)
            if k < 0 or (k > 0 and k % 2 == 0):
                raise CaseError(
                    f"uib.{field} = {k}: must be 0 (no depthwise) or odd, since symmetric padding keeps the map's "
                    "size only for odd kernels"
                )
        check_drop("uib.drop", self.drop, self.n)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.c, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    def parameters(self) -> tuple[Tensor, ...]:
        c, mid = self.c, self.mid
        pre = (Tensor("qW", (c, 1, self.pre_k, self.pre_k), "kernel"), *bn_pair("q", c)) if self.pre_k else ()
        post = (Tensor("dW", (mid, 1, self.post_k, self.post_k), "kernel"), *bn_pair("d", mid)) if self.post_k else ()
        return (
            *pre,
            Tensor("eW", (mid, c, 1, 1), "kernel"),
            *bn_pair("e", mid),
            *post,
            Tensor("pW", (c, mid, 1, 1), "kernel"),
            *bn_pair("p", c),
        )

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("drop", (self.n,), "drop"),) if self.drop else ()


def check_drop(field: str, drop: Drop | None, n: int) -> None:
    """Raise CaseError when a drop site does not fit a batch of n."""
    if drop is None:
        return
    if not 0 < drop.keep <= 1:
        raise CaseError(f"{field}.keep = {drop.keep}: must be above 0 and at most 1")
    if len(drop.kept) != n:
        raise CaseError(f"{field}.kept has {len(drop.kept)} flags: must have one per example, and n = {n}")


AnySpec = UibSpec
"""Every block that a case may name (a union once there is more than one)."""

BLOCKS: dict[str, type[Spec]] = {str(t.__struct_config__.tag): t for t in (get_args(AnySpec) or (AnySpec,))}
"""Block name -> spec type: the table that strategies, chains and adapters are held against."""
