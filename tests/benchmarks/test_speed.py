"""What a campaign costs, as ratios within one run. Nothing is asserted about time: machines differ, and are shared.

pytest tests/benchmarks --benchmarks [--benchmark-json FILE]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from diffgrad.adapters.registry import FRAMEWORKS
from diffgrad.campaign import Campaign, Tally
from diffgrad.corpus import Corpus
from diffgrad.worker import Workers
from tests.helpers import KINDS

BATCHES = 40


class Figures(msgspec.Struct, kw_only=True):
    """One campaign, run twice on the same cases.

    Attributes:
        cases: how many cases each of the two runs had.
        cold, warm: cases per second of wall time: with nothing compiled, and with every program compiled already.
        warm_over_cold: how many times faster the second run was.
        oracle_share: CPU of oracle and check over all CPU, warm.
        total_over_framework: all CPU over the CPU inside the frameworks' own calls, warm; 1 would be free checking.
        worst: worst error/bar per framework.
    """

    cases: int
    cold: float
    warm: float
    warm_over_cold: float
    oracle_share: float
    total_over_framework: float
    worst: dict[str, float]


def figures(cold: Tally, warm: Tally) -> Figures:
    return Figures(
        cases=cold.cases,
        cold=cold.cases / cold.wall_s,
        warm=warm.cases / warm.wall_s,
        warm_over_cold=cold.wall_s / warm.wall_s,
        oracle_share=warm.oracle_cpu_s / warm.total_cpu_s,
        total_over_framework=warm.total_cpu_s / sum(warm.framework_cpu_s.values()),
        worst=warm.worst,
    )


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config) -> Iterator[dict[str, Figures]]:
    """Figures by name; written as JSON at the end where that was asked for."""
    collected: dict[str, Figures] = {}
    yield collected
    file: Path | None = pytestconfig.getoption("--benchmark-json")
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(collected), indent=2) + b"\n")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("names", [*((name,) for name in FRAMEWORKS), FRAMEWORKS], ids="+".join)
def test_a_campaign_cold_and_warm(
    names: tuple[str, ...], tmp_path: Path, report: dict[str, Figures], capsys: pytest.CaptureFixture[str]
) -> None:
    known = Corpus(shutil.copytree(Path(__file__).parents[2] / "corpus", tmp_path / "corpus"))
    with Workers(names) as workers:
        cold, warm = (Campaign(workers, known, KINDS).run(key=1, examples=BATCHES) for _ in ("cold", "warm"))
    assert cold.new == warm.new == []  # or the two would not have run the same cases
    assert cold.cases == warm.cases > 0
    f = report["+".join(names)] = figures(cold, warm)
    with capsys.disabled():
        print(
            f"\n{'+'.join(names)}: {f.cases} cases, cold {f.cold:.1f}/s, warm {f.warm:.1f}/s "
            f"({f.warm_over_cold:.1f}x); oracle and check {100 * f.oracle_share:.0f}% of the CPU; "
            f"all CPU {f.total_over_framework:.2f}x the frameworks' own"
        )


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("net", "batch"), [("mobilenetv4_conv_m", 8), ("convnext_t", 4), ("vit_tiny", 4)])
def test_a_whole_net(net: str, batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Wall time and peak memory (all processes together) of ``diffgrad tie`` in the three frameworks."""
    started, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "diffgrad.cli", "tie", net, "--batch", str(batch)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            peak = max(peak, session_memory(process.pid))
            time.sleep(0.5)
    assert process.returncode == 0
    with capsys.disabled():
        print(f"\n{net}, batch {batch}: {time.monotonic() - started:.0f} s, {peak / 2**30:.1f} GiB")


def session_memory(session: int) -> int:
    """Resident bytes of every process in a session."""
    listed = subprocess.run(["ps", "-o", "rss=", "-s", str(session)], capture_output=True, text=True, check=False)
    return sum(int(line) for line in listed.stdout.split()) * 1024
