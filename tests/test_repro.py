"""Scripts of findings, run where there is no diffgrad: they show the element that is wrong, and say so when it is not.

A healthy op runs in the framework; what it recorded at one element is then expected (the script exits 0), or what lies
three bars beside it (exit 1). Every other element differs, so a script that looks at another one is seen.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from diffgrad import cli
from diffgrad.adapters.registry import FRAMEWORKS
from diffgrad.case import Case, Dtype
from diffgrad.check import Quantity
from diffgrad.corpus import Corpus, Entry
from diffgrad.how import How
from diffgrad.judge import judge, signature_of
from diffgrad.repro import BACKWARDS, FORWARDS, ReproError, script
from diffgrad.specs import (
    ActivationOpSpec,
    AttentionCoreOpSpec,
    BatchNormOpSpec,
    ConvOpSpec,
    DenseOpSpec,
    LayerNormOpSpec,
    LayerScaleOpSpec,
    LossSpec,
    PoolOpSpec,
    SoftmaxOpSpec,
    Spec,
)
from diffgrad.values import Values
from diffgrad.worker import Workers
from tests.helpers import ROOT, SMALLEST, entry

CONV = ConvOpSpec(n=2, h=5, w=4, ic=2, oc=3, k=3, padding="explicit", pads=(2, -1, 0, 1), bias=True)
DEPTHWISE = ConvOpSpec(n=2, h=5, w=4, ic=3, oc=3, k=3, stride=2, padding="xla_same", depthwise=True)
PADDED = ConvOpSpec(n=1, h=5, w=4, ic=2, oc=2, k=3, stride=2, padding="explicit", pads=(2, 1, 0, 1))
LN = LayerNormOpSpec(n=2, t=2, d=4)
BN = BatchNormOpSpec(n=2, c=3, h=2, w=3)
DENSE = DenseOpSpec(n=3, i=2, o=4)
SDPA = AttentionCoreOpSpec(n=2, t=3, heads=2, head_dim=2)


class Asked(NamedTuple):
    """A case, and the quantity of which an element is to be shown: its kind and its array."""

    spec: Spec
    what: str
    name: str
    dtype: Dtype = "float32"
    how: How = How()

    def __str__(self) -> str:
        parts = (self.spec.kind, self.what, self.name, self.dtype, self.how.mode, self.how.label())
        return "-".join(part for part in parts if part)


def activation(spec: Spec, **more: Any) -> Asked:
    return Asked(spec, "activation", "out", **more)


def cotangent(spec: Spec, **more: Any) -> Asked:
    return Asked(spec, "cotangent", "CotIn", **more)


def gradient(spec: Spec, name: str, **more: Any) -> Asked:
    return Asked(spec, "gradient", name, **more)


EVERYWHERE = [
    activation(CONV),
    cotangent(CONV),
    gradient(CONV, "W"),
    gradient(CONV, "b", dtype="float64"),
    cotangent(DEPTHWISE),
    gradient(DEPTHWISE, "W"),
    activation(PADDED),
    gradient(replace(CONV, padding="symmetric", pads=(0,) * 4, depthwise=True, oc=2), "W"),
    gradient(replace(CONV, padding="valid", pads=(0,) * 4, bias=False), "W"),
    cotangent(replace(CONV, padding="xla_same", pads=(0,) * 4)),
    activation(BN),
    cotangent(BN),
    gradient(BN, "g"),
    cotangent(LN),
    gradient(LN, "g", dtype="bfloat16"),
    gradient(replace(LN, norm="scalar"), "bt"),
    *(cotangent(ActivationOpSpec(n=2, size=3, act=act)) for act in ("relu", "relu6", "swish", "gelu_tanh", "gelu_erf")),
    activation(ActivationOpSpec(n=2, size=3, act="gelu_erf"), dtype="float16"),
    gradient(DENSE, "W"),
    activation(DENSE, dtype="bfloat16"),
    cotangent(PoolOpSpec(n=2, c=3, h=2, w=2)),
    gradient(LayerScaleOpSpec(n=2, c=3, h=2, w=3, scale="channel"), "g"),
    cotangent(LayerScaleOpSpec(n=2, c=3, h=2, w=3, scale="element")),
    gradient(LayerScaleOpSpec(n=2, c=3, h=2, w=3, scale="element"), "g"),
    cotangent(SoftmaxOpSpec(n=2, size=3)),
    cotangent(SoftmaxOpSpec(n=2, size=3, mask=("101", "110"))),
    activation(SDPA),
    gradient(replace(SDPA, mask=("110", "111", "001")), "v"),
    gradient(SDPA, "k"),
    activation(LossSpec(n=3, classes=4)),
    cotangent(LossSpec(n=3, classes=4)),
]


def modes(name: str) -> list[Asked]:
    """An op in every mode that has a script."""
    return [gradient(DENSE, "W", how=How(mode=mode)) for framework, mode in BACKWARDS if framework == name]  # type: ignore[arg-type]


def _memories() -> Iterator[Asked]:
    for memory in ("step", "transposed", "offset", "expanded"):
        how = How(x=memory, dy=memory, params=memory)
        yield gradient(LN, "g", how=how)
        yield cotangent(BN, how=how)
    yield gradient(CONV, "W", how=How(layout="channels_last", x="step"))
    yield gradient(CONV, "W", how=How(threads=2, bare=True))


ASKED: dict[str, list[Asked]] = {
    "torch": [*EVERYWHERE, *modes("torch"), *_memories()],
    "jax": [
        *EVERYWHERE,
        *modes("jax"),
        cotangent(LN, how=How(norm="fused")),
        cotangent(BN, how=How(norm="fused")),
    ],
    "tensorflow": [*EVERYWHERE, *modes("tensorflow"), cotangent(BN, how=How(norm="fused"))],
}


def found(asked: Asked, name: str, workers: Workers) -> tuple[Entry, Quantity]:
    """What was recorded at one element, as if it were a finding whose expected value is right."""
    case = Case(block=asked.spec, dtype=asked.dtype, values=Values(seed=3), how=asked.how).check()  # type: ignore[arg-type]
    (answer,) = workers.run([case], [name], quick=False)
    report, trace = judge(answer).report, answer.outcome.trace
    assert report is not None, answer.outcome
    assert trace is not None
    q = next(q for q in report.quantities if (q.what, q.name) == (asked.what, asked.name))
    assert not q.faulty, q.sentence()
    arrays = {"activation": trace.acts.get("out"), "cotangent": trace.cots.get("x")}
    array = arrays.get(asked.what, trace.grads.get(asked.name))
    assert array is not None
    index = _of_its_own(np.asarray(array, np.float64), q.bar)
    value = float(array[index])
    return (
        Entry(case=case, signature=signature_of(name, case, q), status="open", sentence="", versions={}),
        replace(q, verdict="wrong", index=index, got=value, expected=value),
    )


def _of_its_own(v: np.ndarray[Any, Any], bar: float) -> tuple[int, ...]:
    """The last element that no other comes near to, or else the last one."""
    flat = v.reshape(-1)
    for i in reversed(range(flat.size)):
        if (np.abs(np.delete(flat, i) - flat[i]) > 4 * bar).all():
            return tuple(int(k) for k in np.unravel_index(i, v.shape))
    return tuple(size - 1 for size in v.shape)


DRIVER = """
import contextlib, io, json, runpy, sys
sys.modules["diffgrad"] = None  # to import it raises
out = []
for path in sys.argv[1:]:
    text = io.StringIO()
    code = None
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as e:
            code = e.code
    out.append([code, text.getvalue()])
print(json.dumps(out))
"""


class Ran(NamedTuple):
    """A script's text, its exit code and what it printed, for the right value and for a wrong one."""

    text: str
    right: tuple[int, str]
    wrong: tuple[int, str]
    value: float


@cache
def ran(name: str, folder: Path) -> dict[str, Ran]:
    """All scripts of a framework in one process without diffgrad, since to start one takes seconds."""
    texts, values = {}, {}
    with Workers([name]) as workers:
        for asked in ASKED[name]:
            e, right = found(asked, name, workers)
            wrong = replace(right, expected=right.expected + 3 * right.bar + (right.bar == 0.0))
            texts[str(asked)] = script(e, right), script(e, wrong)
            values[str(asked)] = right.got
    paths = []
    for i, both in enumerate(texts.values()):
        for j, text in enumerate(both):
            paths.append(folder / f"{name}_{i}_{j}.py")
            paths[-1].write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", "-c", DRIVER, *map(str, paths)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = [tuple(r) for r in msgspec.json.decode(done.stdout.splitlines()[-1])]
    pairs = zip(results[::2], results[1::2], strict=True)
    return {key: Ran(texts[key][0], *pair, values[key]) for key, pair in zip(texts, pairs, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.parametrize(("name", "asked"), [(n, str(a)) for n in FRAMEWORKS for a in ASKED[n]])
def test_a_script_shows_the_element_and_tells_right_from_wrong(name: str, asked: str, folder: Path) -> None:
    one = ran(name, folder)[asked]
    assert (one.right[0], one.wrong[0]) == (0, 1), one
    said = re.search(r": got (\S+), expected (\S+), bar (\S+)$", one.wrong[1].strip())
    assert said is not None
    got, expected, bar = map(float, said.groups())
    assert abs(got - one.value) <= bar < abs(got - expected)
    assert re.match(rf"{name} \S+ numpy \S+\n", one.wrong[1])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_scripts_are_a_screenful_and_need_only_the_framework_and_numpy(name: str, folder: Path) -> None:
    usual = {"sys", "numpy", name} | {"torch": {"torch"}, "jax": {"jax"}, "tensorflow": {"keras"}}[name]
    for key, one in ran(name, folder).items():
        assert len(one.text.splitlines()) <= 32, key
        imported: set[str] = set()
        for node in ast.walk(ast.parse(one.text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
        assert imported <= usual, key


def test_every_op_of_every_framework_has_been_tried() -> None:
    for name in FRAMEWORKS:
        assert {asked.spec.kind for asked in ASKED[name]} == set(FORWARDS[name])


# A finding as it is filed.


def nan(name: str = "torch") -> tuple[Entry, Quantity]:
    case = Case(
        block=ActivationOpSpec(n=1, size=1, act="gelu_tanh"),
        values=Values(family="blank"),
        overrides={"x": {"0": -4e19}},
    )
    fault = Quantity(
        "gelutanh@out", "cotangent", "CotIn", "nonfinite", index=(0, 0), got=float("nan"), error=float("nan")
    )
    return entry(case, adapter=name, link="gelutanh", verdict="nonfinite", condition="cotangent"), fault


def run_alone(text: str, folder: Path) -> tuple[int, list[str], str]:
    path = folder / "finding.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, "-I", str(path)], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_script_of_a_nan_on_its_own(name: str, tmp_path: Path) -> None:
    """In an interpreter that has not even the way to diffgrad; its 16 bits and its digits are the shortest ones."""
    text = script(*nan(name))
    assert "-4e+19" in text
    code, said, err = run_alone(text, tmp_path)
    assert code == 1, err
    assert said[1] == "the gradient of x at [0, 0]: got nan, expected 0.0, bar 0.0"
    assert len(text.splitlines()) <= 30


def test_numbers_that_are_none_are_still_python() -> None:
    e, q = nan()
    text = script(e, replace(q, expected=float("inf"), bar=float("inf")))
    assert "expected, bar = np.inf, np.inf" in text
    ast.parse(text)


def test_memory_that_was_never_written_shows_where_the_script_says_so() -> None:
    e, q = nan()
    assert "MALLOC_PERTURB_" not in script(e, q)
    assert "MALLOC_PERTURB_=165" in script(e, replace(q, verdict="wrong", got=1.5))


def test_many_zeros_are_not_spelled_out() -> None:
    spec = DenseOpSpec(n=4000, i=1, o=1)
    case = Case(block=spec, values=Values(family="blank"), overrides={"dy": {"7": 1.0, "3999": -2.5}})
    q = Quantity("dense@out", "gradient", "b", "wrong", index=(0,), expected=-1.5, bar=0.25)
    text = script(entry(case, adapter="torch", link="dense"), q)
    assert "np.bincount([7, 3999], [1.0, -2.5], 4000).reshape(4000, 1)" in text
    assert "np.full((4000, 1), 0.0)" in text


@pytest.mark.parametrize("right", [True, False])
def test_a_wrong_shape_is_compared_as_such(right: bool, tmp_path: Path) -> None:
    """Of an array that holds nothing, too."""
    q = Quantity("conv2d@out", "activation", "out", "wrong", defect="shape", note="shape (0, 1), expected ...")
    text = script(entry(Case(block=replace(CONV, n=0)), adapter="torch", link="conv2d"), q)
    if not right:
        text = text.replace("expected = tuple(y.shape), (0", "expected = tuple(y.shape), (1")
    code, said, err = run_alone(text, tmp_path)
    assert code == (0 if right else 1), err
    shape = CONV.output_shape()[1:]
    assert said[1] == f"the shape of the output: got {(0, *shape)}, expected {(0 if right else 1, *shape)}"


def ended(case: Case) -> Entry:
    return replace(
        entry(case, adapter="torch", link="run", verdict="error", condition="RuntimeError x"),
        sentence='error: RuntimeError: "x" in C:\\temp',
    )


def test_a_run_that_should_end_in_gradients_and_does_not(tmp_path: Path) -> None:
    text = script(ended(Case(block=LN)), None)
    code, said, _ = run_alone(text, tmp_path)
    assert (code, said[1:]) == (0, ["it ran to its end"])
    code, _, err = run_alone(text.replace("F.layer_norm", "F.no_such_norm"), tmp_path)
    assert code == 1
    assert "no_such_norm" in err


@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        ("torch", How(isa="AVX2"), "os.environ |= {'ONEDNN_MAX_CPU_ISA': 'AVX2'}"),
        ("tensorflow", How(onednn=False), "os.environ |= {'TF_ENABLE_ONEDNN_OPTS': '0'}"),
        ("torch", How(), ""),
    ],
)
def test_what_a_process_must_be_told_before_the_framework_is_imported(name: str, how: How, says: str) -> None:
    e = replace(ended(Case(block=CONV, how=how)), signature=nan(name)[0].signature)
    text = script(e, None)
    assert says in text.partition(f"\nimport {name}")[0]
    assert says or "os.environ" not in text


# What has no script.


def refused(case: Case, name: str, **fields: Any) -> str:
    q = Quantity("x@out", "activation", "out", "wrong", index=(0,) * len(case.block.output_shape()), **fields)
    with pytest.raises(ReproError) as e:
        script(entry(case, adapter=name), q)
    return str(e.value).partition(": ")[2]


def test_what_has_no_script_is_told_in_a_sentence() -> None:
    assert refused(SMALLEST, "torch").startswith("uib has no standalone form in torch, only single ops have; ")
    takes = "it takes {}, which a script does not show; `diffgrad replay` runs it"
    assert refused(Case(block=LN, how=How(mode="jvp")), "jax") == takes.format("mode jvp")
    assert refused(Case(block=LN, how=How(norm="fast")), "jax") == takes.format("norm")
    assert refused(Case(block=LN, how=How(x="step", deterministic=True)), "torch") == takes.format("deterministic")
    assert refused(Case(block=LN, how=How(x="step")), "jax") == takes.format("x")
    assert refused(Case(block=LN, how=How(layout="channels_first")), "tensorflow") == takes.format("layout")
    assert refused(Case(block=replace(SDPA, core="fused_math")), "torch") == takes.format("a core of its own")
    assert "that is no number to compare" in refused(Case(block=LN), "torch", defect="missing", note="not delivered")


def test_too_many_numbers_are_no_screenful() -> None:
    with pytest.raises(ReproError, match=r"a tensor of 400 different numbers is no screenful"):
        script(
            entry(Case(block=DenseOpSpec(n=400, i=1, o=1)), adapter="torch"),
            Quantity("dense@out", "gradient", "b", "wrong", index=(0,)),
        )


# The command.


def repro(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["repro", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_the_script_or_writes_it(tmp_path: Path) -> None:
    corpus, out = Corpus(tmp_path / "corpus"), tmp_path / "finding.py"
    corpus.prepare()
    e, _ = nan()
    corpus.save(e)
    code, text, err = repro(e.case.id, "--corpus", str(corpus.folder))
    assert (code, err) == (0, "")
    ast.parse(text)
    assert "got nan, expected 0" in text
    assert repro(e.id, "--corpus", str(corpus.folder), "--out", str(out)) == (0, "", "")
    assert out.read_text() == text


def test_a_finding_that_no_longer_shows_or_has_no_script_is_a_sentence_and_exit_2(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    gone = replace(nan()[0], case=Case(block=LN))
    run = entry(Case(block=LN), adapter="numpy", link="run", verdict="crash", condition="op_ln")
    for e, says in (
        (gone, "the fault does not show here now (ok); there is nothing to reproduce"),
        (run, "the fault does not show here now (ok); there is nothing to reproduce"),
    ):
        corpus.save(e)
        assert repro(e.id, "--corpus", str(tmp_path)) == (2, "", f"diffgrad: {e.id}: {says}\n")
    assert repro("none", "--corpus", str(tmp_path))[0] == 2


def test_saved_findings_have_scripts_or_a_sentence() -> None:
    """Without a run: with the conditions and numbers that they have."""
    for e in Corpus(ROOT / "corpus").entries():
        if e.status != "open" or e.signature.link == "run" or 0 in e.case.block.output_shape():
            continue
        q = Quantity(f"{e.signature.link}@out", "activation", "out", "wrong")
        q = replace(q, index=(0,) * len(e.case.block.output_shape()))
        try:
            text = script(e, q)
        except ReproError as refusal:
            text = f"{str(refusal)!r}\n"
            said = str(refusal)
        else:
            said = "diffgrad replay"
        ast.parse(text)
        assert "diffgrad replay" in said
