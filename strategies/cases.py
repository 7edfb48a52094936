"""Whole cases, singly and in batches that share a block: shapes are dear to compile, values are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, get_args

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from diffgrad.adapters.registry import FRAMEWORKS, offers
from diffgrad.case import Case, Dtype
from diffgrad.how import MODES, PLAIN, Conv, Device, How, Layout, Memory, Norm
from diffgrad.specs import BLOCKS, Spec
from diffgrad.strategies.blocks import SPECS
from diffgrad.values import FAMILIES, LIMITS, Values

T = TypeVar("T")

DTYPES: tuple[str, ...] = get_args(Dtype)
WIDE = ("float32", "float64")

RATES = st.sampled_from((0.0, 0.0, 0.0, 0.1, 2.0**-7))
"""Learning rates of the SGD step; most cases have none."""

DRAWN = tuple(family for family in FAMILIES if family != "blank")
"""Families worth drawing: all but the one for cases that spell out their numbers."""

# Exponents beyond which float16 holds no number, or none but 0.
_FLOAT16 = {"tiny": (0, 24), "huge": (0, 12), "wide": (0, 12)}

_USUAL = {"offset": (0, 10), "tiny": (0, 40), "huge": (0, 30), "wide": (0, 6), "repeated": (0, 30)}
"""Exponents drawn most of the time; the family's full range now and then."""


class Batch(NamedTuple):
    """Several value draws of one block, dtype and learning rate (0: no step)."""

    block: Spec
    dtype: Dtype
    draws: tuple[Values, ...]
    lr: float = 0.0
    how: How = PLAIN

    def cases(self) -> tuple[Case, ...]:
        """One case per draw."""
        return tuple(
            Case(block=self.block, dtype=self.dtype, lr=self.lr, values=v, how=self.how)  # type: ignore[arg-type]
            for v in self.draws
        )


# Families that show a block's faults better than others, and are drawn half of the time.
_TELLING: dict[str, tuple[str, ...]] = {
    "op_act": ("kinks", "limits"),
    "op_softmax": ("limits", "wide"),
    "op_ln": ("integers", "offset", "limits"),
    "op_bn": ("integers", "offset", "limits"),
    "op_dense": ("integers",),
}


@st.composite
def values(draw: st.DrawFn, dtype: str = "float32", kind: str = "") -> Values:
    """A family, a seed, and an exponent within the family's range and the dtype's; ``kind`` is the block's."""
    families = _TELLING[kind] if kind in _TELLING and draw(st.booleans()) else DRAWN
    family = draw(st.sampled_from(families))
    low, high = FAMILIES[family][1]
    if family in _USUAL and draw(st.integers(0, 7)):
        low, high = _USUAL[family]
    if dtype == "float16" and family in _FLOAT16:
        low, high = max(low, _FLOAT16[family][0]), min(high, _FLOAT16[family][1])
    exponents = st.sampled_from(LIMITS[dtype]) if family == "limits" else st.integers(low, high)
    return Values(family, draw(st.integers(0, 2**32 - 1)), draw(exponents))


def _unusual(kind: object) -> tuple[object, ...]:
    """The values of a condition but for the plain one, which is empty."""
    return tuple(value for value in get_args(kind) if value)


# Every condition beside the mode, with the values to draw; those that need a process of their own come seldom.
_CONDITIONS: dict[str, tuple[object, ...]] = {
    "bare": (True,),
    "layout": _unusual(Layout),
    **dict.fromkeys(("x", "dy", "params"), _unusual(Memory)),
    "norm": _unusual(Norm),
    "conv": _unusual(Conv),
    "deterministic": (True,),
}
_PROCESSES: dict[str, tuple[object, ...]] = {"threads": (2,), "isa": ("AVX2",), "onednn": (False,)}
_OF_CUDA: dict[str, tuple[object, ...]] = {"tf32": (True,), "benchmark": (True,)}

# Modes by what a case in them costs: Inductor takes seconds for every program.
_DEAR_MODES = ("compile",)


@st.composite
def hows(
    draw: st.DrawFn,
    adapters: Sequence[str] = FRAMEWORKS,
    modes: Sequence[str] | None = None,
    device: Device = "cpu",
) -> How:
    """Conditions that at least one of the adapters offers; half of the time plain ones."""
    plain = How(device=device, mode=draw(st.sampled_from(tuple(modes)))) if modes else How(device=device)
    if draw(st.integers(0, 9)) < 5:
        return plain
    changes: dict[str, object] = {}
    if not modes and draw(st.booleans()):
        changes["mode"] = draw(st.sampled_from([m for m in MODES if m not in _DEAR_MODES]))
        if not draw(st.integers(0, 15)):
            changes["mode"] = draw(st.sampled_from(_DEAR_MODES))
    table = _CONDITIONS | (_OF_CUDA if device == "cuda" else {})
    for name in draw(st.lists(st.sampled_from(tuple(table)), max_size=3, unique=True)):
        changes[name] = draw(st.sampled_from(table[name]))
    if not draw(st.integers(0, 15)):
        name = draw(st.sampled_from(tuple(_PROCESSES)))
        changes[name] = draw(st.sampled_from(_PROCESSES[name]))
    return _offered(plain, changes, adapters)


def _offered(plain: How, changes: dict[str, object], adapters: Sequence[str]) -> How:
    """``plain`` with those of the changes that some adapter offers together."""
    how = plain
    for name, value in changes.items():
        changed = replace(how, **{name: value})
        if changed.mode == "jvp" and changed.bare:
            continue
        if any(offers(adapter, changed) for adapter in adapters):
            how = changed
    return how


ALWAYS_PLAIN = st.just(PLAIN)

_DTYPE_WEIGHTS = {"float32": 3, "float64": 2}


@st.composite
def batches(
    draw: st.DrawFn,
    blocks: Sequence[str] = tuple(BLOCKS),
    dtypes: Sequence[str] = DTYPES,
    conditions: st.SearchStrategy[How] = ALWAYS_PLAIN,
    most: int = 16,
) -> Batch:
    """A block spec, a dtype, conditions, and up to ``most`` value draws."""
    block = draw(SPECS[draw(st.sampled_from(tuple(blocks)))]())
    dtype = draw(st.sampled_from([d for d in dtypes for _ in range(_DTYPE_WEIGHTS.get(d, 1))]))
    if getattr(block, "bf16", False) and dtype != "float32":
        block = replace(block, bf16=False)  # the flag rounds float32 operands
    how = draw(conditions)
    draws = tuple(draw(st.lists(values(dtype, block.kind), min_size=1, max_size=most)))
    lr = 0.0 if how.mode == "jvp" else draw(RATES)
    return Batch(block, dtype, draws, lr, how)  # type: ignore[arg-type]


def cases(
    blocks: Sequence[str] = tuple(BLOCKS),
    dtypes: Sequence[str] = WIDE,
    conditions: st.SearchStrategy[How] = ALWAYS_PLAIN,
) -> st.SearchStrategy[Case]:
    """Single cases, in the two wide dtypes and under plain conditions unless others are asked for."""
    return batches(blocks, dtypes, conditions, most=1).map(lambda b: b.cases()[0])


def sample(strategy: st.SearchStrategy[T], count: int, key: int) -> list[T]:
    """``count`` draws of a strategy, the same ones for the same key."""
    drawn: list[T] = []

    @seed(key)
    @settings(quiet_settings(count), phases=[Phase.generate])
    @given(strategy)
    def collect(value: T) -> None:
        drawn.append(value)

    collect()
    return drawn


def quiet_settings(examples: int) -> settings:
    """Settings for our own use of Hypothesis as an engine: no database, no deadline, nothing printed."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
