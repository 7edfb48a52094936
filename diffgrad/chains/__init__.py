"""The documents' chains, one file per architecture, and the table from a block's name to its chain."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from diffgrad.chains import convnext, mobilenetv4, ops, vit
from diffgrad.chains.base import Chain, Link
from diffgrad.specs import Spec

CHAINS: dict[str, Callable[[Any], Chain]] = {
    "uib": mobilenetv4.uib,
    "uib_s2": mobilenetv4.uib_s2,
    "stem": mobilenetv4.stem,
    "fused": mobilenetv4.fused,
    "head": mobilenetv4.head,
    "mobilenetv4": mobilenetv4.mobilenetv4,
    "convnext": convnext.block,
    "convnext_stem": convnext.stem,
    "convnext_down": convnext.down,
    "convnext_head": convnext.head,
    "convnext_net": convnext.net,
    "attention": vit.attention,
    "encoder": vit.encoder,
    "tower": vit.tower,
    "patch_embed": vit.patch_embed,
    "vit_head": vit.head,
    "vit": vit.vit,
    "loss": vit.loss,
    **dict.fromkeys(ops.OPS, ops.single),
}


@lru_cache(maxsize=256)
def chain_of(spec: Spec) -> Chain:
    """The chain of a block specification."""
    return CHAINS[spec.kind](spec)


__all__ = ["CHAINS", "Chain", "Link", "chain_of"]
