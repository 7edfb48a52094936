"""The ways in which torch takes a gradient: each runs a forward and returns what it saw."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint as recomputing

from diffgrad.adapters.base import Tap
from diffgrad.adapters.torch_tensors import Tensors

Forward = Callable[[Tensors, Tap], torch.Tensor]
"""forward(tensors, tap) -> output"""

Observed = Callable[[Tensors, Tensors, Tensors], tuple[torch.Tensor, Tensors]]
"""observed(leaves, taps, rest) -> output and activations; ``taps`` are zeros that are added at the sites."""


class Program(NamedTuple):
    """A block's forward and, where it is compiled, what it was compiled to."""

    forward: Forward
    compiled: Observed | None = None


class Job(NamedTuple):
    """What is to be differentiated.

    Attributes:
        program: the block.
        leaves: the tensors whose gradients are wanted.
        rest: its other tensors.
        dy: the output's cotangent.
        bare: expose nothing but the output and the leaves.
        tangents: the leaves' tangents, in forward mode.
    """

    program: Program
    leaves: Tensors
    rest: Tensors
    dy: torch.Tensor
    bare: bool = False
    tangents: Tensors = {}  # noqa: RUF012  (a NamedTuple's default, never written to)


class Seen(NamedTuple):
    """What came out: the output, activations, cotangents of sites and leaves by name, and tangents in forward mode."""

    out: torch.Tensor
    acts: Tensors
    cots: Tensors = {}  # noqa: RUF012
    tangents: Tensors = {}  # noqa: RUF012

    def ends(self) -> Tensors:
        """The output and every cotangent."""
        return {"out": self.out, **self.cots}


def observed(forward: Forward) -> Observed:
    """The forward as a function of its leaves and of zeros at its sites; without zeros, nothing is exposed."""

    def run(leaves: Tensors, taps: Tensors, rest: Tensors) -> tuple[torch.Tensor, Tensors]:
        acts: Tensors = {}

        def tap(site: str, v: torch.Tensor) -> torch.Tensor:
            if site not in taps:
                return v
            v = v + taps[site]
            acts[site] = v.detach()
            return v

        return forward({**leaves, **rest}, tap), acts

    return run


def compiled(forward: Forward) -> Program:
    """``observed`` through Dynamo, AOTAutograd and Inductor.

    Dynamo counts recompilations by code object, and every program's is the same but for what it closes over: each
    gets a copy of its own.
    """
    run = observed(forward)
    assert isinstance(run, types.FunctionType)
    own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    return Program(forward, torch.compile(own, fullgraph=True, dynamic=False))


def eager(job: Job) -> Seen:
    """Op by op; the sites are nodes of autograd's graph."""
    return _graph(job, job.program.forward)


def checkpoint(job: Job) -> Seen:
    """As eager, but the backward runs the forward again."""
    return _graph(job, lambda t, tap: recomputing(job.program.forward, t, tap, use_reentrant=False))


def compile_(job: Job) -> Seen:
    """One compiled program for the forward and one for the backward."""
    assert job.program.compiled is not None
    taps = {s: v.requires_grad_() for s, v in _zeros(job).items()}
    leaves = _fresh(job.leaves)
    out, acts = job.program.compiled(leaves, taps, job.rest)
    return Seen(out, acts, _pulled(out, {**taps, **leaves}, job.dy))


def func(job: Job) -> Seen:
    """torch.func.vjp."""
    run = observed(job.program.forward)
    traced: Any = torch.func.vjp(lambda p, z: run(p, z, job.rest), job.leaves, _zeros(job), has_aux=True)
    out, pull, acts = traced
    grads, cots = pull(job.dy)
    return Seen(out, acts, {**cots, **grads})


def jvp(job: Job) -> Seen:
    """torch.func.jvp: forward mode."""

    def run(leaves: Tensors) -> Tensors:
        acts: Tensors = {}

        def tap(site: str, v: torch.Tensor) -> torch.Tensor:
            acts[site] = v
            return v

        return {"out": job.program.forward({**leaves, **job.rest}, tap), **acts}

    traced: Any = torch.func.jvp(run, (job.leaves,), (job.tangents,))
    acts, tangents = traced
    return Seen(acts["out"], acts, tangents=tangents)


MODES: dict[str, Callable[[Job], Seen]] = {
    "eager": eager,
    "compile": compile_,
    "func": func,
    "checkpoint": checkpoint,
    "jvp": jvp,
}
"""Mode by name."""


def _graph(job: Job, run: Forward) -> Seen:
    sites: Tensors = {}

    def tap(site: str, v: torch.Tensor) -> torch.Tensor:
        if not job.bare:
            sites.setdefault(site, v)  # a second run of the forward is no news
        return v

    leaves = _fresh(job.leaves)
    out = run({**leaves, **job.rest}, tap)
    return Seen(out, sites.copy(), _pulled(out, {**sites, **leaves}, job.dy))


def _fresh(leaves: Tensors) -> Tensors:
    return {k: v.detach().requires_grad_() for k, v in leaves.items()}


def _pulled(out: torch.Tensor, wanted: Tensors, dy: torch.Tensor) -> Tensors:
    got = torch.autograd.grad(out, list(wanted.values()), dy, allow_unused=True)
    return {k: g for k, g in zip(wanted, got, strict=True) if g is not None}


def _zeros(job: Job) -> Tensors:
    """Zeros like the activation at every site."""
    taps: Tensors = {}

    def tap(site: str, v: torch.Tensor) -> torch.Tensor:
        taps[site] = torch.zeros_like(v)
        return v

    with torch.no_grad():
        job.program.forward({**job.leaves, **job.rest}, tap)
    return {} if job.bare else taps
