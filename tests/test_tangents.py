"""Forward mode: tangents against real frameworks, and runs that the check must blame or pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.nn.functional as F
from jax import lax
from numpy.typing import NDArray

from diffgrad.bars import PRECISIONS, Bounded, Precision, quiet, recorded
from diffgrad.case import Case, Dtype, numpy_dtype
from diffgrad.certify import OPS
from diffgrad.chains import chain_of
from diffgrad.check import Quantity
from diffgrad.ops import (
    Attention,
    AttentionCore,
    BatchNorm,
    Conv2d,
    Depthwise,
    GeluErf,
    GeluTanh,
    LayerNorm,
    Op,
    SmoothedCrossEntropy,
    SoftmaxRows,
    Swish,
)
from diffgrad.oracle import Key
from diffgrad.specs import EPS
from diffgrad.specs.ops import BatchNormOpSpec
from diffgrad.tangents import TangentWalk, check_tangents, tangent
from diffgrad.trace import Arrays, Trace
from diffgrad.values import Bits, Values
from tests.helpers import KINDS, UIB, ordinary, poked

Instance = tuple[Op, tuple[tuple[int, ...], ...], int]
"""An op, the shapes of its operands, and how many of them are inputs."""

MAP = (3, 2, 6, 5)
TOKENS = (2, 7, 6)
INSTANCES: dict[str, Instance] = {
    "conv2d": (Conv2d(2, "valid"), (MAP, (4, 2, 3, 3), (4,)), 1),
    "depthwise": (Depthwise(1, "valid"), (MAP, (2, 1, 3, 3)), 1),
    "batch_norm": (BatchNorm(), (MAP, (2,), (2,)), 1),
    "layer_norm": (LayerNorm(kind="token"), (TOKENS, (6,), (6,)), 1),
    "gelu_tanh": (GeluTanh(), (TOKENS,), 1),
    "gelu_erf": (GeluErf(), (TOKENS,), 1),
    "silu": (Swish(), (TOKENS,), 1),
    "softmax": (SoftmaxRows(), (TOKENS,), 1),
    "sdpa": (AttentionCore(Attention(2)), (TOKENS, TOKENS, TOKENS), 1),
    "cross_entropy": (SmoothedCrossEntropy(), ((4, 5), (4, 5)), 1),
}

FAMILIES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "normal": lambda v: 2.0 * v,
    "offset": lambda v: v + 1e3,
    "tiny": lambda v: v * 1e-30,
    "huge": lambda v: v * 1e12,
}

Run = Callable[..., NDArray[Any]]


def heads(v: Any, swap: Callable[[Any], Any]) -> Any:
    """[N,T,D] -> [N,2,T,D/2]"""
    n, t, d = v.shape
    return swap(v.reshape(n, t, 2, d // 2))


def torch_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    a, b, c = (heads(m, lambda m: m.transpose(1, 2)) for m in (q, k, v))
    o = torch.softmax(a @ b.transpose(2, 3) * a.shape[-1] ** -0.5, -1) @ c
    return torch.flatten(o.transpose(1, 2), 2)


TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "conv2d": lambda x, w, b: F.conv2d(x, w, b, 2),
    "depthwise": lambda x, w: F.conv2d(x, w, groups=2),
    "batch_norm": lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True, eps=EPS),
    "layer_norm": lambda x, g, b: F.layer_norm(x, g.shape, g, b, EPS),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: torch.softmax(x, -1),
    "sdpa": torch_sdpa,
    "cross_entropy": F.cross_entropy,
}


def jax_norm(axes: tuple[int, ...], spread: tuple[int, ...]) -> Callable[..., jax.Array]:
    def norm(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
        mean, var = jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True)
        return (x - mean) * lax.rsqrt(var + EPS) * g.reshape(spread) + b.reshape(spread)

    return norm


def jax_conv(x: jax.Array, w: jax.Array, stride: int, groups: int = 1) -> jax.Array:
    form = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=form, feature_group_count=groups)


def jax_sdpa(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    a, b, c = (heads(m, lambda m: m) for m in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("nthd,nuhd->nhtu", a, b) / a.shape[-1] ** 0.5)
    return jnp.einsum("nhtu,nuhd->nthd", p, c).reshape(q.shape)


JAX: dict[str, Callable[..., jax.Array]] = {
    "conv2d": lambda x, w, b: jax_conv(x, w, 2) + b[:, None, None],
    "depthwise": lambda x, w: jax_conv(x, w, 1, 2),
    "batch_norm": jax_norm((0, 2, 3), (1, -1, 1, 1)),
    "layer_norm": jax_norm((-1,), (-1,)),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "sdpa": jax_sdpa,
    "cross_entropy": lambda x, t: -jnp.sum(t * jax.nn.log_softmax(x)) / len(x),
}


def tf_conv(x: Any, w: Any, depthwise: bool = False) -> Any:
    x = tf.transpose(x, (0, 2, 3, 1))
    if depthwise:
        y = tf.nn.depthwise_conv2d(x, tf.transpose(w, (2, 3, 0, 1)), (1, 1, 1, 1), "VALID")
    else:
        y = tf.nn.conv2d(x, tf.transpose(w, (2, 3, 1, 0)), 2, "VALID")
    return tf.transpose(y, (0, 3, 1, 2))


def tf_norm(x: Any, g: Any, b: Any, axes: tuple[int, ...]) -> Any:
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, b, g, EPS)


def tf_batch_norm(x: Any, g: Any, b: Any) -> Any:
    return tf.transpose(tf_norm(tf.transpose(x, (0, 2, 3, 1)), g, b, (0, 1, 2)), (0, 3, 1, 2))


def tf_sdpa(q: Any, k: Any, v: Any) -> Any:
    n, t, d = q.shape
    a, b, c = (tf.transpose(tf.reshape(m, (n, t, 2, d // 2)), (0, 2, 1, 3)) for m in (q, k, v))
    o = tf.matmul(tf.nn.softmax(tf.matmul(a, b, transpose_b=True) / (d // 2) ** 0.5), c)
    return tf.reshape(tf.transpose(o, (0, 2, 1, 3)), q.shape)


TENSORFLOW: dict[str, Callable[..., Any]] = {
    "conv2d": lambda x, w, b: tf_conv(x, w) + b[:, None, None],
    "depthwise": lambda x, w: tf_conv(x, w, depthwise=True),
    "batch_norm": tf_batch_norm,
    "layer_norm": partial(tf_norm, axes=(-1,)),
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: tf.nn.gelu(x, approximate=False),
    "silu": tf.nn.silu,
    "softmax": tf.nn.softmax,
    "sdpa": tf_sdpa,
    "cross_entropy": lambda x, t: tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(t, x)),
}


def run_torch(name: str, values: Arrays, tangents: Arrays) -> NDArray[Any]:
    given = {k: torch.tensor(v) for k, v in values.items()}
    moving = tuple(given[k] for k in tangents)
    constants = tuple(v for k, v in given.items() if k not in tangents)
    moves = tuple(torch.tensor(v) for v in tangents.values())
    t: torch.Tensor = torch.func.jvp(lambda *m: TORCH[name](*m, *constants), moving, moves)[1]
    return np.asarray(t.numpy())


def run_jax(name: str, values: Arrays, tangents: Arrays, jit: bool = False) -> NDArray[Any]:
    with jax.enable_x64(True):
        given = {k: jnp.asarray(v) for k, v in values.items()}
        moving = tuple(given[k] for k in tangents)
        constants = tuple(v for k, v in given.items() if k not in tangents)

        def forward(*m: jax.Array) -> jax.Array:
            return JAX[name](*m, *constants)

        def pushed(moving: Any, moves: Any) -> Any:
            return jax.jvp(forward, moving, moves)

        run = jax.jit(pushed) if jit else pushed
        return np.asarray(run(moving, tuple(jnp.asarray(v) for v in tangents.values()))[1])


def run_tensorflow(name: str, values: Arrays, tangents: Arrays) -> NDArray[Any]:
    given = {k: tf.constant(v) for k, v in values.items()}
    moves = [tf.constant(v) for v in tangents.values()]
    with tf.autodiff.ForwardAccumulator([given[k] for k in tangents], moves) as accumulator:
        y = TENSORFLOW[name](*given.values())
    return np.asarray(accumulator.jvp(y).numpy())


RUNS: dict[str, Run] = {
    "torch": run_torch,
    "jax": run_jax,
    "jax jit": partial(run_jax, jit=True),
    "tensorflow": run_tensorflow,
}

FAULTS: dict[tuple[str, str, str], tuple[str, ...]] = {
    # Its constants are of float32, in the forward already.
    ("tensorflow", "gelu_tanh", "float64"): ("normal",),
    ("tensorflow", "gelu_erf", "float64"): ("normal",),
}
"""Framework, op, dtype: the families in which it is known to be wrong."""


@cache
def operands(name: str, dtype: str, family: str) -> tuple[Arrays, Arrays]:
    """Values, and tangents of all that is differentiated."""
    _, shapes, _ = INSTANCES[name]
    bits = Bits(len(name), f"{name} {family}")
    values = {f"{i}": FAMILIES[family](bits.normal(shape)).astype(dtype) for i, shape in enumerate(shapes)}
    if name == "cross_entropy":
        t = bits.normal(shapes[1]) ** 2
        values["1"] = (t / t.sum(1, keepdims=True)).astype(dtype)
    moving = list(values)[: 1 if name == "cross_entropy" else None]
    return values, {k: bits.normal(values[k].shape).astype(dtype) for k in moving}


def bounded(v: NDArray[Any], p: Precision) -> Bounded:
    return recorded(v.astype(np.float64), p)


def expected(name: str, dtype: str, family: str) -> Bounded:
    op, _, inputs = INSTANCES[name]
    p = PRECISIONS[dtype]
    values, tangents = operands(name, dtype, family)
    held = [bounded(v, p) for v in values.values()]
    moves = [bounded(tangents[k], p) if k in tangents else None for k in values]
    with quiet():
        return tangent(op, tuple(held[:inputs]), tuple(held[inputs:]), tuple(moves[:inputs]), tuple(moves[inputs:]))


def outside(run: NDArray[Any], b: Bounded) -> NDArray[np.bool_]:
    assert run.shape == b.val.shape
    with quiet():
        return np.asarray(np.isfinite(b.err) & ~(np.abs(run.astype(np.float64) - b.val) <= b.err))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("framework", RUNS)
def test_real_forward_modes_lie_within_the_bar(framework: str, name: str, dtype: str, family: str) -> None:
    run = RUNS[framework](name, *operands(name, dtype, family))
    assert run.dtype == dtype
    known = family in FAULTS.get((framework, name, dtype), ())
    assert outside(run, expected(name, dtype, family)).any() == known


# A right run, by the complex step: the imaginary parts of forwards that know nothing of tangents.

H = 2.0**-100


@cache
def stepped(case: Case) -> Trace:
    """Every link on what was recorded before it, rounded to the case's dtype."""
    chain, dtype = chain_of(case.block), numpy_dtype(case.dtype)
    tangents = case.tangents()
    held: Arrays = {}
    for name, v in case.tensors().items():
        step = tangents[name].astype(np.float64) if name in tangents else 0.0
        held[name] = v.astype(np.float64) + 1j * H * step
    acts, moved = {}, {}
    for link in chain.links:
        xs, ps = (tuple(held[s] for s in names) for names in (link.reads, (*link.feeds, *link.constants)))
        y = np.asarray(link.op.forward(xs, ps), np.complex128)
        acts[link.writes], moved[link.writes] = y.real.astype(dtype), (y.imag / H).astype(dtype)
        held[link.writes] = acts[link.writes].astype(np.float64) + 1j * H * moved[link.writes].astype(np.float64)
    return Trace(acts=acts, cots={}, grads={}, tangents=moved)


def checked(case: Case, trace: Trace, compiled: bool = False) -> list[Quantity]:
    p = PRECISIONS[case.dtype]
    return check_tangents(chain_of(case.block), case.tensors(), trace, case.tangents(), p, compiled)


def with_tangent(trace: Trace, site: str, array: NDArray[Any] | None) -> Trace:
    others = {k: v for k, v in trace.tangents.items() if k != site}
    return msgspec.structs.replace(trace, tangents=others if array is None else {**others, site: array})


def first_fault(case: Case, trace: Trace) -> Quantity:
    return next(q for q in checked(case, trace) if q.faulty)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_run_passes(kind: str, dtype: Dtype, compiled: bool) -> None:
    case = ordinary(kind, dtype)
    quantities = checked(case, stepped(case), compiled)
    assert {q.verdict for q in quantities} <= {"ok", "vacuous"}
    assert any(q.verdict == "ok" for q in quantities if q.what == "tangent")
    links = len(chain_of(case.block).links)
    assert len(quantities) == 2 * links * (2 if dtype == "float64" and not chain_of(case.block).deep else 1)


UIB64 = msgspec.structs.replace(UIB, dtype="float64")
SITES = tuple(link.writes for link in chain_of(UIB.block).links)


@pytest.mark.parametrize("case", [UIB, UIB64], ids=["float32", "float64"])
@pytest.mark.parametrize("site", SITES)
def test_a_tangent_off_by_a_hundredth_is_blamed_on_its_link(site: str, case: Case) -> None:
    trace = stepped(case)
    off = (trace.tangents[site] * 1.01).astype(case.dtype)
    fault = first_fault(case, with_tangent(trace, site, off))
    assert (fault.what, fault.name, fault.verdict) == ("tangent", site, "wrong")
    assert fault.link.endswith(f"@{site}")


@pytest.mark.parametrize(
    ("change", "verdict", "defect"),
    [
        (lambda v: None, "wrong", "missing"),
        (lambda v: v[:1], "wrong", "shape"),
        (lambda v: v.astype(np.float64), "wrong", "dtype"),
        (lambda v: poked(v, np.nan), "nonfinite", ""),
    ],
    ids=["missing", "shape", "dtype", "nan"],
)
def test_what_is_not_a_tangent_is_a_fault(change: Callable[[Any], Any], verdict: str, defect: str) -> None:
    trace = stepped(UIB)
    fault = first_fault(UIB, with_tangent(trace, "en", change(trace.tangents["en"])))
    assert (fault.name, fault.verdict, fault.defect) == ("en", verdict, defect)


def test_a_wrong_activation_is_blamed_before_its_tangent() -> None:
    trace = stepped(UIB)
    acts = trace.acts | {"ec": trace.acts["ec"] * np.float32(1.01)}
    fault = first_fault(UIB, msgspec.structs.replace(trace, acts=acts))
    assert (fault.what, fault.name) == ("activation", "ec")


@pytest.mark.parametrize("part", ["acts", "tangents", "cots", "grads"])
def test_what_forward_mode_does_not_have_is_a_stray(part: str) -> None:
    trace = stepped(UIB)
    more = msgspec.structs.replace(trace, **{part: {**getattr(trace, part), "ghost": np.ones(1)}})
    (fault,) = (q for q in checked(UIB, more) if q.faulty)
    assert (fault.name, fault.defect) == ("ghost", "stray")


def test_the_end_to_end_bars_hold_and_are_narrow() -> None:
    walked: dict[Key, Bounded] = {}
    TangentWalk(chain_of(UIB64.block), UIB64.tensors(), UIB64.tangents(), PRECISIONS["float64"]).each(
        walked.__setitem__
    )
    for site in SITES:
        assert not outside(stepped(UIB64).acts[site], walked["acts", site]).any()
        assert not outside(stepped(UIB64).tangents[site], walked["tangents", site]).any()
        assert outside(stepped(UIB64).tangents[site] * (1 + 1e-6), walked["tangents", site]).any()


@pytest.mark.parametrize("name", OPS)
def test_without_any_tangent_there_is_none(name: str) -> None:
    """Zeros, in the shape of the output."""
    bits = Bits(3, name)
    op, xs, ps = OPS[name](
        lambda low, high: int(bits.integers(low, high, (1,))[0]),
        lambda *shape: bits.normal(shape),  # type: ignore[arg-type]
    )
    held_xs, held_ps = (tuple(recorded(v, PRECISIONS["float32"]) for v in group) for group in (xs, ps))
    with quiet():
        t = tangent(op, held_xs, held_ps, (None,) * len(xs), (None,) * len(ps))
    assert t.val.shape == np.asarray(op.forward(xs, ps)).shape
    assert not t.val.any()


def one_pass(case: Case, factor: float = 1.0) -> Trace:
    """A batch norm by E[x^2] - E[x]^2 in float32, with the tangent of that."""
    t, d = case.tensors(), case.tangents()
    axes = (0, 2, 3)

    def mean(v: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(v.mean(axes, keepdims=True, dtype=np.float32))

    g, b, dg, db = (v[:, None, None] for v in (t["g"], t["bt"], d["g"], d["bt"]))
    centred, moved = t["x"] - mean(t["x"]), d["x"] - mean(d["x"])
    s = (np.maximum(mean(t["x"] * t["x"]) - mean(t["x"]) ** 2, 0) + np.float32(EPS)) ** np.float32(-0.5)
    ds = -(s**3) * mean(centred * moved)
    tangents = (moved * s + centred * ds) * g + centred * s * dg + db
    out = centred * s * g + b
    return Trace({"out": out}, {}, {}, tangents={"out": (tangents * factor).astype(np.float32)})


def test_a_one_pass_variance_is_named_and_a_fault_on_top_is_not_excused() -> None:
    case = Case(block=BatchNormOpSpec(n=4, h=4, w=4, c=2), values=Values("offset", 1, 8))
    assert {q.verdict for q in checked(case, one_pass(case))} == {"lossy:one_pass_variance"}
    assert checked(case, one_pass(case, 2.0))[1].verdict == "wrong"
