"""Block specifications: the rows of the documents' tables, and the tensors that each row implies."""

from __future__ import annotations

from typing import get_args

from diffgrad.specs.base import EPS, CaseError, Drop, Role, Spec, Tensor
from diffgrad.specs.convnext import ConvNeXtDownSpec, ConvNeXtHeadSpec, ConvNeXtNetSpec, ConvNeXtSpec, ConvNeXtStemSpec
from diffgrad.specs.mobilenetv4 import FusedSpec, HeadSpec, StemSpec, UibSpec, UibStridedSpec
from diffgrad.specs.mobilenetv4_net import MobileNetV4Spec
from diffgrad.specs.ops import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    ConvOpSpec,
    DenseOpSpec,
    DropPathOpSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
)
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
    | ActivationOpSpec
    | AttentionCoreOpSpec
    | BatchNormOpSpec
    | ConvOpSpec
    | DenseOpSpec
    | DropPathOpSpec
    | LayerNormOpSpec
    | LayerScaleOpSpec
    | PoolOpSpec
    | SoftmaxOpSpec
)
"""Every block and net that a case may name."""

BLOCKS: dict[str, type[Spec]] = {str(t.__struct_config__.tag): t for t in get_args(AnySpec)}
"""Block name -> spec type: the table that strategies, chains and adapters are held against."""

__all__ = [
    "BLOCKS",
    "EPS",
    "ActivationOpSpec",
    "AnySpec",
    "AttentionCoreOpSpec",
    "AttentionSpec",
    "BatchNormOpSpec",
    "CaseError",
    "ConvNeXtDownSpec",
    "ConvNeXtHeadSpec",
    "ConvNeXtNetSpec",
    "ConvNeXtSpec",
    "ConvNeXtStemSpec",
    "ConvOpSpec",
    "DenseOpSpec",
    "Drop",
    "DropPathOpSpec",
    "EncoderSpec",
    "FusedSpec",
    "HeadSpec",
    "LayerNormOpSpec",
    "LayerScaleOpSpec",
    "LossSpec",
    "MobileNetV4Spec",
    "PatchEmbedSpec",
    "PoolOpSpec",
    "Role",
    "Sites",
    "SoftmaxOpSpec",
    "Spec",
    "StemSpec",
    "Tensor",
    "TowerSpec",
    "UibSpec",
    "UibStridedSpec",
    "VitHeadSpec",
    "VitSpec",
]
