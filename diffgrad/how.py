"""The conditions under which a case runs: everything but the block, its sizes, its dtype and its values.

Every field's default is the plain setting; a found case shrinks towards it, field by field.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from diffgrad.specs import CaseError

Mode = Literal["", "eager", "jit", "compile", "func", "checkpoint", "linearize", "function", "xla", "jvp"]
"""How a framework takes the gradient; empty for its own default. See ``adapters/registry.py`` for who has which.

``eager``: op by op. ``jit``, ``compile``, ``xla``: compiled by XLA, Inductor, XLA. ``function``: TensorFlow's graph.
``func``: ``torch.func.vjp``. ``checkpoint``: the forward is run again in the backward. ``linearize``: JAX's linearize,
transposed. ``jvp``: forward mode, of tangents that the case draws.
"""

Layout = Literal["", "channels_last", "channels_first"]
"""Memory order of maps; empty for the framework's own (torch NCHW, JAX and TensorFlow NHWC)."""

Memory = Literal["", "step", "transposed", "offset", "expanded"]
"""What a tensor is a view of; empty for an array of its own.

``step``: every second element of a buffer along the last axis. ``transposed``: a buffer with all axes reversed.
``offset``: a buffer that begins one element earlier. ``expanded``: stride 0 along axis 0, so all examples (or output
channels) are the same.
"""

Norm = Literal["", "composed", "fused", "layer", "fast"]
"""Realization of batch and layer norms; empty for the adapter's own."""

Conv = Literal["", "grouped", "unfold", "layer"]
"""Realization of convolutions; empty for the adapter's own."""

Device = Literal["cpu", "cuda"]


class How(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The conditions of a run.

    Attributes:
        mode: how the gradient is taken.
        bare: run once more with nothing but inputs and outputs exposed, so that fusion is not disturbed.
        layout: memory order of maps.
        x, dy, params: what the input, the upstream cotangent and the parameters are views of.
        norm, conv: the realization of norms and convolutions.
        device: where it runs.
        tf32: products may take TF32 operands (float32 on CUDA).
        benchmark: cuDNN may choose its kernels by trying them.
        deterministic: only deterministic kernels.
        threads: threads of a framework's own pools.
        isa: the instruction set that kernels may use at most; empty for all that the machine has.
        onednn: whether TensorFlow may use oneDNN kernels.
    """

    mode: Mode = ""
    bare: bool = False
    layout: Layout = ""
    x: Memory = ""
    dy: Memory = ""
    params: Memory = ""
    norm: Norm = ""
    conv: Conv = ""
    device: Device = "cpu"
    tf32: bool = False
    benchmark: bool = False
    deterministic: bool = False
    threads: Literal[1, 2] = 1
    isa: Literal["", "AVX2"] = ""
    onednn: bool = True

    def memory(self, name: str, input_name: str) -> Memory:
        """What tensor ``name`` is a view of."""
        return {input_name: self.x, "dy": self.dy}.get(name, self.params)

    def unusual(self) -> dict[str, Any]:
        """The fields that differ from the plain setting, by name."""
        return {f: getattr(self, f) for f in self.__struct_fields__ if getattr(self, f) != getattr(PLAIN, f)}

    def label(self) -> str:
        """What is unusual, but for the mode, in words: ``layout=channels_last,x=step``."""
        return ",".join(f"{f}={_word(v)}" for f, v in self.unusual().items() if f != "mode")

    def check(self) -> None:
        """Raise CaseError for conditions that exclude each other."""
        if self.mode == "jvp" and self.bare:
            raise CaseError("how.bare with how.mode jvp: forward mode has nothing to expose but its outputs")
        if self.device == "cpu" and (self.tf32 or self.benchmark):
            raise CaseError("how.tf32 and how.benchmark: they are settings of a CUDA device, and how.device is cpu")

    def flavour(self) -> tuple[tuple[str, str], ...]:
        """The environment that a worker process needs for these conditions, beyond the usual one."""
        env = []
        if self.device == "cuda":
            env.append(("JAX_PLATFORMS", "cuda"))
        if self.threads != 1:
            env += [(f"{lib}_NUM_THREADS", str(self.threads)) for lib in ("OMP", "MKL", "DIFFGRAD")]
        if self.isa:
            env.append(("ONEDNN_MAX_CPU_ISA", self.isa))
        if not self.onednn:
            env.append(("TF_ENABLE_ONEDNN_OPTS", "0"))
        return tuple(env)


PLAIN = How()


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MODES: tuple[str, ...] = tuple(m for m in get_args(Mode) if m)
"""Every mode by name."""
