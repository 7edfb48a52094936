"""Options, Hypothesis profiles, and the framework workers that tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from diffgrad.worker import Workers

# Hypothesis loads a `ci` profile of its own where CI is set; ours is loaded by name, so that it holds everywhere.
# Another one: --hypothesis-profile diffgrad-dev.
settings.register_profile("diffgrad-ci", derandomize=True, database=None, deadline=None)
settings.register_profile("diffgrad-dev", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("diffgrad-ci")

GetWorkers = Callable[[str], Workers]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("diffgrad")
    group.addoption(
        "--fuzz-seconds", type=float, metavar="S", help="fuzz each framework for S seconds, not a few batches"
    )
    group.addoption("--fuzz-seed", type=int, default=0, metavar="K", help="seed of tests/fuzz (default 0)")
    group.addoption("--benchmarks", action="store_true", help="run tests/benchmarks too, which take minutes")
    group.addoption("--benchmark-json", type=Path, metavar="FILE", help="write the benchmarks' figures as JSON")


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--benchmarks"):
        return None
    return "diffgrad: tests/benchmarks is deselected, for it measures and asserts nothing; ask with --benchmarks"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--benchmarks"):
        return
    benchmarks = [item for item in items if item.path.parent.name == "benchmarks"]
    if benchmarks:
        config.hook.pytest_deselected(items=benchmarks)
        items[:] = [item for item in items if item not in benchmarks]


@pytest.fixture(scope="session")
def workers() -> Iterator[GetWorkers]:
    """workers(name): a framework's worker process, started once in this pytest process. A missing one fails."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Workers] = {}

        def get(name: str) -> Workers:
            if name not in started:
                started[name] = stack.enter_context(Workers([name]))
            return started[name]

        yield get
