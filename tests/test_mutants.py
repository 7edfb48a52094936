"""Planted faults: every one is caught soon and blamed on its own link, and nothing healthy is."""

from __future__ import annotations

from functools import cache

import pytest

from diffgrad.adapters.base import missing_blocks
from diffgrad.adapters.numpy import NumpyAdapter
from diffgrad.chains import chain_of
from diffgrad.check import Quantity
from diffgrad.mutants import MUTANTS, Kill, Mutant, false_alarms, first_fault, hunt, median_cases
from diffgrad.strategies.ops import OPS
from tests.helpers import KINDS, ordinary

hunted = cache(hunt)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_killed_and_rightly_blamed(mutant: Mutant) -> None:
    kill = hunted(mutant)
    assert kill.fault is not None, f"survived: {mutant.trap}"
    assert kill.blamed, kill.fault.sentence()


def test_half_of_the_planted_faults_are_caught_by_the_fifth_case() -> None:
    assert median_cases([hunted(m) for m in MUTANTS]) <= 5


def test_there_is_no_false_alarm_on_clean_cases() -> None:
    count, alarms = false_alarms(KINDS, key=0, count=200)
    assert (count, alarms) == (200, [])


def test_there_is_no_false_alarm_on_clean_single_ops() -> None:
    count, alarms = false_alarms(tuple(OPS), key=0, count=400)
    assert (count, alarms) == (400, [])


def test_every_single_op_has_a_planted_fault_of_its_own() -> None:
    alone = {mutant.blocks[0] for mutant in MUTANTS if len(mutant.blocks) == 1}
    assert set(OPS) <= alone


def test_a_mutant_has_a_name_of_its_own_and_every_block() -> None:
    assert len({m.name for m in MUTANTS}) == len({m.trap for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert missing_blocks(mutant.adapter) == []
        assert mutant.blame
        assert set(mutant.blocks) <= set(KINDS)


# The table's own machinery must be able to say no.

HEALTHY = Mutant("healthy", "nothing at all", NumpyAdapter, ("conv2d",))


def test_what_has_no_fault_survives() -> None:
    kill = hunt(HEALTHY, most=20)
    assert (kill.killed, kill.blamed, kill.cases, kill.fault) == (False, False, 0, None)
    assert first_fault(NumpyAdapter(), ordinary(KINDS[0])) is None


@pytest.mark.parametrize(
    ("blame", "right"),
    [
        ("batchnorm", True),
        ("batchnorm gradient", True),
        ("batchnorm@pn", True),
        ("batchnorm@pn gradient", True),
        ("batchnorm activation", False),
        ("batchnorm@qn gradient", False),
        ("conv2d gradient", False),
        ("batch", False),
    ],
)
def test_blame_is_by_op_by_site_and_by_what(blame: str, right: bool) -> None:
    fault = Quantity("batchnorm@pn", "gradient", "pg", "wrong")
    assert Kill(HEALTHY._replace(blame=(blame,)), 1, fault).blamed is right


def test_survivors_do_not_flatter_the_median() -> None:
    fault = Quantity("batchnorm@pn", "gradient", "pg", "wrong")
    assert median_cases([Kill(HEALTHY, n, fault) for n in (1, 4, 9)] + [Kill(HEALTHY, 0, None)]) == 4
    assert median_cases([]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_healthy_adapter_taps_every_site_of_the_chain(kind: str) -> None:
    case = ordinary(kind)
    trace, _ = NumpyAdapter().trace(case, case.tensors())
    assert set(trace.acts) == {link.writes for link in chain_of(case.block).links}
