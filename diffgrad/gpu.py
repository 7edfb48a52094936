"""The device check: every architecture's blocks under the conditions that only a CUDA device has, as one JSON.

``python -m diffgrad.gpu --json FILE`` is what ``tests/gpu_check.sh`` runs. Without a device the same cases run on the
CPU (``--device cpu``), less the settings that a CPU does not have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from diffgrad.adapters.registry import offers
from diffgrad.case import Case
from diffgrad.corpus import Corpus
from diffgrad.how import Device, How
from diffgrad.judge import Judgement, judge
from diffgrad.specs import AttentionSpec, ConvNeXtSpec, EncoderSpec, Spec, UibSpec, UibStridedSpec
from diffgrad.values import Values
from diffgrad.worker import WorkerError, Workers

BLOCKS: tuple[Spec, ...] = (
    UibSpec(n=4, h=14, w=14, c=24, expand=4, pre_k=3, post_k=5),
    UibStridedSpec(n=4, ic=16, oc=32, h=15, w=15, expand=4, pre_k=5, post_k=3),
    ConvNeXtSpec(n=2, h=14, w=14, c=32, expand=4, k=7),
    EncoderSpec(n=2, t=33, heads=3, head_dim=16, mlp=96),
    AttentionSpec(n=2, t=64, heads=4, head_dim=32, core="fused"),
)

CONDITIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    # dtype, conditions beside the device
    ("float32", {}),
    ("float64", {}),
    ("float32", {"tf32": True}),
    ("float32", {"benchmark": True}),
    ("float32", {"layout": "channels_last"}),
    ("float32", {"tf32": True, "layout": "channels_last", "benchmark": True}),
    ("float32", {"deterministic": True}),
    ("float32", {"bare": True}),
    ("float32", {"x": "step", "dy": "transposed"}),
    ("bfloat16", {}),
    ("bfloat16", {"layout": "channels_last"}),
    ("float16", {}),
)

FAMILIES = ("normal", "offset", "dyadic", "huge")


def cases(device: Device) -> Iterator[Case]:
    """Every block under every condition that the device has, with a few families of values."""
    for dtype, conditions in CONDITIONS:
        if device == "cpu" and {"tf32", "benchmark"} & set(conditions):
            continue
        how = How(device=device, **conditions)
        for block in BLOCKS:
            for seed, family in enumerate(FAMILIES):
                values = Values(family, seed, {"offset": 7, "huge": 6}.get(family, 0))
                yield Case(block=block, dtype=dtype, values=values, how=how).check()  # type: ignore[arg-type]


def check(device: Device, names: tuple[str, ...], seconds: float = float("inf")) -> dict[str, Any]:
    """Run and judge the cases in each framework, one framework at a time; stops drawing when the time is up."""
    started = time.monotonic()
    known = Corpus(Path("corpus")).known()
    report: dict[str, Any] = {"device": device, "adapters": {}}
    for place, name in enumerate(names, 1):
        until = started + seconds * place / len(names)
        try:
            with Workers([name], device=device) as workers:
                about = workers.about()[name]
                drawn = (c for c in cases(device) if offers(name, c.how) and time.monotonic() < until)
                rows: dict[str, dict[str, Any]] = {}
                for answer in workers.run(drawn):
                    _count(rows, answer.case, answer.outcome.cpu_s, judge(answer), known)
        except WorkerError as e:
            report["adapters"][name] = {"runs": False, "why": str(e)}
            continue
        report["adapters"][name] = {
            "runs": True,
            "versions": about.versions,
            "devices": list(about.devices),
            "conditions": rows,
        }
    report["wall_s"] = time.monotonic() - started
    return report


def _count(
    rows: dict[str, dict[str, Any]], case: Case, cpu_s: float, judgement: Judgement, known: Collection[str]
) -> None:
    row = rows.setdefault(
        f"{case.dtype} {case.how.label()}".strip(),
        {"cases": 0, "verdicts": {}, "worst_error_over_bar": 0.0, "framework_cpu_s": 0.0, "known": 0, "faults": []},
    )
    row["cases"] += 1
    row["framework_cpu_s"] += cpu_s
    row["verdicts"] = dict(Counter(row["verdicts"]) + Counter([judgement.verdict]))
    if judgement.report is not None and judgement.verdict == "ok":
        row["worst_error_over_bar"] = max(row["worst_error_over_bar"], judgement.report.worst_ratio)
    new = [f for f in judgement.faults if str(f.signature) not in known]
    row["known"] += len(judgement.faults) - len(new)
    row["faults"] += [f"{case.block.kind}: {f.signature}: {f.sentence}" for f in new]


def main(
    json: Annotated[Path, typer.Option("--json", help="Where the result goes.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    adapter: Annotated[list[str] | None, typer.Option(help="Frameworks; torch and jax by default.")] = None,
    seconds: Annotated[float, typer.Option(help="The most time to take.")] = 420,
) -> None:
    """Check the blocks on a device."""
    report = check("cuda" if device == "cuda" else "cpu", tuple(adapter or ("torch", "jax")), seconds)
    json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    for name, row in report["adapters"].items():
        if not row["runs"]:
            print(f"{name}: not run: {row['why']}")
            continue
        for condition, counts in row["conditions"].items():
            verdicts = ", ".join(f"{n} {v}" for v, n in counts["verdicts"].items())
            worst = counts["worst_error_over_bar"]
            print(f"{name:12}{condition:48}{counts['cases']:4} cases: {verdicts}; worst error/bar {worst:.3f}")
            for fault in counts["faults"]:
                print(f"    {fault}")
    ran = [row for row in report["adapters"].values() if row["runs"]]
    faulty = any(counts["faults"] for row in ran for counts in row["conditions"].values())
    raise typer.Exit(2 if len(ran) < len(report["adapters"]) else int(faulty))


if __name__ == "__main__":
    typer.run(main)
