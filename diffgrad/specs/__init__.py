"""Block specifications: the rows of the documents' tables, and the tensors that each row implies."""

from __future__ import annotations

from typing import get_args

from diffgrad.specs.base import EPS, CaseError, Drop, Role, Spec, Tensor
from diffgrad.specs.convnext import ConvNeXtDownSpec, ConvNeXtHeadSpec, ConvNeXtNetSpec, ConvNeXtSpec, ConvNeXtStemSpec
from diffgrad.specs.mobilenetv4 import FusedSpec, HeadSpec, StemSpec, UibSpec, UibStridedSpec
from diffgrad.specs.mobilenetv4_net import MobileNetV4Spec
from diffgrad.specs.vit import (
    AttentionSpec,
    EncoderSpec,
    LossSpec,
    PatchEmbedSpec,
    Sites,
    TowerSpec,
    VitHeadSpec,
    VitSpec,
)

AnySpec = (
    UibSpec
    | UibStridedSpec
    | StemSpec
    | FusedSpec
    | HeadSpec
    | MobileNetV4Spec
    | ConvNeXtSpec
    | ConvNeXtStemSpec
    | ConvNeXtDownSpec
    | ConvNeXtHeadSpec
    | ConvNeXtNetSpec
    | AttentionSpec
    | EncoderSpec
    | TowerSpec
    | PatchEmbedSpec
    | VitHeadSpec
    | VitSpec
    | LossSpec
)
"""Every block and net that a case may name."""

BLOCKS: dict[str, type[Spec]] = {str(t.__struct_config__.tag): t for t in get_args(AnySpec)}
"""Block name -> spec type: the table that strategies, chains and adapters are held against."""

__all__ = [
    "BLOCKS",
    "EPS",
    "AnySpec",
    "AttentionSpec",
    "CaseError",
    "ConvNeXtDownSpec",
    "ConvNeXtHeadSpec",
    "ConvNeXtNetSpec",
    "ConvNeXtSpec",
    "ConvNeXtStemSpec",
    "Drop",
    "EncoderSpec",
    "FusedSpec",
    "HeadSpec",
    "LossSpec",
    "MobileNetV4Spec",
    "PatchEmbedSpec",
    "Role",
    "Sites",
    "Spec",
    "StemSpec",
    "Tensor",
    "TowerSpec",
    "UibSpec",
    "UibStridedSpec",
    "VitHeadSpec",
    "VitSpec",
]
