"""What an op must say about itself: its forward, the same forward with a bar, and its VJPs with bars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffgrad.bars import Bounded

Numbers = NDArray[Any]
"""A float64 array, or a complex128 one while the op is certified by the complex step."""


class Vjp(NamedTuple):
    """Cotangents of an op's inputs and of its parameters, in the order the op takes them."""

    inputs: tuple[Bounded, ...]
    params: tuple[Bounded, ...]


class Op(ABC):
    """One link's arithmetic. Implementations are frozen dataclasses of their attributes (stride, padding, eps).

    Inputs and parameters arrive in canonical layout: activations NCHW, kernels OIHW, depthwise kernels [C,1,kH,kW].
    """

    kinks: ClassVar[tuple[float, ...]] = ()
    """Where the derivative jumps."""

    uses: ClassVar[int] = 1
    """How often a composed forward reads its input: autodiff adds as many parts up, each with a rounding."""

    @abstractmethod
    def forward(self, xs: tuple[Numbers, ...], ps: tuple[Numbers, ...]) -> Numbers:
        """The analytic forward map; also evaluated in complex128 by the certification."""

    @abstractmethod
    def bound(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> Bounded:
        """The forward map with the bar of a run in the operands' precision."""

    @abstractmethod
    def vjp(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], dy: Bounded) -> Vjp:
        """The cotangents for the upstream cotangent ``dy``, each with its bar."""

    def stored(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...]) -> tuple[bool, bool]:
        """Whether compilers store the result (forward, input-VJP) and read it back, instead of recomputing it."""
        return False, False

    def looser(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> dict[str, Op]:
        """Cheaper algorithms that would explain a recorded result ``y``, by name: each as an op with bars of its own.

        A model must be held to what the run shows of it; one that merely widens the bars would swallow real faults.
        """
        return {}

    def loses(self, xs: tuple[Bounded, ...], ps: tuple[Bounded, ...], y: Bounded) -> bool:
        """Whether a recorded result lies outside the op's own bar, so that the forward shows a cheaper kernel."""
        expected = self.bound(xs, ps)
        return not bool((np.abs(y.val - expected.val) <= expected.err + y.err).all())

    @property
    def name(self) -> str:
        """The op's name in verdicts and signatures."""
        return type(self).__name__.lower()
