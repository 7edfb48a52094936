"""The releases of a package that pip can install, and an environment for each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

_PIP_TIMEOUT = 3600.0
# The last of several tries.
_UNREACHABLE = re.compile(r"Retry\(total=0.*connection broken by '?(\w+)")


class BisectError(RuntimeError):
    """Releases that cannot be had or compared; the message says which, and why."""


@dataclass(frozen=True)
class Pip:
    """This program's pip, at work for another interpreter, which need not have one."""

    python: str

    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run pip.

        Raises:
            BisectError: there is no pip, or an index cannot be reached.
        """
        command = [sys.executable, "-m", "pip", "--python", self.python, "--no-input", "--retries", "2", *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise BisectError(f"pip {args[0]} did not end within {_PIP_TIMEOUT:.0f} s") from None
        if "No module named pip" in done.stderr:
            raise BisectError(f"{sys.executable} has no pip: python -m ensurepip")
        broken = _UNREACHABLE.search(done.stderr)
        if done.returncode and broken is not None:
            raise BisectError(f"pip cannot reach a package index ({broken[1]}); nothing was installed")
        return done

    def releases(self, package: str, pre: bool) -> list[Version]:
        """What pip can install without building it, the oldest first; one version of those that differ in a label.

        Raises:
            BisectError: pip finds none, or an index cannot be reached.
        """
        flags = ["--pre"] if pre else []
        done = self("index", "versions", "--only-binary", ":all:", *flags, package)
        listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
        broken = _UNREACHABLE.search(done.stderr)
        if broken is not None:
            raise BisectError(f"pip cannot reach a package index ({broken[1]}), so its list would not be complete")
        if listed is None:
            raise BisectError(f"pip finds no release of {package} ({_last_error(done.stderr)})")
        return sorted({Version(Version(v).public) for v in listed[1].split(", ")})


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip() and "ResolutionImpossible" not in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return one_line((errors or lines or ["pip does not say why"])[-1])


def between(releases: Sequence[Version], package: str, low: str, high: str) -> list[str]:
    """The releases from ``low`` to ``high``, both of which must be among them.

    Raises:
        BisectError: one is no version or not among them, or they are in the wrong order.
    """
    ends = [_version(option, text) for option, text in (("--from", low), ("--to", high))]
    if ends[0] >= ends[1]:
        raise BisectError(f"--from {low}: must be older than --to {high}")
    for option, end in zip(("--from", "--to"), ends, strict=True):
        if end not in releases:
            hint = "; --pre lists prereleases too" if end.is_prerelease else ""
            raise BisectError(f"{option} {end}: pip finds no such {package} for this Python, {_extent(releases)}{hint}")
    return [str(v) for v in releases if ends[0] <= v <= ends[1]]


def _version(option: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise BisectError(f"{option} {text}: not a version") from None


def _extent(releases: Sequence[Version]) -> str:
    return f"but {len(releases)} others, {releases[0]} to {releases[-1]}"


@dataclass(frozen=True)
class Environments:
    """Environments of one interpreter, one a release, kept in a folder."""

    pip: Pip
    tag: str
    """The interpreter's version, such as py3.11."""
    folder: Path

    def get(self, package: str, version: str, beside: Sequence[str] = ()) -> tuple[Path | None, str]:
        """The interpreter of a release's environment, made if need be; or None, and why it cannot be had.

        Raises:
            BisectError: the folder cannot be written, or an index cannot be reached.
        """
        home = self.folder / f"{package}-{version}-{self.tag}"
        if not home.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                reason = self._make(home, [f"{package}=={version}", *beside])
            except OSError as e:
                raise BisectError(f"--cache {self.folder}: cannot be written ({e.strerror})") from None
            if reason:
                return None, reason
        return home / "bin" / "python", ""

    def _make(self, home: Path, requirements: Sequence[str]) -> str:
        """Install under another name and rename, so that what has the right name is whole."""
        temporary = Path(tempfile.mkdtemp(dir=self.folder, prefix=".new-"))
        try:
            made = _run(self.pip.python, "-m", "venv", "--without-pip", str(temporary))
            if made.returncode:
                return f"no environment ({one_line(made.stderr or made.stdout)})"
            inner = Pip(str(temporary / "bin" / "python"))
            done = inner("install", "--quiet", "--only-binary", ":all:", *requirements)
            if done.returncode:
                return f"cannot be installed ({_last_error(done.stderr)})"
            try:
                temporary.rename(home)
            except OSError:
                if not home.exists():  # else another process was faster
                    raise
            return ""
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def environments(python: str, folder: Path) -> Environments:
    """Environments of an interpreter.

    Raises:
        BisectError: there is no such interpreter, or it does not work.
    """
    found = shutil.which(python)
    if found is None:
        raise BisectError(f"--python {python}: there is no such interpreter")
    asked = _run(found, "-c", "import sys, venv; print('py%d.%d' % sys.version_info[:2])")
    if asked.returncode:
        raise BisectError(f"--python {python}: cannot make environments ({one_line(asked.stderr)})")
    return Environments(Pip(found), asked.stdout.strip(), folder.expanduser().absolute())


def one_line(text: str) -> str:
    """Text on one line that is not too long."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:199] + "…"
