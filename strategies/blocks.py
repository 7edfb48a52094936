"""Block specs: sizes from 1 upwards with the corners weighted, every k dispatch, drop masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hypothesis import strategies as st

from diffgrad.specs import (
    AttentionSpec,
    ConvNeXtDownSpec,
    ConvNeXtHeadSpec,
    ConvNeXtNetSpec,
    ConvNeXtSpec,
    ConvNeXtStemSpec,
    EncoderSpec,
    FusedSpec,
    HeadSpec,
    LossSpec,
    MobileNetV4Spec,
    PatchEmbedSpec,
    Sites,
    Spec,
    StemSpec,
    TowerSpec,
    UibSpec,
    UibStridedSpec,
    VitHeadSpec,
    VitSpec,
)
from diffgrad.specs.convnext import Norm
from diffgrad.specs.mobilenetv4 import PreAct
from diffgrad.specs.mobilenetv4_net import Row
from diffgrad.specs.vit import Core
from diffgrad.strategies.ops import OPS
from diffgrad.strategies.sizes import (
    BATCHES,
    CHANNELS,
    HEAD_DIMS,
    RARELY,
    SELDOM,
    SIDES,
    TOKEN_NORMS,
    TOKENS,
    channels,
    drops,
    masks,
)

# For blocks with a batch norm over the batch alone, where a batch of 1 is a corner and not the rule.
PLURAL_BATCHES = st.sampled_from((2, 3, 4, 1))
DEPTHWISE_K = st.sampled_from((0, 3, 5, 7))

PRE_ACTS: st.SearchStrategy[PreAct] = st.sampled_from(("none", "relu"))


@st.composite
def uib(draw: st.DrawFn) -> UibSpec:
    """Stride-1 UIB in all four families."""
    n, h, w, expand = draw(BATCHES), draw(SIDES), draw(SIDES), draw(st.integers(1, 4))
    return UibSpec(
        n=n,
        c=channels(draw, n * h * w * expand),
        h=h,
        w=w,
        expand=expand,
        pre_k=draw(DEPTHWISE_K),
        post_k=draw(DEPTHWISE_K),
        pre_act=draw(PRE_ACTS),
        drop=draw(drops(n)),
    )


@st.composite
def uib_s2(draw: st.DrawFn) -> UibStridedSpec:
    """Strided UIB, odd input sizes included, with either carrier where the row allows it."""
    n, h, w, expand = draw(BATCHES), draw(SIDES), draw(SIDES), draw(st.integers(1, 4))
    pre_k, post_k = draw(DEPTHWISE_K), draw(DEPTHWISE_K)
    if not pre_k and not post_k:
        pre_k = 3
    ic = channels(draw, n * h * w * expand)
    carriers = [name for name, k in (("post", post_k), ("pre", pre_k)) if k]
    return UibStridedSpec(
        n=n,
        ic=ic,
        oc=ic if draw(st.booleans()) else channels(draw, n * h * w),
        h=h,
        w=w,
        expand=expand,
        pre_k=pre_k,
        post_k=post_k,
        carrier=draw(st.sampled_from(carriers)),
        pre_act=draw(PRE_ACTS),
    )


@st.composite
def stem(draw: st.DrawFn) -> StemSpec:
    """Stem in both paddings, with and without the input's cotangent."""
    n, h, w = draw(BATCHES), draw(SIDES), draw(SIDES)
    return StemSpec(
        n=n,
        h=h,
        w=w,
        ic=draw(st.integers(1, 4)),
        oc=channels(draw, n * h * w),
        padding=draw(st.sampled_from(("symmetric", "xla_same"))),
        dx=draw(st.booleans()),
    )


@st.composite
def fused(draw: st.DrawFn) -> FusedSpec:
    """Fused stage with relu or swish."""
    n, h, w = draw(BATCHES), draw(SIDES), draw(SIDES)
    return FusedSpec(
        n=n,
        h=h,
        w=w,
        ic=channels(draw, 4 * n * h * w),
        mid=channels(draw, n * h * w),
        oc=channels(draw, n * h * w),
        k=draw(st.sampled_from((1, 3, 5))),
        act=draw(st.sampled_from(("relu", "swish"))),
    )


@st.composite
def head(draw: st.DrawFn) -> HeadSpec:
    """Head, pooling first or last, with one or two stages."""
    n, h, w = draw(PLURAL_BATCHES), draw(SIDES), draw(SIDES)
    pool_first = draw(st.booleans())
    return HeadSpec(
        n=n,
        h=h,
        w=w,
        ic=channels(draw, n * h * w),
        mid=channels(draw, n * h * w),
        oc=channels(draw, n * h * w) if pool_first or draw(st.booleans()) else 0,
        classes=draw(st.integers(1, 12)),
        pool_first=pool_first,
    )


@st.composite
def mobilenetv4(draw: st.DrawFn) -> MobileNetV4Spec:
    """Short nets: two to five rows whose channels match, so that composition is fuzzed."""
    width = st.integers(1, 6)
    ic = draw(width)
    rows: list[Row] = []
    for _ in range(draw(st.integers(2, 5))):
        if rows and rows[-1].stride == 1 and draw(st.booleans()):
            rows.append(rows[-1])  # a neighbour of the same shape, whose weights could be taken for its own
            continue
        stride = draw(st.sampled_from((1, 2)))
        pre_k, post_k = draw(DEPTHWISE_K), draw(DEPTHWISE_K)
        oc = ic
        if stride == 2:
            oc = draw(width)
            pre_k = pre_k if pre_k or post_k else 3
        rows.append(Row(ic, oc, draw(st.integers(1, 3)), pre_k, post_k, stride))
        ic = oc
    return MobileNetV4Spec(
        n=draw(PLURAL_BATCHES),
        h=draw(st.integers(1, 24)),
        w=draw(st.integers(1, 24)),
        rows=tuple(rows),
        image=draw(st.integers(1, 3)),
        stem=draw(width),
        fused=draw(width),
        mid=draw(width),
        oc=draw(width),
        classes=draw(st.integers(2, 10)),
    )


PATCHES: st.SearchStrategy[Literal[1, 2, 4]] = st.sampled_from((1, 2, 4))
NORMS: st.SearchStrategy[Norm] = st.sampled_from(("channel", "scalar"))


@st.composite
def convnext(draw: st.DrawFn) -> ConvNeXtSpec:
    """ConvNeXt block in all its variants."""
    n, h, w, expand = draw(BATCHES), draw(SIDES), draw(SIDES), draw(st.sampled_from((4, 1, 2)))
    return ConvNeXtSpec(
        n=n,
        c=channels(draw, n * h * w * expand),
        h=h,
        w=w,
        expand=expand,
        k=draw(st.sampled_from((7, 1, 3, 5))),
        norm=draw(NORMS),
        scale=draw(st.sampled_from(("channel", "element"))),
        act=draw(st.sampled_from(("gelu_tanh", "gelu_erf"))),
        drop=draw(drops(n)),
    )


@st.composite
def convnext_stem(draw: st.DrawFn) -> ConvNeXtStemSpec:
    """Patchify stem; sizes need not be multiples of the patch."""
    n, k = draw(BATCHES), draw(PATCHES)
    h, w = draw(st.integers(k, 12)), draw(st.integers(k, 12))
    return ConvNeXtStemSpec(
        n=n,
        h=h,
        w=w,
        ic=draw(st.integers(1, 4)),
        oc=channels(draw, n * h * w),
        k=k,
        norm=draw(NORMS),
        dx=draw(st.booleans()),
    )


@st.composite
def convnext_down(draw: st.DrawFn) -> ConvNeXtDownSpec:
    """Downsampling, odd sizes included."""
    n, h, w = draw(BATCHES), draw(st.integers(2, 9)), draw(st.integers(2, 9))
    return ConvNeXtDownSpec(n=n, h=h, w=w, ic=channels(draw, n * h * w), oc=channels(draw, n * h * w), norm=draw(NORMS))


@st.composite
def convnext_head(draw: st.DrawFn) -> ConvNeXtHeadSpec:
    """Head."""
    n, h, w = draw(BATCHES), draw(SIDES), draw(SIDES)
    return ConvNeXtHeadSpec(
        n=n, h=h, w=w, c=channels(draw, n * h * w), classes=draw(st.integers(1, 12)), norm=draw(NORMS)
    )


@st.composite
def convnext_net(draw: st.DrawFn) -> ConvNeXtNetSpec:
    """Short nets of one to three stages."""
    stages = draw(st.integers(1, 3))
    patch = draw(PATCHES)
    side = st.integers(patch * 2 ** (stages - 1), patch * 2 ** (stages - 1) + 6)
    return ConvNeXtNetSpec(
        n=draw(st.integers(1, 3)),
        h=draw(side),
        w=draw(side),
        depths=tuple(draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))),
        widths=tuple(draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))),
        image=draw(st.integers(1, 3)),
        patch=patch,
        expand=draw(st.integers(1, 4)),
        k=draw(st.sampled_from((3, 1, 7))),
        norm=draw(NORMS),
        classes=draw(st.integers(2, 10)),
    )


CORES: st.SearchStrategy[Core] = st.sampled_from(("composed", "fused", "fused_math"))


def _examples(draw: st.DrawFn, t: int) -> int:
    """A batch; often as many examples as tokens, where reading one for the other changes no shape."""
    return t if t <= 6 and draw(SELDOM) else draw(BATCHES)


@st.composite
def attention(draw: st.DrawFn) -> AttentionSpec:
    """Multi-head self-attention, one token and heads of width 1 included."""
    t = draw(TOKENS)
    return AttentionSpec(
        n=_examples(draw, t),
        t=t,
        heads=draw(st.integers(1, 4)),
        head_dim=draw(HEAD_DIMS),
        core=draw(CORES),
        bf16=draw(SELDOM),
    )


@st.composite
def encoder(draw: st.DrawFn) -> EncoderSpec:
    """Encoder block in all its variants; the two drop sites are drawn on their own."""
    t = draw(TOKENS)
    n = _examples(draw, t)
    heads, head_dim = draw(st.integers(1, 3)), draw(HEAD_DIMS)
    return EncoderSpec(
        n=n,
        t=t,
        heads=heads,
        head_dim=head_dim,
        mlp=max(1, int(heads * head_dim * draw(st.sampled_from((4, 1, 2, 0.5))))),
        norm=draw(TOKEN_NORMS),
        core=draw(CORES),
        bf16=draw(SELDOM),
        drop_a=draw(drops(n)),
        drop_m=draw(drops(n)),
    )


@st.composite
def sites(draw: st.DrawFn, n: int, depth: int) -> tuple[Sites, ...]:
    """No sites, or two for every block."""
    return tuple(Sites(draw(masks(n)), draw(masks(n))) for _ in range(depth)) if draw(st.booleans()) else ()


@st.composite
def tower(draw: st.DrawFn) -> TowerSpec:
    """One to three encoder blocks."""
    t, depth = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    n = _examples(draw, t)
    return TowerSpec(
        n=n,
        t=t,
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        mlp=draw(st.integers(1, 12)),
        depth=depth,
        norm=draw(TOKEN_NORMS),
        core=draw(CORES),
        bf16=draw(SELDOM),
        drops=draw(sites(n, depth)),
    )


@st.composite
def patch_embed(draw: st.DrawFn) -> PatchEmbedSpec:
    """Patch embedding on any grid; sizes need not be multiples of the patch."""
    p = draw(st.sampled_from((2, 1, 3, 4)))
    bf16 = draw(SELDOM)
    return PatchEmbedSpec(
        n=draw(BATCHES),
        h=draw(st.integers(p, 4 * p + 1)),
        w=draw(st.integers(p, 4 * p + 1)),
        ic=draw(st.integers(1, 3)),
        d=draw(st.integers(1, 8)),
        p=p,
        bf16=bf16,
        bf16_conv=draw(st.booleans()),
    )


@st.composite
def vit_head(draw: st.DrawFn) -> VitHeadSpec:
    """Head."""
    t = draw(TOKENS)
    return VitHeadSpec(
        n=_examples(draw, t), t=t, d=draw(CHANNELS), classes=draw(st.integers(1, 12)), norm=draw(TOKEN_NORMS)
    )


ALPHAS = st.sampled_from((0.1, 0.0, 1.0, 0.5))


@st.composite
def loss(draw: st.DrawFn) -> LossSpec:
    """Cross entropy with any smoothing, or with soft targets; now and then over many classes."""
    n, classes = draw(BATCHES), draw(st.integers(1, 40))
    if draw(RARELY):
        n, classes = min(n, 2), draw(st.sampled_from((257, 1000, 2048)))
    return LossSpec(n=n, classes=classes, alpha=draw(ALPHAS), soft=draw(st.booleans()))


@st.composite
def vit(draw: st.DrawFn) -> VitSpec:
    """Short nets of one to three blocks."""
    p, depth = draw(st.sampled_from((2, 1, 4))), draw(st.integers(1, 3))
    n = draw(st.integers(1, 3))
    return VitSpec(
        n=n,
        h=draw(st.integers(p, 3 * p)),
        w=draw(st.integers(p, 3 * p)),
        image=draw(st.integers(1, 3)),
        p=p,
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        mlp=draw(st.integers(1, 12)),
        depth=depth,
        classes=draw(st.integers(2, 10)),
        norm=draw(TOKEN_NORMS),
        core=draw(CORES),
        bf16=draw(SELDOM),
        bf16_conv=draw(st.booleans()),
        drops=draw(sites(n, depth)),
        alpha=draw(ALPHAS),
    )


SPECS: dict[str, Callable[[], st.SearchStrategy[Spec]]] = {
    "uib": uib,
    "uib_s2": uib_s2,
    "stem": stem,
    "fused": fused,
    "head": head,
    "mobilenetv4": mobilenetv4,
    "convnext": convnext,
    "convnext_stem": convnext_stem,
    "convnext_down": convnext_down,
    "convnext_head": convnext_head,
    "convnext_net": convnext_net,
    "attention": attention,
    "encoder": encoder,
    "tower": tower,
    "patch_embed": patch_embed,
    "vit_head": vit_head,
    "vit": vit,
    "loss": loss,
    **OPS,
}
"""Block name -> strategy for its spec."""
