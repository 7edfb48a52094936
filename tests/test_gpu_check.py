"""The prepared device check: its CPU path for real, and what it says where there is no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from diffgrad.gpu import BLOCKS, CONDITIONS, FAMILIES, cases

SCRIPT = Path(__file__).parent / "gpu_check.sh"


def run(device: str, report: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, report, device], env=env, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_the_cpu_path_checks_every_block_under_every_condition_that_a_cpu_has(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    ran = run("cpu", report)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    adapters = msgspec.json.decode(report.read_bytes())["adapters"]
    assert set(adapters) == {"torch", "jax"}
    wanted = {dtype for dtype, how in CONDITIONS if not {"tf32", "benchmark"} & set(how)}
    for row in adapters.values():
        assert {name.split(" ")[0] for name in row["conditions"]} == wanted
        for counts in row["conditions"].values():
            assert counts["cases"] == len(BLOCKS) * len(FAMILIES)
            assert counts["faults"] == []
            assert sum(counts["verdicts"].values()) == counts["cases"]


def test_a_device_that_is_not_there_is_said_and_is_no_success(tmp_path: Path) -> None:
    ran = run("cuda", tmp_path / "gpu.json")
    assert ran.returncode == 2
    assert "torch: not run: torch sees no CUDA device" in ran.stdout
    assert "jax: not run: " in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_device_s_cases_have_its_settings() -> None:
    hows = [case.how for case in cases("cuda")]
    assert {h.device for h in hows} == {"cuda"}
    assert any(h.tf32 and h.benchmark and h.layout == "channels_last" for h in hows)
    assert not any(case.how.tf32 or case.how.benchmark for case in cases("cpu"))
