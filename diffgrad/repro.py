"""``diffgrad repro``: a saved single-op fault as a script of a screenful that needs only the framework and NumPy.

The script holds the case's numbers, one call of the framework, the element that is wrong, and the expected value with
its bar as the oracle computed them; it prints versions, got, expected and bar, and exits 1 while the fault is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffgrad.adapters.layout import to_nhwc
from diffgrad.adapters.registry import mode_of
from diffgrad.case import Case
from diffgrad.check import Quantity
from diffgrad.corpus import Entry
from diffgrad.reduce import shortest
from diffgrad.specs import EPS, Spec
from diffgrad.specs.ops import shown

Array = NDArray[Any]


class ReproError(RuntimeError):
    """There is no standalone script of a finding; the message says why and what to do instead."""


# What calls the op, by framework and block: expressions over the case's tensors. The shapes are the framework's own.
FORWARDS: dict[str, dict[str, Callable[[Any], str]]] = {
    "torch": {
        "op_conv": lambda s: _torch_conv(s),
        "op_bn": lambda s: f"F.batch_norm(x, None, None, g, bt, training=True, eps={EPS})",
        "op_ln": lambda s: (
            f"F.layer_norm(x, ({s.d},), g, bt, {EPS})"
            if s.norm == "vector"
            else f"F.layer_norm(x, ({s.d},), eps={EPS}) * g + bt"
        ),
        "op_act": lambda s: {
            "relu": "F.relu(x)",
            "relu6": "F.relu6(x)",
            "swish": "F.silu(x)",
            "gelu_tanh": 'F.gelu(x, approximate="tanh")',
            "gelu_erf": "F.gelu(x)",
        }[s.act],
        "op_dense": lambda s: "F.linear(x, W.T, b)",
        "op_pool": lambda s: "F.adaptive_avg_pool2d(x, 1)",
        "op_scale": lambda s: "x * g" + (".reshape(-1, 1, 1)" if s.scale == "channel" else ""),
        "op_softmax": lambda s: f"torch.softmax({_hidden(s, 'torch.where(torch.tensor({}), x, -torch.inf)')}, -1)",
        "op_sdpa": lambda s: _torch_sdpa(s),
        "loss": lambda s: "F.cross_entropy(x, target)",
    },
    "jax": {
        "op_conv": lambda s: _jax_conv(s),
        "op_bn": lambda s: _jax_norm("(0, 1, 2)"),
        "op_ln": lambda s: _jax_norm("-1"),
        "op_act": lambda s: {
            "relu": "jax.nn.relu(x)",
            "relu6": "jax.nn.relu6(x)",
            "swish": "jax.nn.silu(x)",
            "gelu_tanh": "jax.nn.gelu(x, approximate=True)",
            "gelu_erf": "jax.nn.gelu(x, approximate=False)",
        }[s.act],
        "op_dense": lambda s: "x @ W + b",
        "op_pool": lambda s: "jnp.mean(x, (1, 2), keepdims=True)",
        "op_scale": lambda s: "x * g" if s.scale == "channel" else "x * jnp.transpose(g, (1, 2, 0))",
        "op_softmax": lambda s: f"jax.nn.softmax({_hidden(s, 'jnp.where(jnp.array({}), x, -jnp.inf)')})",
        "op_sdpa": lambda s: (
            "jax.nn.dot_product_attention("
            + ", ".join(f"{v}.reshape{(s.n, s.t, s.heads, s.head_dim)}" for v in ("x", "k", "v"))
            + (f", mask=jnp.array([[{shown(s.mask)}]])" if s.mask else "")
            + ").reshape(x.shape)"
        ),
        "loss": lambda s: "-jnp.sum(target * jax.nn.log_softmax(x)) / len(x)",
    },
    "tensorflow": {
        "op_conv": lambda s: _tf_conv(s),
        "op_bn": lambda s: f"tf.nn.batch_normalization(x, *tf.nn.moments(x, (0, 1, 2)), bt, g, {EPS})",
        "op_ln": lambda s: f"tf.nn.batch_normalization(x, *tf.nn.moments(x, (-1,), keepdims=True), bt, g, {EPS})",
        "op_act": lambda s: {
            "relu": "tf.nn.relu(x)",
            "relu6": "tf.nn.relu6(x)",
            "swish": "tf.nn.silu(x)",
            "gelu_tanh": "tf.nn.gelu(x, approximate=True)",
            "gelu_erf": "tf.nn.gelu(x)",
        }[s.act],
        "op_dense": lambda s: "tf.matmul(x, W) + b",
        "op_pool": lambda s: "tf.reduce_mean(x, (1, 2), keepdims=True)",
        "op_scale": lambda s: "x * g" if s.scale == "channel" else "x * tf.transpose(g, (1, 2, 0))",
        "op_softmax": lambda s: f"tf.nn.softmax({_hidden(s, 'tf.where({}, x, x.dtype.as_numpy_dtype(-np.inf))')})",
        "op_sdpa": lambda s: (
            "tf.reshape(keras.ops.dot_product_attention("
            + ", ".join(f"tf.reshape({v}, {(s.n, s.t, s.heads, s.head_dim)})" for v in ("x", "k", "v"))
            + (f", mask=tf.constant([[{shown(s.mask)}]])" if s.mask else "")
            + "), x.shape)"
        ),
        "loss": lambda s: "tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(target, x))",
    },
}


OTHERS: dict[tuple[str, str, str], str] = {
    ("jax", "op_ln", "fused"): f"jax.nn.standardize(x, -1, epsilon={EPS}) * g + bt",
    ("jax", "op_bn", "fused"): f"jax.nn.standardize(x, (0, 1, 2), epsilon={EPS}) * g + bt",
    ("tensorflow", "op_bn", "fused"): f"tf.compat.v1.nn.fused_batch_norm(x, g, bt, epsilon={EPS}, is_training=True)[0]",
}
"""(framework, block, ``How.norm``) -> the call, for realizations that are one."""


def _torch_conv(s: Any) -> str:
    x, padding = "x", repr((s.k - 1) // 2 if s.padding == "symmetric" else 0)
    if s.padding == "xla_same" and s.stride == 1:
        padding = '"same"'
    elif s.padding in ("explicit", "xla_same"):
        top, bottom, left, right = s.pads if s.padding == "explicit" else _same(s)
        if top == bottom >= 0 and left == right >= 0:
            padding = repr((top, left))
        else:
            x = f"F.pad(x, {(left, right, top, bottom)})"
    groups = f", groups={s.ic}" if s.depthwise else ""
    return f"F.conv2d({x}, W, {'b' if s.bias else None}, stride={s.stride}, padding={padding}{groups})"


def _same(s: Any) -> tuple[int, int, int, int]:
    """XLA's SAME as (top, bottom, left, right)."""
    rows, cols = (max((-(-size // s.stride) - 1) * s.stride + s.k - size, 0) for size in (s.h, s.w))
    return rows // 2, rows - rows // 2, cols // 2, cols - cols // 2


def _torch_sdpa(s: Any) -> str:
    heads = ", ".join(f"{v}.reshape{(s.n, s.t, s.heads, s.head_dim)}.transpose(1, 2)" for v in ("x", "k", "v"))
    mask = f", torch.tensor({shown(s.mask)})" if s.mask else ""
    return f"F.scaled_dot_product_attention({heads}{mask}).transpose(1, 2).reshape(x.shape)"


def _hidden(s: Any, masked: str) -> str:
    """The input of a softmax, hidden by its mask if there is one."""
    return masked.format(shown(s.mask)) if s.mask else "x"


def _jax_conv(s: Any) -> str:
    half = (s.k - 1) // 2
    top, bottom, left, right = s.pads if s.padding == "explicit" else (half,) * 4
    padding = {"xla_same": '"SAME"', "valid": '"VALID"'}.get(s.padding, f"[{(top, bottom)}, {(left, right)}]")
    groups = f", feature_group_count={s.ic}" if s.depthwise else ""
    call = (
        f"jax.lax.conv_general_dilated(x, W, ({s.stride}, {s.stride}), {padding}, "
        f'dimension_numbers=("NHWC", "HWIO", "NHWC"){groups})'
    )
    return f"{call} + b" if s.bias else call


def _jax_norm(axes: str) -> str:
    mean, variance = (f"jnp.{f}(x, {axes}, keepdims=True)" for f in ("mean", "var"))
    return f"(x - {mean}) * jax.lax.rsqrt({variance} + {EPS}) * g + bt"


def _tf_conv(s: Any) -> str:
    half = (s.k - 1) // 2
    top, bottom, left, right = s.pads if s.padding == "explicit" else (half,) * 4
    padding = {"xla_same": '"SAME"', "valid": '"VALID"'}.get(
        s.padding, f"[[0, 0], [{top}, {bottom}], [{left}, {right}], [0, 0]]"
    )
    x = "x"
    if min(s.pads) < 0:  # TensorFlow's paddings do not crop
        added = ", ".join(f"[{max(low, 0)}, {max(high, 0)}]" for low, high in (s.pads[:2], s.pads[2:]))
        rows, cols = (f"{max(-low, 0)}:{min(high, 0) or ''}" for low, high in (s.pads[:2], s.pads[2:]))
        x, padding = f"tf.pad(x, [[0, 0], {added}, [0, 0]])[:, {rows}, {cols}]", '"VALID"'
    if s.depthwise:
        strides = (1, s.stride, s.stride, 1)
        call = f"tf.nn.depthwise_conv2d({x}, tf.transpose(W, (0, 1, 3, 2)), {strides}, {padding})"
    else:
        call = f"tf.nn.conv2d({x}, W, {s.stride}, {padding})"
    return f"tf.nn.bias_add({call}, b)" if s.bias else call


# How the gradient is taken, by framework and mode: lines that leave the output in ``y`` and gradients in ``grads``.
_TORCH_EAGER = """\
y = forward(*leaves)
grads = torch.autograd.grad(y, leaves, dy)"""
_JAX = """\
def step(dy, *leaves):
    y, pull = {vjp}
    return y, pull(dy)

y, grads = {call}(dy, *leaves)"""
_TF = """\
{decorator}def step(dy, *leaves):
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y = {call}(*leaves)
    return y, tape.gradient(y, leaves, output_gradients=dy)

y, grads = step(dy, *leaves)"""

BACKWARDS: dict[tuple[str, str], str] = {
    ("torch", "eager"): _TORCH_EAGER,
    ("torch", "compile"): "forward = torch.compile(forward, fullgraph=True, dynamic=False)\n" + _TORCH_EAGER,
    ("torch", "func"): "y, pull = torch.func.vjp(forward, *leaves)\ngrads = pull(dy)",
    ("torch", "checkpoint"): (
        "from torch.utils.checkpoint import checkpoint\n"
        + _TORCH_EAGER.replace("forward(*leaves)", "checkpoint(forward, *leaves, use_reentrant=False)")
    ),
    ("jax", "jit"): _JAX.format(vjp="jax.vjp(forward, *leaves)", call="jax.jit(step)"),
    ("jax", "eager"): _JAX.format(vjp="jax.vjp(forward, *leaves)", call="step"),
    ("jax", "checkpoint"): _JAX.format(vjp="jax.vjp(jax.checkpoint(forward), *leaves)", call="jax.jit(step)"),
    ("jax", "linearize"): (
        "def step(dy, *leaves):\n"
        "    y, push = jax.linearize(forward, *leaves)\n"
        "    return y, jax.linear_transpose(push, *leaves)(dy)\n\n"
        "y, grads = jax.jit(step)(dy, *leaves)"
    ),
    ("tensorflow", "eager"): _TF.format(decorator="", call="forward"),
    ("tensorflow", "function"): _TF.format(decorator="@tf.function\n", call="forward"),
    ("tensorflow", "xla"): _TF.format(decorator="@tf.function(jit_compile=True)\n", call="forward"),
    ("tensorflow", "checkpoint"): _TF.format(decorator="", call="tf.recompute_grad(forward)"),
}

_IMPORTS = {
    "torch": "import torch\nimport torch.nn.functional as F",
    "jax": 'import jax\nimport jax.numpy as jnp\n\njax.config.update("jax_enable_x64", True)',
    "tensorflow": "import tensorflow as tf",
}
_VERSIONS = {"torch": "torch.__version__", "jax": "jax.__version__", "tensorflow": "tf.__version__"}
_TENSORS = {"torch": "torch.tensor({})", "jax": "jnp.array({})", "tensorflow": "tf.constant({})"}
_DTYPES = {"torch": "torch.{}", "jax": "jnp.{}", "tensorflow": "tf.{}"}
_TO_NUMPY = {
    "torch": "{}.detach().double().numpy()",
    "jax": "np.asarray({}, np.float64)",
    "tensorflow": "tf.cast({}, tf.float64).numpy()",
}

# What a tensor is a view of, in torch, where strides are real; elsewhere a view is only another way to write a value.
_VIEWS = {
    "step": "{n} = torch.stack(({n}, torch.full_like({n}, torch.nan)), -1).flatten(-2)[..., ::2]",
    "transposed": "{n} = {n}.permute(*reversed(range({n}.ndim))).contiguous().permute(*reversed(range({n}.ndim)))",
    "offset": "{n} = torch.cat((torch.full((1,), torch.nan, dtype={n}.dtype), {n}.flatten()))[1:].view({n}.shape)",
    "expanded": "{n} = {n}[:1].clone().expand({n}.shape)",
    "channels_last": "{n} = {n}.to(memory_format=torch.channels_last)",
}


def script(entry: Entry, quantity: Quantity | None) -> str:
    """The script of a saved finding.

    Args:
        entry: the finding.
        quantity: its blamed quantity in a run of now, with the element, the expected value and the bar; None where the
            run ends in an exception.

    Raises:
        ReproError: the finding is not a single op's, or takes conditions that a script cannot show.
    """
    name, case = entry.signature.adapter, entry.case
    spec, mode = case.block, mode_of(name, case.how)
    if spec.kind not in FORWARDS.get(name, {}):
        raise ReproError(
            f"{entry.id}: {spec.kind} has no standalone form in {name}, only single ops have; `diffgrad replay` runs it"
        )
    _refuse(entry, quantity)
    tensors = case.tensors() if name == "torch" else to_nhwc(spec, case.tensors())
    leaves = spec.differentiated()
    call = OTHERS.get((name, spec.kind, case.how.norm)) or FORWARDS[name][spec.kind](spec)
    perturbed = quantity is not None and quantity.bar == 0.0 and np.isfinite(quantity.got) and not quantity.defect
    tupled = f"({', '.join(leaves)}{',' * (len(leaves) == 1)})"
    lines = [
        f'"""{entry.signature}',
        *([_PERTURB] if perturbed else []),
        f'{_ends(quantity.sentence() if quantity is not None else entry.sentence)}"""',
        "",
        *_process(case),
        "import sys",
        "",
        "import numpy as np",
        _IMPORTS[name],
        *(["import keras"] if "keras." in call else []),
        *([f"\ntorch.set_num_threads({case.how.threads})"] if name == "torch" else []),
        "",
        *_data(name, case, tensors),
        f"leaves = tuple(v.requires_grad_() for v in {tupled})" if name == "torch" else f"leaves = {tupled}",
        "",
        f"def forward({', '.join(leaves)}):",
        f"    return {call}",
        "",
        f'print("{name}", {_VERSIONS[name]}, "numpy", np.__version__)',
        "",
        BACKWARDS[name, mode],
        *_told(name, case, quantity, leaves),
    ]
    return "\n".join(lines) + "\n"


def _ends(sentence: str) -> str:
    """A sentence within a docstring."""
    return sentence.replace("\\", "/").replace('"', "'").rstrip(". ") + "."


def _process(case: Case) -> list[str]:
    """What must be in the environment before the framework is imported; threads are asked for afterwards."""
    wanted = {k: v for k, v in case.how.flavour() if "ONEDNN" in k}
    return ["import os", "", f"os.environ |= {wanted!r}", ""] if wanted else []


def _told(name: str, case: Case, quantity: Quantity | None, leaves: tuple[str, ...]) -> list[str]:
    """What is compared and printed."""
    if quantity is None:
        return ['print("it ran to its end")', "sys.exit(0)"]
    array = {"activation": "out", "cotangent": case.block.input().name}.get(
        quantity.what.removeprefix("bare "), quantity.name
    )
    words = "the output" if array == "out" else f"the gradient of {array}"
    held = "y" if array == "out" else f"grads[{leaves.index(array)}]"
    if quantity.defect:
        return [
            f"got, expected = tuple({held}.shape), {_marked(name, case.block, array, ...).shape}",
            f'print(f"the shape of {words}: got {{got}}, expected {{expected}}")',
            "sys.exit(0 if got == expected else 1)",
        ]
    right = f"{_number(quantity.expected)}, {_number(quantity.bar)}"
    (at,) = np.argwhere(_marked(name, case.block, array, quantity.index)).tolist()
    return [
        f"got = float({_TO_NUMPY[name].format(held)}[{', '.join(map(str, at)) or '()'}])",
        f"expected, bar = {right}  # in float64; what rounding may add up to",
        f'print(f"{words} at {at}: got {{got!r}}, expected {{expected!r}}, bar {{bar!r}}")',
        "sys.exit(0 if abs(got - expected) <= bar else 1)",
    ]


_PERTURB = "Run it with MALLOC_PERTURB_=165 in the environment, so that a read of uninitialised memory shows."


# Conditions that a script can show, by framework.
_TOLD: dict[str, set[str]] = {
    "torch": {"layout", "x", "dy", "params", "threads", "isa"},
    "jax": set(),
    "tensorflow": {"isa", "onednn"},
}


def _refuse(entry: Entry, quantity: Quantity | None) -> None:
    """Raise ReproError if a script cannot show the finding under its conditions."""
    name, case = entry.signature.adapter, entry.case
    mode, told = mode_of(name, case.how), {"mode", "bare"} | _TOLD[name]  # a script observes nothing in between
    if (name, case.block.kind, case.how.norm) in OTHERS:
        told.add("norm")
    beyond = sorted(set(case.how.unusual()) - told)
    if getattr(case.block, "core", "fused") != "fused":
        beyond.append("a core of its own")
    if (name, mode) not in BACKWARDS:
        beyond.insert(0, f"mode {mode}")
    if beyond:
        takes = ", ".join(beyond)
        raise ReproError(f"{entry.id}: it takes {takes}, which a script does not show; `diffgrad replay` runs it")
    if quantity is not None and quantity.defect not in ("", "shape"):
        raise ReproError(f"{entry.id}: {quantity.sentence()}; that is no number to compare, `diffgrad replay` shows it")


def _data(name: str, case: Case, tensors: dict[str, Array]) -> list[str]:
    """Lines that make the case's tensors."""
    lines = []
    given = [t.name for t in case.block.tensors()]
    for tensor in given:
        v = tensors[tensor]
        dtype = _DTYPES[name].format(case.dtype)
        made = f"{_literal(v)}, dtype={dtype}"
        lines.append(f"{tensor} = {_TENSORS[name].format(made)}")
        if name != "torch":
            continue
        if case.how.layout == "channels_last" and v.ndim == 4:
            lines.append(_VIEWS["channels_last"].format(n=tensor))
        memory = case.how.memory(tensor, case.block.input().name)
        if memory and v.ndim and tensor in (*case.block.differentiated(), "dy"):
            lines.append(_VIEWS[memory].format(n=tensor))
    return lines


_LONG = 256
"""Numbers that a script may spell out."""


def _literal(v: Array) -> str:
    """An array as the shortest expression: a constant, or its numbers."""
    values = np.array([shortest(x) for x in v.reshape(-1)]).reshape(v.shape)
    flat = values.reshape(-1)
    if not flat.size:
        return f"np.zeros({values.shape})"
    if values.ndim and flat.size > 4 and (flat == flat[0]).all():
        return f"np.full({values.shape}, {float(flat[0])!r})"
    some = np.flatnonzero((flat != 0.0) | np.signbit(flat))
    if flat.size > 16 and len(some) <= flat.size // 4 and len(some) <= _LONG and flat[some].all():
        places, numbers = some.tolist(), flat[some].tolist()
        return f"np.bincount({places}, {numbers}, {flat.size}).reshape{values.shape}"
    if flat.size > _LONG:
        raise ReproError(f"a tensor of {flat.size} different numbers is no screenful; `diffgrad replay` runs the case")
    return repr(values.tolist())


def _number(x: float) -> str:
    return repr(x) if np.isfinite(x) else f"np.{x}"


def _marked(name: str, spec: Spec, array: str, where: Any) -> Array:
    """A 1 at a place of an array, ``out`` or a tensor's gradient, turned into the framework's own layout."""
    marker = np.zeros(spec.output_shape() if array == "out" else {t.name: t.shape for t in spec.tensors()}[array])
    marker[where] = 1.0
    return marker if name == "torch" else to_nhwc(spec, {array: marker})[array]
