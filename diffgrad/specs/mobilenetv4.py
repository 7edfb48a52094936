"""MobileNetV4's blocks: sizes, kernel dispatch and the parameters that follow (FORMULAS section 2)."""

from __future__ import annotations

from typing import Literal

from diffgrad.specs.base import CaseError, Drop, MapSpec, Tensor, bn_pair, check_drop

PreAct = Literal["none", "relu"]
"""What follows the pre-depthwise's batch norm: nothing (seed document 000) or a relu (seed document 001)."""


def halved(size: int) -> int:
    """Output size of a symmetric stride-2 convolution, odd kernel: floor((size - 1)/2) + 1."""
    return (size - 1) // 2 + 1


def _conv(name: str, o: int, i: int, k: int = 1) -> Tensor:
    return Tensor(name, (o, i, k, k), "kernel")


class UibSpec(MapSpec, frozen=True, kw_only=True, tag="uib"):
    """Universal inverted bottleneck, stride 1, identity skip.

    ``c`` channels in and out, ``c * expand`` in the middle; ``pre_k`` and ``post_k`` are the depthwise kernel sizes,
    0 where the depthwise is absent; ``drop`` is the stochastic-depth site on the branch, if any.
    """

    c: int
    expand: int = 1
    pre_k: int = 0
    post_k: int = 0
    pre_act: PreAct = "none"
    drop: Drop | None = None

    @property
    def mid(self) -> int:
        """Expanded channels."""
        return self.c * self.expand

    def check(self) -> None:
        super().check()
        self.at_least("c", 1)
        self.at_least("expand", 1)
        self.odd("pre_k", absent=True)
        self.odd("post_k", absent=True)
        check_drop("uib.drop", self.drop, self.n)

    def fewest_statistics(self) -> int:
        return self.n * self.h * self.w

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.c, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, self.h, self.w)

    def parameters(self) -> tuple[Tensor, ...]:
        return _uib_parameters(self.c, self.mid, self.c, self.pre_k, self.post_k)

    def constants(self) -> tuple[Tensor, ...]:
        return (Tensor("drop", (self.n,), "drop"),) if self.drop else ()


class UibStridedSpec(MapSpec, frozen=True, kw_only=True, tag="uib_s2"):
    """Universal inverted bottleneck, stride 2, no skip: the block is its body.

    ``h`` and ``w`` are the *input* map's sizes, odd ones included. ``carrier`` says which depthwise has the stride:
    ``post`` (pre-depthwise and expand run at the input size) or ``pre`` (everything after it runs at half the size).
    """

    ic: int
    oc: int
    expand: int = 1
    pre_k: int = 0
    post_k: int = 0
    carrier: Literal["post", "pre"] = "post"
    pre_act: PreAct = "none"

    @property
    def mid(self) -> int:
        """Expanded channels."""
        return self.ic * self.expand

    def check(self) -> None:
        super().check()
        for field in ("ic", "oc", "expand"):
            self.at_least(field, 1)
        self.odd("pre_k", absent=True)
        self.odd("post_k", absent=True)
        if not self.pre_k and not self.post_k:
            raise CaseError("uib_s2.pre_k = 0 and post_k = 0: a stride-2 row needs a depthwise to carry the stride")
        if (self.post_k if self.carrier == "post" else self.pre_k) == 0:
            other = "pre" if self.carrier == "post" else "post"
            raise CaseError(f"uib_s2.carrier = {self.carrier}: that depthwise has k = 0, so it must be {other}")

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oc, halved(self.h), halved(self.w))

    def parameters(self) -> tuple[Tensor, ...]:
        return _uib_parameters(self.ic, self.mid, self.oc, self.pre_k, self.post_k)

    def fewest_statistics(self) -> int:
        return self.n * halved(self.h) * halved(self.w)


def _uib_parameters(ic: int, mid: int, oc: int, pre_k: int, post_k: int) -> tuple[Tensor, ...]:
    pre = (_conv("qW", ic, 1, pre_k), *bn_pair("q", ic)) if pre_k else ()
    post = (_conv("dW", mid, 1, post_k), *bn_pair("d", mid)) if post_k else ()
    return (
        *pre,
        _conv("eW", mid, ic),
        *bn_pair("e", mid),
        *post,
        _conv("pW", oc, mid),
        *bn_pair("p", oc),
    )


class StemSpec(MapSpec, frozen=True, kw_only=True, tag="stem"):
    """conv 3x3 stride 2, BN, relu. Its backward ends at the kernel's gradient; ``dx`` asks for the input's too."""

    ic: int = 3
    oc: int = 32
    padding: Literal["symmetric", "xla_same"] = "symmetric"
    dx: bool = False

    def check(self) -> None:
        super().check()
        self.at_least("ic", 1)
        self.at_least("oc", 1)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        # A 3x3 kernel gives ceil(size/2) under both paddings.
        return (self.n, self.oc, halved(self.h), halved(self.w))

    def parameters(self) -> tuple[Tensor, ...]:
        return (_conv("sW", self.oc, self.ic, 3), *bn_pair("s", self.oc))

    def differentiated(self) -> tuple[str, ...]:
        names = super().differentiated()
        return names if self.dx else names[1:]

    def fewest_statistics(self) -> int:
        return self.n * halved(self.h) * halved(self.w)


class FusedSpec(MapSpec, frozen=True, kw_only=True, tag="fused"):
    """The fused stage: conv k x k stride 2, BN, activation, conv 1x1, BN; no activation at the end."""

    ic: int = 32
    mid: int = 128
    oc: int = 48
    k: int = 3
    act: Literal["relu", "swish"] = "relu"

    def check(self) -> None:
        super().check()
        for field in ("ic", "mid", "oc"):
            self.at_least(field, 1)
        self.odd("k")

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oc, halved(self.h), halved(self.w))

    def parameters(self) -> tuple[Tensor, ...]:
        return (
            _conv("f0cW", self.mid, self.ic, self.k),
            *bn_pair("f0c", self.mid),
            _conv("f0pW", self.oc, self.mid),
            *bn_pair("f0p", self.oc),
        )

    def fewest_statistics(self) -> int:
        return self.n * halved(self.h) * halved(self.w)


class HeadSpec(MapSpec, frozen=True, kw_only=True, tag="head"):
    """conv 1x1, BN, relu, then global pooling, a second such stage at [N,C,1,1], and the classifier.

    ``pool_first=False`` (seed document 001) pools after the last stage; there ``oc = 0`` leaves the second stage out.
    """

    ic: int = 256
    mid: int = 960
    oc: int = 1280
    classes: int = 1000
    pool_first: bool = True

    def check(self) -> None:
        super().check()
        for field in ("ic", "mid", "classes"):
            self.at_least(field, 1)
        self.at_least("oc", 1 if self.pool_first else 0)

    def input(self) -> Tensor:
        return Tensor("x", (self.n, self.ic, self.h, self.w), "input")

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.classes)

    def parameters(self) -> tuple[Tensor, ...]:
        second = (_conv("hW", self.oc, self.mid), *bn_pair("h", self.oc)) if self.oc else ()
        return (
            _conv("h1W", self.mid, self.ic),
            *bn_pair("h1", self.mid),
            *second,
            Tensor("Wd", (self.oc or self.mid, self.classes), "matrix"),
            Tensor("bd", (self.classes,), "beta"),
        )

    def fewest_statistics(self) -> int:
        return self.n if self.pool_first else self.n * self.h * self.w
