"""Convolutions, norms and attention cores, each in the realization that the conditions name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffgrad.how import How
from diffgrad.specs import EPS

Padding = int | tuple[int, int] | str
"""Rows and columns on either side, or ``same``."""


Made = dict[tuple[Any, ...], nn.Module]
"""Layers by what they are made of. Dynamo cannot make one inside of a program; it finds those that there are."""


class Layers:
    """What a block's method calls where there is more than one way; ``how`` is that of the present run."""

    how = How()

    def __init__(self) -> None:
        self.made: Made = {}

    def conv(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None = None,
        stride: int = 1,
        padding: Padding = 0,
        groups: int = 1,
    ) -> torch.Tensor:
        """A convolution of maps."""
        return CONVS[self.how.conv](self.made, x, w, b, stride, padding, groups)

    def bn(self, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Batch norm in training mode."""
        return BATCH_NORMS[self.how.norm](self.made, x, g, b)

    def ln(self, x: torch.Tensor, norm: str, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Layer norm of a map over the channels, or over all of it with one gamma and beta."""
        if norm == "channel":
            return LAYER_NORMS[self.how.norm](self.made, x.permute(0, 2, 3, 1), g.shape, g, b).permute(0, 3, 1, 2)
        return LAYER_NORMS[self.how.norm](self.made, x, x.shape[1:], None, None) * g + b

    def token_ln(self, x: torch.Tensor, norm: str, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Layer norm of every token, gamma and beta per number or one of each."""
        if norm == "vector":
            return LAYER_NORMS[self.how.norm](self.made, x, g.shape, g, b)
        return LAYER_NORMS[self.how.norm](self.made, x, x.shape[2:], None, None) * g + b

    def sdpa(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, core: str, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Fused attention, [N,heads,T,d]; ``fused_math`` leaves only the kernel that is made of matrix products."""
        if core != "fused_math":
            return F.scaled_dot_product_attention(q, k, v, mask)
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, mask)


def explicit(x: torch.Tensor, pads: tuple[int, int, int, int]) -> tuple[torch.Tensor, Padding]:
    """Padding (top, bottom, left, right) as an argument of a convolution where it can be one, else done first."""
    top, bottom, left, right = pads
    if top == bottom >= 0 and left == right >= 0:
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), 0


def xla_same(x: torch.Tensor, k: int, stride: int) -> tuple[torch.Tensor, Padding]:
    """Output sizes of ceil(size/stride), the odd row and column of padding at the high end."""
    if stride == 1:
        return x, "same"
    total = [max(((size + stride - 1) // stride - 1) * stride + k - size, 0) for size in x.shape[2:]]
    (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in total)
    return explicit(x, (top, bottom, left, right))


def _conv(
    made: Made,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    stride: int,
    padding: Padding,
    groups: int,
) -> torch.Tensor:
    return F.conv2d(x, w, b, stride, padding, groups=groups)


def _unfold(
    made: Made,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    stride: int,
    padding: Padding,
    groups: int,
) -> torch.Tensor:
    """By the matrix of all patches, multiplied by the kernel of each group."""
    oc, ic, k, _ = w.shape
    if padding == "same":
        x, padding = explicit(x, ((k - 1) // 2, k // 2) * 2)
    assert not isinstance(padding, str)
    rows, cols = (padding, padding) if isinstance(padding, int) else padding
    h, width = ((size + 2 * pad - k) // stride + 1 for size, pad in zip(x.shape[2:], (rows, cols), strict=True))
    patches = F.unfold(x, k, padding=(rows, cols), stride=stride).reshape(len(x), groups, ic * k * k, h * width)
    out = (w.reshape(groups, oc // groups, ic * k * k) @ patches).reshape(len(x), oc, h, width)
    return out if b is None else out + b.reshape(-1, 1, 1)


def _standardized(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    mean, variance = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + EPS)


def _bn(made: Made, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, g, b, training=True, eps=EPS)


def _bn_composed(made: Made, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _standardized(x, (0, 2, 3)) * g.reshape(-1, 1, 1) + b.reshape(-1, 1, 1)


def _ln(made: Made, x: torch.Tensor, shape: torch.Size, g: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    return F.layer_norm(x, shape, g, b, EPS)


def _ln_composed(
    made: Made, x: torch.Tensor, shape: torch.Size, g: torch.Tensor | None, b: torch.Tensor | None
) -> torch.Tensor:
    normed = _standardized(x, tuple(range(x.ndim - len(shape), x.ndim)))
    return normed if g is None or b is None else normed * g + b


def _bn_layer(made: Made, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _called(_made(made, nn.BatchNorm2d, x.shape[1], eps=EPS, track_running_stats=False), x, weight=g, bias=b)


def _ln_layer(
    made: Made, x: torch.Tensor, shape: torch.Size, g: torch.Tensor | None, b: torch.Tensor | None
) -> torch.Tensor:
    layer = _made(made, nn.LayerNorm, tuple(shape), eps=EPS, elementwise_affine=g is not None)
    return _called(layer, x) if g is None or b is None else _called(layer, x, weight=g, bias=b)


def _conv_layer(
    made: Made,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    stride: int,
    padding: Padding,
    groups: int,
) -> torch.Tensor:
    sizes = (x.shape[1], w.shape[0], w.shape[2])
    layer = _made(made, nn.Conv2d, *sizes, stride=stride, padding=padding, groups=groups, bias=b is not None)
    return _called(layer, x, weight=w) if b is None else _called(layer, x, weight=w, bias=b)


def _called(layer: nn.Module, x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(layer, parameters, (x,))  # type: ignore[no-any-return]


def _made(made: Made, kind: type[nn.Module], *sizes: Any, **options: Any) -> nn.Module:
    key = (kind, *sizes, *options.values())
    if key not in made:
        made[key] = kind(*sizes, **options, device="meta")
    return made[key]


CONVS: dict[str, Callable[..., torch.Tensor]] = {"": _conv, "unfold": _unfold, "layer": _conv_layer}
"""(layers made, x, kernel, bias, stride, padding, groups) -> map."""

BATCH_NORMS: dict[str, Callable[..., torch.Tensor]] = {"": _bn, "composed": _bn_composed, "layer": _bn_layer}
"""(layers made, x, gamma, beta) -> map."""

LAYER_NORMS: dict[str, Callable[..., torch.Tensor]] = {"": _ln, "composed": _ln_composed, "layer": _ln_layer}
"""(layers made, x, trailing shape, gamma, beta) -> normed over those axes; gamma and beta may be None."""
