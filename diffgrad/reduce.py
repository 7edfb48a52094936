"""Shrinking past Hypothesis: a block's fault as a case of the single op that has it, then fewer and simpler numbers.

The op gets what the framework itself recorded at the blamed link: the inputs that it read and the cotangent that it was
given. If the fault shows there too, the block was only scenery. After that sizes are cut, elements are blanked and the
rest is rounded, as long as the same fault shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from diffgrad.case import Case, numpy_dtype
from diffgrad.chains import chain_of
from diffgrad.chains.base import Link
from diffgrad.chains.ops import ACTIVATIONS
from diffgrad.ops import (
    BatchNorm,
    Conv2d,
    Dense,
    Depthwise,
    GlobalAveragePool,
    LayerNorm,
    LayerScale,
    Op,
    SoftmaxRows,
)
from diffgrad.ops.attention import Attention
from diffgrad.specs import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    CaseError,
    ConvOpSpec,
    DenseOpSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
    Spec,
)
from diffgrad.trace import Arrays, Trace
from diffgrad.values import Values

Array = NDArray[Any]
Fails = Callable[[Case], bool]
"""Whether a case shows the fault that is being shrunk."""

MOST_EXPLICIT = 20_000
"""Elements beyond which a case's tensors are not written out one by one."""

_GROUPS = 256
"""Parts of a tensor that are simplified on their own, at the most."""


def explicit(spec: Spec, tensors: Mapping[str, Array], like: Case) -> Case:
    """A case of ``spec`` that holds exactly these numbers, under the conditions of another case."""
    # Made anew, so that what is left at its default is left out of the JSON.
    base = Case(block=spec, dtype=like.dtype, values=Values(family="blank"), how=like.how)  # type: ignore[arg-type]
    drawn = base.tensors()
    overrides: dict[str, dict[str, float]] = {}
    for name, v in tensors.items():
        flat, old = (a.reshape(-1) for a in (np.asarray(v), drawn[name]))
        changed = np.flatnonzero((flat != old) | (np.signbit(flat) != np.signbit(old)))
        if changed.size:
            overrides[name] = {str(int(i)): shortest(flat[i]) for i in changed}
    return replace(base, overrides=overrides)


def shortest(x: Any) -> float:
    """The number of fewest digits that rounds to this one in its own dtype."""
    return float(str(x))


def single_op(case: Case, trace: Trace, site: str) -> Case | None:
    """The op that writes ``site`` as a case of its own, on what the run recorded; None where there is no such block."""
    link = next((k for k in chain_of(case.block).links if k.writes == site), None)
    if link is None:
        return None
    held: Arrays = {**case.tensors(), **trace.acts}
    wanted = (*link.reads, *link.feeds)
    if any(name not in held for name in (*wanted, site)):
        return None
    dy = case.tensors()["dy"] if site == chain_of(case.block).output else trace.cots.get(site)
    if dy is None or not np.isfinite(dy).all():
        dy = np.zeros_like(held[site])  # the output does not depend on it, if that is what is wrong
    built = _as_block(link, [held[name] for name in link.reads], [held[name] for name in link.feeds], dy)
    if built is None:
        return None
    spec, tensors = built
    if isinstance(spec, AttentionCoreOpSpec) and getattr(case.block, "core", "") == "fused_math":
        spec = replace(spec, core="fused_math")
    finite = all(np.isfinite(v).all() for v in tensors.values())
    if not finite or sum(v.size for v in tensors.values()) > MOST_EXPLICIT:
        return None
    try:
        spec.check()
        if any(tensors[t.name].shape != t.shape for t in spec.tensors()):
            return None  # the run's own shapes are not the block's
        return explicit(spec, tensors, case).check()
    except CaseError:
        return None


Built = tuple[Spec, dict[str, Array]]


def _as_block(link: Link, xs: list[Array], ps: list[Array], dy: Array) -> Built | None:
    """The op-level spec of a link, and its tensors by that spec's names."""
    op, x = link.op, xs[0]
    match op:
        case Conv2d():
            return _conv(op, x, ps, dy)
        case BatchNorm():
            n, c, h, w = x.shape
            return BatchNormOpSpec(n=n, c=c, h=h, w=w), {"x": x, "g": ps[0], "bt": ps[1], "dy": dy}
        case LayerNorm():
            return _layer_norm(op, x, ps, dy)
        case Dense():
            inputs, outputs = ps[0].shape
            rows = x.reshape(-1, inputs)
            spec = DenseOpSpec(n=len(rows), i=inputs, o=outputs)
            return spec, {"x": rows, "W": ps[0], "b": ps[1], "dy": dy.reshape(-1, outputs)}
        case GlobalAveragePool():
            n, c, h, w = x.shape
            return PoolOpSpec(n=n, c=c, h=h, w=w), {"x": x, "dy": dy}
        case LayerScale():
            n, c, h, w = x.shape
            spec_ = LayerScaleOpSpec(n=n, c=c, h=h, w=w, scale="channel" if ps[0].ndim == 1 else "element")
            return spec_, {"x": x, "g": ps[0], "dy": dy}
        case SoftmaxRows():
            rows = x.reshape(-1, x.shape[-1])
            return SoftmaxOpSpec(n=len(rows), size=rows.shape[1]), {"x": rows, "dy": dy.reshape(rows.shape)}
        case Attention() if not op.products.bf16:
            n, t, width = x.shape
            core = AttentionCoreOpSpec(n=n, t=t, heads=op.heads, head_dim=width // op.heads)
            return core, {"x": x, "k": xs[1], "v": xs[2], "dy": dy}
        case _:
            return _activation(op, x, dy)


def _conv(op: Conv2d, x: Array, ps: list[Array], dy: Array) -> Built | None:
    n, c, h, w = x.shape
    if op.products.bf16:
        return None
    pads = op.padding if isinstance(op.padding, tuple) else (0, 0, 0, 0)
    spec = ConvOpSpec(
        n=n,
        h=h,
        w=w,
        ic=c,
        oc=ps[0].shape[0],
        k=ps[0].shape[2],
        stride=op.stride,
        padding="explicit" if isinstance(op.padding, tuple) else op.padding,
        pads=pads,
        bias=len(ps) == 2,
        depthwise=isinstance(op, Depthwise),
    )
    return spec, {"x": x, "W": ps[0], "dy": dy} | ({"b": ps[1]} if len(ps) == 2 else {})


def _layer_norm(op: LayerNorm, x: Array, ps: list[Array], dy: Array) -> Built:
    """Every kind as one over the last axis: the same numbers, in tokens."""
    if op.kind == "channel":
        x, dy = (v.transpose(0, 2, 3, 1).reshape(v.shape[0], -1, v.shape[1]) for v in (x, dy))
    elif op.kind == "scalar":
        x, dy = (v.reshape(v.shape[0], 1, -1) for v in (x, dy))
    elif x.ndim == 2:
        x, dy = x[:, None], dy[:, None]
    vector = op.kind in ("channel", "token")
    n, t, d = x.shape
    spec = LayerNormOpSpec(n=n, t=t, d=d, norm="vector" if vector else "scalar")
    return spec, {"x": x, "g": ps[0].reshape(-1), "bt": ps[1].reshape(-1), "dy": dy}


def _activation(op: Op, x: Array, dy: Array) -> Built | None:
    act: Any = next((name for name, kind in ACTIVATIONS.items() if type(op) is kind), None)
    if act is None:
        return None
    rows = x.reshape(x.shape[0], -1)
    return ActivationOpSpec(n=len(rows), size=rows.shape[1], act=act), {"x": rows, "dy": dy.reshape(rows.shape)}


def fewer(case: Case, fails: Fails) -> Case:
    """Cut sizes, then blank and round elements, as long as the case still fails; what is 0 can be cut off next."""
    case = _simpler(_cut(case, fails), fails)
    smaller = _cut(case, fails)
    return case if smaller == case else _simpler(smaller, fails)


def _cut(case: Case, fails: Fails) -> Case:
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one size (or all that must be alike) cut: of its tensors one end is kept, or what is not 0."""
    tensors = case.tensors()
    sizes = [f for f in case.block.__struct_fields__ if type(getattr(case.block, f)) is int]
    for fields in (*((f,) for f in sizes), ("ic", "oc"), ("h", "w")):
        if not set(fields) <= set(sizes):
            continue
        for cut in _cuts(min(getattr(case.block, f) for f in fields)):
            spec = replace(case.block, **{f: cut for f in fields})
            try:
                spec.check()
            except CaseError:
                continue
            shapes = {t.name: t.shape for t in spec.tensors()}
            for end in (_first, _last, _not_zero):
                yield explicit(spec, {k: _fitted(v, shapes[k], end) for k, v in tensors.items()}, case)


def _cuts(size: int) -> list[int]:
    """Smaller sizes, the smallest first; some faults show at even ones only."""
    return sorted(new for new in {1, 2, size // 2, size - 2, size - 1} if 0 <= new < size)


# Which part of an axis of ``v`` is kept: where it begins, if there is more than fits.
Beginning = Callable[[Array, int, int], int]


def _first(v: Array, axis: int, kept: int) -> int:
    return 0


def _last(v: Array, axis: int, kept: int) -> int:
    return int(v.shape[axis]) - kept


def _not_zero(v: Array, axis: int, kept: int) -> int:
    where = np.nonzero(v)[axis]
    return min(int(where.min()), v.shape[axis] - kept) if where.size else 0


def _fitted(v: Array, shape: tuple[int, ...], beginning: Beginning) -> Array:
    """The part of ``v`` that fits; 0 where the shape is larger (the output's, at a smaller stride)."""
    out = np.zeros(shape, v.dtype)
    kept = [min(sizes) for sizes in zip(v.shape, shape, strict=True)]
    begins = [beginning(v, axis, size) for axis, size in enumerate(kept)]
    out[tuple(slice(0, size) for size in kept)] = v[
        tuple(slice(start, start + size) for start, size in zip(begins, kept, strict=True))
    ]
    return out


def _simpler(case: Case, fails: Fails) -> Case:
    """Blank the elements that do not matter, in ever smaller groups; round the others to few digits."""
    for name in case.tensors():
        size = case.tensors()[name].size
        for same in (np.zeros_like, np.ones_like):
            case = _try(case, name, slice(0, size), same, fails)
        group = size
        while group >= max(1, size // _GROUPS):
            for start in range(0, size, group):
                case = _try(case, name, slice(start, start + group), np.zeros_like, fails)
            group //= 2
    for name in case.tensors():
        flat = case.tensors()[name].reshape(-1)
        for i in range(flat.size if (flat != flat[:1]).sum() <= _GROUPS else 0):
            for simplify in _SIMPLER:
                case = _try(case, name, slice(i, i + 1), simplify, fails)
    return case


def _rounded(digits: int) -> Callable[[Array], Array]:
    def simplify(v: Array) -> Array:
        return np.array([float(f"{float(x):.{digits}g}") for x in v])

    return simplify


_SIMPLER: tuple[Callable[[Array], Array], ...] = (
    np.ones_like,
    lambda v: np.asarray(np.copysign(1.0, v.astype(np.float64))),
    _rounded(1),
    _rounded(2),
    _rounded(3),
)


def _try(case: Case, name: str, where: slice, change: Callable[[Array], Array], fails: Fails) -> Case:
    tensors = {k: np.array(v) for k, v in case.tensors().items()}
    flat = tensors[name].reshape(-1)
    new = change(flat[where]).astype(numpy_dtype(case.dtype))
    if (new == flat[where]).all():
        return case
    # A number that was made simple by one step is not made another one by the next.
    if len(new) == 1 and _length(new[0]) >= _length(flat[where][0]):
        return case
    flat[where] = new
    changed = explicit(case.block, tensors, case)
    return changed if fails(changed) else case


def _length(x: Any) -> int:
    return len(f"{shortest(x):g}") + (0 if float(f"{shortest(x):g}") == shortest(x) else 10)
