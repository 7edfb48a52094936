"""A fault planted in a framework goes from fuzz to a short script and a report, and nobody touches it on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from diffgrad.corpus import Corpus
from diffgrad.formulas import formula
from diffgrad.specs import ActivationOpSpec, FusedSpec
from tests.helpers import ROOT

# As soon as torch has its functions, SiLU's slope lacks a term. It is in every process that has this on its path.
PLANTED = """
import importlib.util, sys

def plant(functional):
    def silu(x, inplace=False):
        import torch

        class Planted(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * torch.sigmoid(x)

            @staticmethod
            def backward(ctx, dy):
                return dy * torch.sigmoid(ctx.saved_tensors[0])

        return Planted.apply(x)

    functional.silu = silu

class Late:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.nn.functional":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), plant(module))
        return spec

sys.meta_path.insert(0, Late())
"""


@pytest.mark.timeout(300)
def test_a_planted_fault_of_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    corpus, script = Corpus(tmp_path / "corpus"), tmp_path / "finding.py"
    planted = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env=planted, cwd=cwd, capture_output=True, text=True, check=False, timeout=250
        )

    def diffgrad(*command: str) -> subprocess.CompletedProcess[str]:
        return run("-m", "diffgrad.cli", *command, "--corpus", str(corpus.folder))

    where = ("--adapter", "torch", "--block", "fused", "--dtype", "float32", "--mode", "eager")
    fuzzed = diffgrad("fuzz", *where, "--seconds", "5", "--seed", "1")
    assert fuzzed.returncode == 1, fuzzed.stderr
    (found,) = corpus.entries()
    assert str(found.signature) == "torch/eager/float32/swish/wrong/cotangent"
    assert isinstance(found.case.block, ActivationOpSpec)
    assert found.case.tensors()["x"].size == 1
    assert found.original is not None
    assert isinstance(found.original.block, FusedSpec)

    written = diffgrad("repro", found.case.id, "--out", str(script))
    assert written.returncode == 0, written.stderr
    text = script.read_text()
    assert len(text.splitlines()) <= 30
    assert "diffgrad" not in text
    alone = tmp_path / "alone"
    alone.mkdir()
    assert run(str(script), cwd=alone).returncode == 1
    assert run("-I", str(script), cwd=alone).returncode == 0  # where the fault is not

    report = diffgrad("triage", found.case.id)
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith("# [PyTorch eager] wrong cotangent of swish in float32\n")
    assert text.strip() in report.stdout
    for part in (formula("swish"), "| numpy float32 | ok |", "| fused |", "### Versions"):
        assert part in report.stdout
    table = diffgrad("triage", "--json", str(tmp_path / "table.json"))
    assert table.returncode == 0, table.stderr
    assert found.id in str(msgspec.json.decode((tmp_path / "table.json").read_bytes()))
