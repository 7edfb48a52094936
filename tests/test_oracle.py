"""The walk: every site and node once, fan-ins summed, bars carried where a compiler may recompute."""

from __future__ import annotations

import numpy as np
import pytest

from diffgrad.bars import PRECISIONS
from diffgrad.chains import Chain, Link, chain_of
from diffgrad.ops import Add, BatchNorm, Conv2d, Copy, Dense, GeluTanh, LayerNorm, Op, Relu, Relu6
from diffgrad.oracle import Expected, Key, Walk, end_to_end
from diffgrad.specs import EPS
from diffgrad.trace import Trace
from diffgrad.values import Bits
from tests.helpers import KINDS, UIB, altered, ordinary, run_numpy

P32, P64 = PRECISIONS["float32"], PRECISIONS["float64"]


def as_trace(e: Expected, dtype: str) -> Trace:
    """What a perfect run would have recorded."""
    return Trace(*({k: b.val.astype(dtype) for k, b in part.items()} for part in (e.acts, e.cots, e.grads)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_site_and_node_gets_a_value_of_its_shape_and_a_bar(kind: str) -> None:
    case = ordinary(kind, "float64")
    chain, tensors = chain_of(case.block), case.tensors()
    e = Walk(chain, tensors, P64).run()
    assert set(e.acts) == {link.writes for link in chain.links}
    assert set(e.cots) == set(chain.cotangents()) - {chain.output}
    assert set(e.grads) == set(chain.nodes)
    assert e.acts[chain.output].val.shape == case.block.output_shape()
    for node, b in e.grads.items():
        assert b.val.shape == tensors[node].shape
    for site, b in e.cots.items():
        assert b.val.shape == (tensors[site] if site == chain.input else e.acts[site].val).shape
    for b in (*e.acts.values(), *e.cots.values(), *e.grads.values()):
        assert b.err.shape == b.val.shape
        assert {b.val.dtype.name, b.err.dtype.name} == {"float64"}
        assert chain.deep or np.isfinite(b.err).all()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_given_away_as_the_walk_goes_in_blame_order(kind: str) -> None:
    case = ordinary(kind, "float64")
    chain = chain_of(case.block)
    walk = Walk(chain, case.tensors(), P64)
    given: dict[Key, bytes] = {}
    kept: dict[Key, bytes] = {}
    walk.each(lambda key, b: given.update({key: b.val.tobytes()}))
    walk.run().each(chain, lambda key, b: kept.update({key: b.val.tobytes()}))
    assert list(given.items()) == list(kept.items())


@pytest.mark.parametrize("kind", KINDS)
def test_link_by_link_on_a_perfect_run_is_the_end_to_end_walk_with_tighter_bars(kind: str) -> None:
    case = ordinary(kind, "float64")
    chain, tensors = chain_of(case.block), case.tensors()
    whole = Walk(chain, tensors, P64).run()
    linked = Walk(chain, tensors, P64, as_trace(whole, "float64")).run()
    for part in ("acts", "cots", "grads"):
        for name, b in getattr(linked, part).items():
            end_to_end = getattr(whole, part)[name]
            # A recorded array may lie otherwise in memory, and be summed in another order then.
            assert (np.abs(b.val - end_to_end.val) <= end_to_end.err).all()
            assert (b.err <= end_to_end.err * (1.0 + P64.u)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_float64_run_is_within_the_bars_carried_through_the_whole_chain(kind: str) -> None:
    case = ordinary(kind, "float64")
    trace = run_numpy(case)
    e = end_to_end(chain_of(case.block), case.tensors(), P64)
    for got, expected in ((trace.acts, e.acts), (trace.cots, e.cots), (trace.grads, e.grads)):
        for name, b in expected.items():
            assert (np.abs(got[name] - b.val) <= b.err).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_run_carries_bars_that_an_eager_one_does_not(kind: str) -> None:
    case = ordinary(kind)
    walks = [Walk(chain_of(case.block), case.tensors(), P32, run_numpy(case), compiled) for compiled in (False, True)]
    eager, compiled = (w.run() for w in walks)
    wider = 0
    for part in ("acts", "cots", "grads"):
        for name, b in getattr(eager, part).items():
            c = getattr(compiled, part)[name]
            assert (c.val == b.val).all()
            assert (c.err >= b.err).all()
            wider += bool((c.err > b.err).any())
    assert wider or len(chain_of(case.block).links) == 1  # one link has no producer to recompute


def test_what_a_convolution_stores_is_read_back_and_not_recomputed() -> None:
    e = [Walk(chain_of(UIB.block), UIB.tensors(), P32, run_numpy(UIB), compiled).run() for compiled in (False, True)]
    # BN reads the conv's stored result; relu may recompute BN.
    assert (e[0].acts["en"].err <= e[1].acts["en"].err).all()
    assert (e[0].acts["er"].err < e[1].acts["er"].err).any()


def test_the_cotangent_at_a_fork_is_the_sum_over_its_readers() -> None:
    fork = Chain((Link(Copy(), ("x",), "a", "A"), Link(Add(), ("a", "x"), "out", "dyOut")), "x", "In")
    dy = np.array([[1.0, 0.1]])
    e = Walk(fork, {"x": dy, "dy": dy}, P64).run()
    assert (e.cots["x"].val == 2 * dy).all()
    assert (e.cots["a"].val == dy).all()


def residual_norm() -> Chain:
    """x + layernorm(x)"""
    return Chain(
        (
            Link(Copy(), ("x",), "c", "C"),
            Link(LayerNorm(kind="token"), ("c",), "n", "N", ("g", "b")),
            Link(Add(), ("n", "x"), "out", "dyOut"),
        ),
        "x",
        "In",
    )


def test_a_norm_hands_its_cotangent_to_a_fork_in_parts_unless_it_is_observed() -> None:
    """Each part is rounded where a large cotangent of the skip swallows it."""
    chain, bits = residual_norm(), Bits(3, "fork")
    x, g, b = (bits.normal(shape).astype(np.float32) for shape in ((6, 5), (5,), (5,)))
    dy = (1e4 * bits.normal((6, 5))).astype(np.float32)
    x *= 1e4
    centred = x - x.mean(1, keepdims=True)
    s = 1 / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(EPS))
    d = g * dy * s
    along = centred * s**2 * (d * centred).mean(1, keepdims=True)
    in_parts = dy.copy()
    for part in (d, -d.mean(1, keepdims=True), -along):
        in_parts += part
    tensors = {"x": x, "g": g, "b": b, "dy": dy}
    e = end_to_end(chain, tensors, P32)
    at_once = Walk(chain, tensors, P32, as_trace(e, "float32")).run()
    error = np.abs(in_parts - e.cots["x"].val)
    assert (error <= e.cots["x"].err).all()
    assert (error > at_once.cots["x"].err).any()
    assert (e.cots["x"].err < 8 * P32.u * np.abs(dy)).all()


def test_the_walk_is_the_chain_rule_by_hand() -> None:
    """relu(conv1x1(x, W)): dW = sum of x*mask*dy, dx = W*mask*dy."""
    chain = Chain((Link(Conv2d(), ("x",), "c", "C", ("W",)), Link(Relu(), ("c",), "out", "dyOut")), "x", "In")
    x, dy = (Bits(1, name).integers(-4, 4, (2, 1, 3, 3)) for name in ("x", "dy"))
    w = np.full((1, 1, 1, 1), -2.0)
    e = Walk(chain, {"x": x, "W": w, "dy": dy}, P32).run()
    mask = x < 0
    assert (e.acts["out"].val == -2 * x * mask).all()
    assert (e.cots["x"].val == -2 * dy * mask).all()
    assert e.grads["W"].val.item() == (x * dy * mask).sum()
    assert not any(b.err.any() for part in (e.acts, e.cots, e.grads) for b in part.values())


@pytest.mark.parametrize("array", [None, np.zeros((1, 1))], ids=["missing", "of another shape"])
def test_downstream_of_a_site_that_was_not_recorded_nothing_is_said(array: np.ndarray | None) -> None:
    trace = altered(run_numpy(UIB), "activation", "ec", array)
    e = Walk(chain_of(UIB.block), UIB.tensors(), P32, trace).run()
    assert np.isfinite(e.acts["ec"].err).all()
    assert np.isinf(e.acts["en"].err).all()
    assert np.isfinite(e.acts["pc"].err).all()  # reads its own recorded input


def test_replaced_ops_are_used_where_they_are_asked_for() -> None:
    walks = [Walk(chain_of(UIB.block), UIB.tensors(), P32, ops=ops) for ops in ({}, {"en": BatchNorm(eps=0.5)})]
    plain, replaced = (w.run() for w in walks)
    assert (replaced.acts["en"].val != plain.acts["en"].val).all()
    assert (replaced.acts["qn"].val == plain.acts["qn"].val).all()


def test_noise_moves_every_link_within_its_own_bar_and_no_further() -> None:
    chain, tensors = chain_of(UIB.block), UIB.tensors()
    still = Walk(chain, tensors, P32, noise=np.zeros).run()
    moved = Walk(chain, tensors, P32, noise=np.ones).run()
    whole = Walk(chain, tensors, P32).run()
    assert (still.acts["out"].val == whole.acts["out"].val).all()
    assert (still.acts["out"].err <= whole.acts["out"].err).all()
    assert (still.acts["out"].err < whole.acts["out"].err).any()
    assert (np.abs(moved.acts["out"].val - whole.acts["out"].val) <= whole.acts["out"].err).all()
    assert (moved.acts["qc"].val == whole.acts["qc"].val).all()  # it reads exact inputs
    assert (moved.acts["qn"].val != whole.acts["qn"].val).any()


# What a net's end-to-end bars promise behind a mask.


def masked(op: Op, kernel: tuple[float, float], shift: float = 0.0) -> Expected:
    """A net of dense, mask, dense, whose only pre-activation is the kernel's product with (0.1, 0.3), and the shift."""
    links = (
        Link(Dense(), ("x",), "c", "C", ("W", "b")),
        Link(op, ("c",), "r", "R"),
        Link(Dense(), ("r",), "out", "dyOut", ("V", "a")),
    )
    tensors = {"x": np.array([[0.1, 0.3]]), "W": np.array(kernel)[:, None], "b": np.array([shift])}
    tensors |= {"V": np.array([[0.7]]), "a": np.array([0.2]), "dy": np.array([[1.1]])}
    return end_to_end(Chain(links, "x", "In", deep=True), tensors, P64)


@pytest.mark.parametrize(
    ("op", "kernel", "shift", "certain"),
    [
        (Relu(), (3.0, 1.0), 0.0, True),
        (Relu(), (-3.0, -1.0), 0.0, True),
        (Relu(), (3.0, -1.0), 0.0, False),
        (Relu(), (0.0, 0.0), 0.0, True),  # exactly at the kink, where nothing rounds
        (Relu6(), (3.0, -1.0), 6.0, False),
        (Relu6(), (3.0, -1.0), 3.0, True),
        (Relu(), (3.0, -1.0), 6.0, True),
        (GeluTanh(), (3.0, -1.0), 0.0, True),
    ],
    ids=str,
)
def test_behind_a_mask_that_rounding_may_turn_a_net_promises_nothing(
    op: Op, kernel: tuple[float, float], shift: float, certain: bool
) -> None:
    e = masked(op, kernel, shift)
    for b in (*e.acts.values(), e.cots["r"], e.grads["V"], e.grads["a"]):
        assert np.isfinite(b.err).all()
    for b in (e.cots["c"], e.cots["x"], e.grads["W"], e.grads["b"]):
        assert (np.isfinite(b.err) if certain else np.isinf(b.err)).all()
