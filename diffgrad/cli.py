"""The command line. Every command takes ``--json FILE``; exit 0 is clean, 1 is a finding, 2 is bad usage."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
import typer

from diffgrad import __version__, show
from diffgrad.adapters.registry import ADAPTERS, FRAMEWORKS, OFFERS
from diffgrad.bisect import BisectError
from diffgrad.campaign import Campaign, summary
from diffgrad.certify import certify as certify_all
from diffgrad.commands.bisect import bisect
from diffgrad.commands.files import probe, write_json
from diffgrad.commands.report import report
from diffgrad.commands.repro import repro
from diffgrad.commands.triage import triage
from diffgrad.corpus import Corpus, CorpusError
from diffgrad.errors import UsageError
from diffgrad.how import MODES, Device
from diffgrad.mutants import MUTANTS, false_alarms, hunt, median_cases
from diffgrad.replay import entries_at
from diffgrad.replay import replay as replay_entries
from diffgrad.repro import ReproError
from diffgrad.specs import BLOCKS, CaseError
from diffgrad.strategies.cases import DTYPES
from diffgrad.tie import NETS, Sizes, Tied, net_spec
from diffgrad.tie import tie as tie_net
from diffgrad.worker import InProcess, Runner, WorkerError, Workers

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Test the backward passes of neural networks: every cotangent and gradient of a block, in PyTorch, JAX and "
    "TensorFlow, against closed forms in float64 with derived error bars.",
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")]
CorpusFolder = Annotated[Path, typer.Option("--corpus", help="Folder of saved counterexamples.")]
Adapters = Annotated[list[str] | None, typer.Option("--adapter", help="Framework to run (repeatable).")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where frameworks run: cpu, cuda or auto.")]
InProcessFlag = Annotated[bool, typer.Option("--in-process", help="Run frameworks in this process (debugging).")]


def _one_sentence(command: Callable[P, R]) -> Callable[P, R]:
    """Expected troubles end in one sentence on stderr and exit code 2."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (CaseError, CorpusError, WorkerError, UsageError, BisectError, ReproError) as e:
            print(f"diffgrad: {e}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
@_one_sentence
def doctor(json: JsonFile = None) -> None:
    """Which frameworks can run here, in which version and mode, on which devices; and why not."""
    probe("--json", json)
    report: dict[str, Any] = {"diffgrad": __version__, "adapters": {}}
    for name in ADAPTERS:
        try:
            with Workers([name]) as workers:
                about = workers.about()[name]
            report["adapters"][name] = {"runs": True, **msgspec.to_builtins(about)}
        except WorkerError as e:
            report["adapters"][name] = {"runs": False, "why": str(e)}
    show.doctor(report)
    write_json(json, report)


@app.command()
@_one_sentence
def fuzz(
    seconds: Annotated[float, typer.Option(min=1, help="How long to look.")] = 60,
    seed: Annotated[int | None, typer.Option(help="Random seed; drawn, and shown, when not given.")] = None,
    block: Annotated[list[str] | None, typer.Option(help="Block to draw (repeatable); all by default.")] = None,
    adapter: Adapters = None,
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Only in this mode (repeatable): {', '.join(MODES)}; all by default.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Only in this dtype (repeatable): {', '.join(DTYPES)}; all by default.")
    ] = None,
    device: DeviceOption = "cpu",
    corpus: CorpusFolder = Path("corpus"),
    in_process: InProcessFlag = False,
    json: JsonFile = None,
) -> None:
    """Look for wrong gradients. Exit 0: none new; 1: new findings, saved; 2: bad usage or no framework."""
    blocks = _chosen("--block", block, tuple(BLOCKS))
    dtypes = _chosen("--dtype", dtype, DTYPES)
    names = _in_mode(_chosen("--adapter", adapter, tuple(ADAPTERS), FRAMEWORKS), mode)
    where, names = _placed(device, names)
    probe("--json", json)
    store = Corpus(corpus)
    store.prepare()
    key = secrets.randbelow(2**31) if seed is None else seed
    interrupted = False
    with _runner(names, in_process, advice=adapter is None, device=where) as runner:
        with show.fuzzing(seconds) as progress:
            campaign = Campaign(runner, store, blocks, dtypes, names, progress, mode, where)
            try:
                campaign.run(key, seconds=seconds)
            except KeyboardInterrupt:
                interrupted = True
        abouts = runner.about()
    result = {"seed": key, "device": where, **summary(campaign.tally, store)}
    show.fuzz(result, abouts, interrupted)
    write_json(json, result)
    if interrupted:
        raise typer.Exit(130)
    if result["new_findings"]:
        raise typer.Exit(1)


@app.command()
@_one_sentence
def replay(
    path: Annotated[Path, typer.Argument(help="A corpus folder, or one saved case.")] = Path("corpus"),
    record: Annotated[
        bool, typer.Option("--record", help="Add what open findings do in these versions to their histories.")
    ] = False,
    in_process: InProcessFlag = False,
    json: JsonFile = None,
) -> None:
    """Run saved cases again. Exit 0: all as their entries say; 1: something changed."""
    entries = entries_at(path)
    probe("--json", json)
    results = []
    if entries:
        with _runner(sorted({e.signature.adapter for e in entries}), in_process) as runner:
            results = list(replay_entries(entries, runner))
            versions = {name: about.versions[name] for name, about in runner.about().items()}
        if record:
            store = Corpus(path if path.is_dir() else path.parent)
            for entry, result in zip(entries, results, strict=True):
                if result.outcome:
                    store.remember(entry.id, {versions[entry.signature.adapter]: result.outcome})
    changed = [r for r in results if not r.as_expected]
    show.replay(results, path)
    report = {
        "cases": len(results),
        "as_expected": len(results) - len(changed),
        "changed": [msgspec.to_builtins(r) for r in changed],
    }
    write_json(json, report)
    if changed:
        raise typer.Exit(1)


@app.command()
@_one_sentence
def tie(
    net: Annotated[str, typer.Argument(help=f"The net: {', '.join(NETS)}.")],
    image: Annotated[int, typer.Option(help="Height and width of the image.")] = 64,
    batch: Annotated[int | None, typer.Option(help="Examples in the batch; 8 or 4 by default.")] = None,
    classes: Annotated[int, typer.Option(help="Classes of the classifier.")] = 1000,
    drop: Annotated[bool, typer.Option("--drop", help="With stochastic depth, two masks a block (vit_tiny).")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Products of bfloat16 operands (vit_tiny).")] = False,
    adapter: Adapters = None,
    seed: Annotated[int, typer.Option(help="Seed of the values.")] = 0,
    corpus: CorpusFolder = Path("corpus"),
    json: JsonFile = None,
) -> None:
    """Hold every parameter gradient and cotangent of a documented net, at its true widths, in every framework."""
    names = _chosen("--adapter", adapter, tuple(ADAPTERS), FRAMEWORKS)
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch}: must be at least 1")
    spec = net_spec(net, Sizes(image, batch or 0, classes, drop, bf16))
    probe("--json", json)
    nodes = len(spec.parameters())
    known = Corpus(corpus).known()
    results: dict[str, Tied] = {}
    with _runner(names, False, advice=adapter is None) as runner:
        for name, tied in tie_net(spec, runner, seed, known):
            results[name] = tied
            show.tied(net, nodes, name, tied)
    report = {"net": net, "nodes": nodes, "adapters": {name: msgspec.to_builtins(t) for name, t in results.items()}}
    write_json(json, report)
    if any(t.tied != nodes or t.wrong for t in results.values()):
        raise typer.Exit(1)


@app.command()
@_one_sentence
def certify(json: JsonFile = None) -> None:
    """Hold every formula against the complex-step derivative of its forward."""
    probe("--json", json)
    ops, blocks = certify_all()
    both = [*ops, *blocks]
    show.certify(both)
    report = {
        "ops": len(ops),
        "blocks": len(blocks),
        "checks": sum(c.checks for c in both),
        "max_residual": max(c.residual for c in both),
        "certificates": {c.subject: {"holds": c.holds, **msgspec.to_builtins(c)} for c in both},
    }
    write_json(json, report)
    if not all(c.holds for c in both):
        raise typer.Exit(1)


@app.command()
@_one_sentence
def mutants(
    seed: Annotated[int, typer.Option(help="Random seed of the cases.")] = 0,
    clean: Annotated[int, typer.Option(min=1, help="Cases for the unmutated adapter.")] = 400,
    json: JsonFile = None,
) -> None:
    """Plant every known trap and see that generated cases catch it and blame the right link."""
    probe("--json", json)
    kills = [hunt(m, seed) for m in MUTANTS]
    cases, alarms = false_alarms(tuple(BLOCKS), seed, clean)
    show.mutants(kills, cases, alarms)
    survivors = [k.mutant.name for k in kills if not k.killed]
    misblamed = [k.mutant.name for k in kills if k.killed and not k.blamed]
    report = {
        "mutants": len(kills),
        "killed": sum(k.killed for k in kills),
        "survivors": survivors,
        "misblamed": misblamed,
        "median_cases_to_kill": median_cases(kills),
        "clean_cases": cases,
        "false_alarms": len(alarms),
        "kills": {k.mutant.name: {"cases": k.cases, "fault": k.fault.sentence() if k.fault else ""} for k in kills},
    }
    write_json(json, report)
    if survivors or misblamed or alarms:
        raise typer.Exit(1)


for command in (triage, repro, bisect, report):
    app.command()(_one_sentence(command))


def _chosen(
    option: str, given: Sequence[str] | None, known: Sequence[str], default: Sequence[str] | None = None
) -> tuple[str, ...]:
    for value in given or ():
        if value not in known:
            raise UsageError(f"{option} {value}: unknown; it must be one of {', '.join(known)}")
    return tuple(dict.fromkeys(given)) if given else tuple(default or known)


def _runner(
    names: Sequence[str], in_process: bool, advice: bool = False, device: Device = "cpu"
) -> AbstractContextManager[Runner]:
    if in_process:
        return InProcess(names)
    return Workers(names, advice="or name the frameworks to run with --adapter" if advice else "", device=device)


def _in_mode(names: Sequence[str], modes: Sequence[str] | None) -> tuple[str, ...]:
    """The frameworks that have one of the modes asked for."""
    wanted = _chosen("--mode", modes, MODES)
    kept = tuple(n for n in names if set(OFFERS[n].modes) & set(wanted))
    if not kept:
        having = "; ".join(f"{n} has {', '.join(OFFERS[n].modes)}" for n in names)
        raise UsageError(f"--mode {', '.join(wanted)}: no framework that is asked for has it ({having})")
    return kept


def _placed(device: str, names: tuple[str, ...]) -> tuple[Device, tuple[str, ...]]:
    """The device to run on and the frameworks to run; ``auto`` is a CUDA device if some framework sees one."""
    _chosen("--device", [device], ("cpu", "cuda", "auto"))
    if device != "auto":
        return ("cuda" if device == "cuda" else "cpu"), names
    seeing = tuple(n for n in names if n != "numpy" and _sees_cuda(n))
    return ("cuda", seeing) if seeing else ("cpu", names)


def _sees_cuda(name: str) -> bool:
    try:
        with Workers([name], device="cuda"):
            return True
    except WorkerError:
        return False


def main() -> None:
    """Entry point of the ``diffgrad`` command."""
    app()


if __name__ == "__main__":
    main()
