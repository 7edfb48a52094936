"""What every block specification is: sizes, and the tensors that follow from them.

A spec is the only place where a block's sizes live. Its tensors (inputs, parameters, upstream cotangent) are derived
from it, so widths that disagree with their row cannot be built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

Role = Literal["input", "kernel", "matrix", "gamma", "beta", "drop", "target", "cotangent"]


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
    """What every block spec offers. ``n`` is the batch size."""

    n: int

    @property
    def kind(self) -> str:
        """The block's name, as written in a case file."""
        return str(self.__struct_config__.tag)

    def check(self) -> None:
        """Raise CaseError when the sizes are impossible."""
        self.at_least("n", 1)

    def at_least(self, field: str, low: int) -> None:
        """Raise CaseError unless ``field`` is at least ``low``."""
        if getattr(self, field) < low:
            raise CaseError(f"{self.kind}.{field} = {getattr(self, field)}: must be at least {low}")

    def at_most(self, field: str, high: int) -> None:
        """Raise CaseError unless ``field`` is at most ``high``."""
        if getattr(self, field) > high:
            raise CaseError(f"{self.kind}.{field} = {getattr(self, field)}: must be at most {high}")

    def odd(self, field: str, absent: bool = False) -> None:
        """Raise CaseError unless ``field`` is an odd kernel size, or 0 where the convolution may be absent."""
        k = getattr(self, field)
        if not (k == 0 and absent) and (k < 1 or k % 2 == 0):
            choice = "0 (no depthwise) or odd" if absent else "odd"
            raise CaseError(f"{self.kind}.{field} = {k}: must be {choice}, since symmetric padding needs a centre")

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

    def differentiated(self) -> tuple[str, ...]:
        """Tensors whose gradients are asked for: the input and every parameter."""
        return (self.input().name, *(t.name for t in self.parameters()))

    def fewest_statistics(self) -> int | None:
        """The fewest values over which any of the block's batch norms takes its statistics; None without one."""
        return None

    def scales(self, name: str) -> tuple[float, ...]:
        """The factors of the drop site ``name``, one per example."""
        site: Drop = getattr(self, name)
        return site.scales()

    def targets(self) -> tuple[float, bool]:
        """What the loss is given, if there is one: the smoothing alpha, and whether rows are soft (any, of sum 1)."""
        return 0.1, False

    def constants(self) -> tuple[Tensor, ...]:
        """Tensors that the block reads but does not differentiate (drop masks)."""
        return ()

    def kernels(self) -> frozenset[str]:
        """Names of the convolution kernels, [O,I,kH,kW]; a depthwise one is [C,1,kH,kW]."""
        return frozenset(t.name for t in self.parameters() if len(t.shape) == 4)

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything a case must supply: input, parameters, constants and the upstream cotangent ``dy``."""
        upstream = Tensor("dy", self.output_shape(), "cotangent")
        return (self.input(), *self.parameters(), *self.constants(), upstream)


class MapSpec(Spec, frozen=True, kw_only=True):
    """A block whose input is a map; ``h`` and ``w`` are its sizes."""

    h: int
    w: int

    def check(self) -> None:
        super().check()
        self.at_least("h", 1)
        self.at_least("w", 1)


Blocks = tuple[tuple[str, Spec], ...]
"""The parts of a net in forward order: the prefix of a part's names, and its spec."""

DEEPEST = 1000
"""Blocks in series; every real net has fewer."""


def prefixed(blocks: Blocks, of: Callable[[Spec], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The tensors of all of a net's parts, named as in the net."""
    return tuple(t._replace(name=prefix + t.name) for prefix, block in blocks for t in of(block))


def bn_pair(stem: str, channels: int) -> tuple[Tensor, Tensor]:
    """A batch norm's gamma and beta, named as in the documents."""
    return Tensor(f"{stem}g", (channels,), "gamma"), Tensor(f"{stem}bt", (channels,), "beta")


def check_drop(field: str, drop: Drop | None, n: int) -> None:
    """Raise CaseError when a drop site does not fit a batch of n."""
    if drop is None:
        return
    if not 0 < drop.keep <= 1:
        raise CaseError(f"{field}.keep = {drop.keep}: must be above 0 and at most 1")
    if len(drop.kept) != n:
        raise CaseError(f"{field}.kept has {len(drop.kept)} flags: must have one per example, and n = {n}")
