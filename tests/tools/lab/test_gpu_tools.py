"""Measuring a GPU, over a driver whose kernels are emulated: every stage, one that hangs and one that crashes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.errors import OutriderError
from outrider.plans.formulas import formula
from outrider.plans.kernel_costs import launch_costs
from outrider.plugins.cuda import compile as compiling
from outrider.plugins.cuda.compile import CUBINS, compile_kernels
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS, quant_bytes
from outrider.plugins.cuda.resources import Resources
from outrider.runtime.files import locked
from outrider.tools.lab import kernel_costs
from outrider.tools.lab.gpu import measure, prepare
from outrider.tools.lab.gpu.models import model_of
from outrider.tools.lab.gpu.stages import Golden, compare, random_words
from outrider.tools.lab.synthetic_llama import LlamaShape
from tests.conftest import REPOSITORY
from tests.plugins import golden
from tests.plugins.emulator import Emulator

pytest.importorskip("cuda.core")

SHAPE = LlamaShape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=160)
SETTINGS = {"bytes": 1 << 12, "rows": [1, 9], "keys": 40, "repeats": 2}
CUBIN = b"\x7fELF, which the driver here does not read"
ABSENT = ("torch", "onnx", "onnx_ir", "onnxruntime", "yaml", "ml_dtypes", "pytest")
SABOTAGE = """
import os, subprocess, sys, time
if os.environ.get("SABOTAGE"):
    if "env" in sys.orig_argv:
        os.kill(os.getpid(), 11)
    if "smoke" in sys.orig_argv:
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, file=open(os.environ["SABOTAGE"], "w"), flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def recorder(engine_emulator: Emulator) -> golden.Recorder:
    recorder = golden.Recorder(engine_emulator)
    golden.record_tests(recorder)
    return recorder


@pytest.fixture(scope="module")
def prepared(toy_recipe: Path, recorder: golden.Recorder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tools.lab.gpu.prepare` leaves it, but small."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("engines", "cubins"):
        (folder / name).mkdir()
    (folder / "cubins" / "sm_90.engine.0.cubin").write_bytes(CUBIN)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    for kind in ("int4", "bfloat16"):
        text = model_of(SHAPE, kind).model_dump_json(exclude_defaults=True)
        (folder / "engines" / f"8b.{kind}.json").write_text(text)
    of_kernel = {case.kernel: case for case in recorder.cases}
    golden.write_golden(folder / "golden.xz", [*of_kernel.values(), *(case for case in recorder.cases if case.company)])
    plan = folder.with_name("plan")
    backends = "backends=[onnxruntime-cpu, {kind: cuda, compute_capabilities: [sm_90]}]"
    own = ["target.weights={type: int4}", "kv_cache=float16", "drafters=[{name: ngram, kind: ngram}]", backends]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiling, "_compile", lambda *_: CUBIN)
        patched.delenv(CUBINS)  # where others would find it
        build(load_recipe(toy_recipe, [*own, "capacity={context: 96, prefill_chunk: 16}"]), toy_recipe, plan)
    shutil.make_archive(str(folder / "plan"), "xztar", plan)
    on_cpu = Runtime.load(plan, backend="onnxruntime-cpu", threads=1)
    expected = prepare.decode_all(on_cpu, [[5, 6, 7, 5, 6, 7]], 5)
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


@pytest.fixture
def driver(fake_cuda: Path, engine_emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of processes that have the driver, and none of the build's packages."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for module in ABSENT:
        (absent / f"{module}.py").write_text("raise ImportError", encoding="utf-8")
    (absent / "sitecustomize.py").write_text(SABOTAGE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent), str(REPOSITORY)]))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda))
    monkeypatch.setenv("OUTRIDER_EMULATOR", str(engine_emulator.library))
    monkeypatch.setenv("OUTRIDER_CUDA_RECORD", str(tmp_path / "record"))


def run(prepared: Path, out: Path, *options: str) -> tuple[int, list[str], dict[str, list[dict[str, Any]]]]:
    command = [sys.executable, "-m", "outrider.tools.lab.gpu.measure", "--prepared", str(prepared), "--out", str(out)]
    ended = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=1500)
    assert ended.stderr == ""
    stages = {path.stem: measure.read_rows(path) for path in out.glob("*.jsonl")}
    return ended.returncode, ended.stdout.splitlines(), stages


def test_every_stage_is_measured_though_others_fail(
    prepared: Path, driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was complete is not run again, unless something of it has changed."""
    first, second = tmp_path / "first", prepared / "before"
    monkeypatch.setenv("SABOTAGE", str(tmp_path / "pid"))
    status, said, stages = run(prepared, first, "--stages", "env,smoke=4,steps=600,plan=600")
    log = (first / "log.txt").read_text()
    assert status == 1, log
    assert {name: rows[-1]["status"] for name, rows in stages.items()} == {
        "env": "crashed, status -11", "smoke": "killed after 4 s", "steps": "complete", "plan": "complete",
    }, log  # fmt: skip
    assert "Segmentation fault" in log
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    assert not child.exists() or "State:\tZ" in child.read_text(), "killed; where nobody waits for it, a zombie"
    models = [(f"8b.{kind}", rows) for kind in ("bfloat16", "int4") for rows in (1, 9)]
    steps = [row for row in stages["steps"] if row.get("what") == "step"]
    assert [(row["model"], row["rows"]) for row in steps] == models
    for step in steps:
        of_kernels = [row for row in stages["steps"] if row.get("what") == "kernel"]
        own = [row for row in of_kernels if (row["model"], row["rows"]) == (step["model"], step["rows"])]
        assert sum(row["launches"] for row in own) == step["launches"]
        assert {"q+k+v", "o", "gate+up", "down", "lm_head", "attention"} <= {row["part"] for row in own}
    drafters = [row for row in stages["plan"] if row.get("what") == "drafter"]
    assert [(row["graphs"], row["drafter"]) for row in drafters] == [
        (graphs, drafter) for graphs in (True, False) for drafter in ("none", "ngram")
    ]
    assert {(row["runs"], row["tokens_equal"], row["bits_equal"]) for row in drafters} == {(2, 2, 2)}
    assert all(0 < row["waiting"] < 1 and row["round_ms"] > 0 for row in drafters)

    monkeypatch.delenv("SABOTAGE")
    shutil.copytree(first, second)
    limits_of_all = ",".join(f"{name}=600" for name in measure.STAGES)
    status, said, stages = run(prepared, first, "--resume", str(second), "--stages", limits_of_all)
    assert status == 0, (first / "log.txt").read_text()
    assert [line for line in said if "before" in line] == ["steps: complete before", "plan: complete before"]
    assert all(row["passed"] for row in stages["smoke"][:-1])
    assert {row["what"] for row in stages["env"][:-1]} == {"versions", "copy", "node of a graph"}
    assert [line for line in said if re.fullmatch(r"empty graph, us [\d.]+: in every time of a graph below", line)]
    printed = (first / "report.md").read_text().splitlines()
    assert said[-len(printed) :] == printed
    assert len(printed) <= measure.MOST_LINES
    assert {path.name for path in first.iterdir()} == {f"{name}.jsonl" for name in stages} | {"report.md", "log.txt"}

    monkeypatch.setattr(measure, "device_name", lambda: stages["env"][-1]["card"])
    monkeypatch.setattr(measure, "run_stage", lambda *_: {"status": "run", "seconds": 0, "last": []})
    (prepared / "expected.json").write_text("{}")  # which the plan's stage alone reads
    measure.measure(prepared, tmp_path / "out", {"env": 1, "plan": 1}, first)
    status = {name: measure.read_rows(tmp_path / "out" / f"{name}.jsonl")[-1]["status"] for name in ("env", "plan")}
    assert status == {"env": "complete", "plan": "run"}


def test_what_is_not_prepared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--prepared", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "cubins has kernels of 0 sources, not of one" in " ".join(capsys.readouterr().err.split())
    assert measure.main(["--out", str(tmp_path), "--stages", "env,none"]) == 2
    assert "--stages is 'none'; choose from env, smoke" in capsys.readouterr().err


def test_a_part_is_made_again_when_its_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[str]()
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "tree")
    monkeypatch.setenv(CUBINS, "")  # which `prepare` sets
    (tmp_path / "tree").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "tree")], check=True)
    parts: dict[str, tuple[prepare.Make, tuple[str, ...]]] = {
        "one.json": (lambda path: [made.append(path.name), path.write_text("1")], ("a",)),
        "two": ("touch {part}/text", ("a", "b")),
    }
    for text, count in (("x", 1), ("x", 1), ("y", 2)):
        (tmp_path / "tree" / "a").write_text(text)
        prepare.prepare(tmp_path / "out", parts)
        assert len(made) == count
    assert (tmp_path / "out" / "two" / "text").exists()
    assert "two " in capsys.readouterr().out
    with locked(tmp_path / "out" / "lock"), pytest.raises(OutriderError, match="another process prepares"):
        prepare.prepare(tmp_path / "out", parts)
    for command, reason in (("no-such-python3 -m pip", "No such file"), ("false", "exit status 1")):
        with pytest.raises(OutriderError, match=rf"native cannot .*{reason}.*install {command.split()[0]} with"):
            prepare.prepare(tmp_path / "out", {"native": (command, ())})
    monkeypatch.setattr(prepare, "MOST_BYTES", 10)
    with pytest.raises(OutriderError, match=r"what is measured there has .* bytes, more than 10"):
        prepare.prepare(tmp_path / "out", parts)


def test_golden_launches_have_every_kernel(recorder: golden.Recorder) -> None:
    """Each compares with itself."""
    assert {case.kernel for case in recorder.cases} == ENGINE_KERNELS.keys()
    quant = [case.numbers for case in recorder.cases if case.kernel == "outrider_quant_product"]
    assert {1, 8, 32} <= {numbers[0] for numbers in quant if numbers[3] == 4}, "rows of 4 bits"
    assert {case.tolerance > 0 for case in recorder.cases if "half_product" not in case.kernel} == {False}
    for case in recorder.cases[::9]:
        assert compare(case, case.after) == {
            "kernel": case.kernel, "name": case.name, "passed": True, "differ": 0, "error": 0.0,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("tolerance", "expected", "found", "passed"),
    [
        (0.0, 1.0, 1.0 + 2**-20, False), (0.0, np.nan, -np.nan, True), (0.0, 0.0, -0.0, False),
        (1e-3, 1.0, 1.0001, True), (1e-3, 1.0, 1.1, False), (1e-3, np.inf, 1.0, False), (1e-3, 1.0, np.inf, False),
        (1e-3, np.inf, -np.inf, False), (1e-3, np.nan, 1.0, False),
    ],
)  # fmt: skip
def test_other_bits_are_found(tolerance: float, expected: float, found: float, passed: bool) -> None:
    """An infinite result allows no other, at any tolerance."""
    before, after, got = (np.array([[2.0, number]], np.float32) for number in (0.0, expected, found))
    case = Golden("one", "outrider_gated_unit", 1, 1, 0, [], [None, before], [None, after], tolerance, rounding=0.01)
    verdict = compare(case, [None, got])
    assert verdict["passed"] is passed
    assert verdict["differ"] == (not np.isnan(expected) or not np.isnan(found))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_step_moves_the_weights_that_it_has(kind: str) -> None:
    """All but the embedding once, and little else; constants are random words, or known."""
    shape = LlamaShape(layers=2, hidden=512, intermediate=1024, heads=8, kv_heads=2, vocabulary=8192)
    model = model_of(shape, kind)
    constants = model.engine.constants
    assert model.values.keys() == {name for name in constants if name.startswith("code.")}
    places = sorted((place.offset, place.size) for place in constants.values())
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))
    read = sum(place.size for name, place in constants.items() if "embedding" not in name and "tables" not in name)
    moved = sum(cost.moved for cost in launch_costs(model.engine, model.sizes(1, 1)))
    assert moved == pytest.approx(read, rel=0.05)
    assert model.sizes(3, 8)[names.LOGITS] == 3


def test_random_words_are_finite_numbers_of_every_type() -> None:
    words = random_words()[:1000]
    for numbers in (words.view(np.float32), (words & 0xFFFF0000).view(np.float32), words.view(np.float16)):
        assert np.abs(numbers).min() >= 2**-7
        assert np.abs(numbers).max() <= 2
        assert len(set(numbers)) > 300


def test_costs_of_kernels_are_of_the_steps_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_costs, "SHAPES", {"1b": SHAPE})
    monkeypatch.setattr(kernel_costs, "compile_kernels", lambda *_: CUBIN)
    monkeypatch.setattr(kernel_costs, "kernel_resources", lambda _: {"outrider_quant_product": Resources(64, 0, 16)})
    shared = []
    for tokens in ("1", "1,32"):
        given = ["--shapes", "1b", "--weights", "int4", "--tokens", tokens, "--architecture", "sm_90", "--json"]
        assert kernel_costs.main(given) == 0
        shared.append(json.loads(capsys.readouterr().out)["kernels"][0]["shared"])
    assert shared == [16 + max(formula(quant_bytes(bits, rows)).value({}) for bits in (4, 8)) for rows in (1, 32)]


def test_kernels_are_compiled_once_for_the_same_sources_options_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no compiler, whichever made them."""
    compiled = []
    monkeypatch.setattr(compiling, "_compile", lambda *given: compiled.append(given) or CUBIN)
    monkeypatch.setenv(CUBINS, str(tmp_path / "cubins"))
    (sources := tmp_path / "csrc" / "cuda").mkdir(parents=True)
    asked = [("one", "13.0", 1), ("one", "13.0", 1), ("two", "13.0", 2), ("two", "13.1", 3), ("two", "", 3)]
    for text, version, count in asked:
        (sources / "engine.cu").write_text(text)
        monkeypatch.setattr(compiling, "_nvrtc_version", lambda version=version: version)
        assert compile_kernels("sm_90", "engine.cu", sources.parent) == CUBIN
        assert len(compiled) == count
    monkeypatch.setitem(compiling._OPTIONS, "fma", True)
    compile_kernels("sm_90", "engine.cu", sources.parent)
    assert len(compiled) == 4
