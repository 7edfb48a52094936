"""Who imports whom: the oracle no framework, the adapters no oracle; and that these tests can fail."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, python

FRAMEWORK_MODULES = ("torch", "jax", "tensorflow")

ORACLE_SIDE = ("oracle", "check", "chains", "ops", "bars", "certify", "specs", "strategies", "mutants")
COMMANDS = ("judge", "corpus", "replay", "worker", "campaign", "tie", "show", "cli")

PROBE = "\n".join(
    ["{0}", "import sys", f"print([name for name in {FRAMEWORK_MODULES!r} if name in sys.modules], end='')"]
)


def imported_by(code: str) -> str:
    """The frameworks that a fresh interpreter has imported after the code."""
    ran = python("-c", PROBE.format(code))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("modules", [ORACLE_SIDE, COMMANDS], ids=["oracle", "commands"])
def test_no_framework_is_imported_outside_its_adapter(modules: tuple[str, ...]) -> None:
    assert imported_by("; ".join(f"import diffgrad.{m}" for m in modules)) == "[]"


def test_the_probe_sees_a_framework_that_is_imported() -> None:
    assert imported_by("import diffgrad.oracle, jax") == "['jax']"


# What adapters import, read from their source.

FORBIDDEN = {f"diffgrad.{m}" for m in ("oracle", "chains", "ops", "bars", "check", "certify", "judge", "mutants")}


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(source: str) -> set[str]:
    return {name for name in imports(source) if any(name == f or name.startswith(f + ".") for f in FORBIDDEN)}


@pytest.mark.parametrize("path", sorted((ROOT / "adapters").glob("*.py")), ids=lambda p: p.name)
def test_an_adapter_sees_nothing_of_the_oracle(path: Path) -> None:
    assert forbidden(path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import diffgrad.oracle",
        "from diffgrad.ops.conv import Conv2d",
        "from diffgrad import bars",
        "def uib():\n    from diffgrad.chains import chain_of",
        "import numpy, diffgrad.check as c",
    ],
)
def test_reading_the_source_finds_what_is_forbidden(source: str) -> None:
    assert forbidden(source)


def test_only_its_own_adapter_imports_a_framework() -> None:
    for path in sorted(ROOT.glob("diffgrad/**/*.py")):
        found = {name.split(".")[0] for name in imports(path.read_text())} & set(FRAMEWORK_MODULES)
        assert found <= {path.stem}, path


# The bare names belong to other packages.


@pytest.mark.parametrize("name", ["adapters", "strategies"])
def test_a_bare_import_names_the_right_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=f"^{re.escape(f'import diffgrad.{name}, not {name}')}$"):
        importlib.import_module(name)
    assert name not in sys.modules
    assert Path(importlib.import_module(f"diffgrad.{name}").__file__ or "").samefile(ROOT / name / "__init__.py")
