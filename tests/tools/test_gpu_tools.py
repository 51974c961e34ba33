"""Measuring a GPU, over a driver whose kernels are emulated: every stage, one that hangs and one that crashes."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.build import build
from compiler.recipe import load_recipe
from plans import names
from plans.errors import OutriderError
from plans.kernel_costs import launch_costs
from plugins.cuda import compile as compiling
from plugins.cuda.compile import CUBINS, compile_kernels
from plugins.cuda.engine_kernels import ENGINE_KERNELS
from runtime import Runtime
from tests.conftest import REPOSITORY
from tests.plugins import golden
from tests.plugins.emulator import Emulator
from tools.gpu import measure
from tools.gpu.bench import Settings
from tools.gpu.golden import compare, compare_company, read_golden, write_golden
from tools.gpu.models import Shape, model_of
from tools.gpu.prepare import decode_all
from tools.gpu.stages import STAGES
from tools.gpu.step_model import made_up
from tools.gpu.table import MOST_LINES, table
from tools.gpu.variants import write_variant

pytest.importorskip("cuda.core")

SHAPE = Shape(hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocab=160)
SETTINGS = Settings(
    copy_bytes=1 << 12, read_bytes=1 << 14, flush_bytes=1 << 10, empty=3, rows=(1, 9), keys=40, step_repeats=2,
    kernel_repeats=2, new_tokens=8,
)  # fmt: skip
FILES = {
    "report.json", "report.md", "kernels.csv", "ncu.csv", "sanitizer.txt", "log.txt", "faults.txt", "sessions.json",
}  # fmt: skip
NCU = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","a product","DRAM Throughput","%","81.2"
"0","a product","Elapsed Cycles","cycle","1,234"
"""
CUBIN = b"\x7fELF, which the driver here does not read"


@pytest.fixture(scope="module")
def prepared(toy_recipe: Path, engine_emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tools.gpu.prepare` leaves it, but small."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("engines", "variants"):
        (folder / name).mkdir()
    for name in ("engine", "probe"):
        (folder / f"{name}.sm_90.cubin").write_bytes(CUBIN)
    (folder / "variants" / "same.cubin.xz").write_bytes(lzma.compress(CUBIN))
    SETTINGS.write(folder / "settings.json")
    for kind in ("int4", "bfloat16"):
        text = model_of(SHAPE, kind).model_dump_json(exclude_defaults=True)
        (folder / "engines" / f"8b.{kind}.json").write_text(text)
    recorder = golden.Recorder(engine_emulator)
    for record in (golden.record_company, golden.record_evaluate, golden.record_ops):
        record(recorder)
    write_golden(folder / "golden.npz", recorder.cases)
    plan = folder.with_name("plan")
    backends = "backends=[onnxruntime-cpu, {kind: cuda, compute_capabilities: [sm_90]}]"
    own = ["target.weights={type: int4}", "kv_cache=float16", "drafters=[{name: ngram, kind: ngram}]", backends]
    build(load_recipe(toy_recipe, [*own, "capacity={context: 96, prefill_chunk: 16}"]), toy_recipe, plan)
    with tarfile.open(folder / "plan.tar.xz", "w:xz") as file:
        file.add(plan, "plan")
    on_cpu = Runtime.load(plan, backend="onnxruntime-cpu", threads=1)
    (folder / "expected.json").write_text(json.dumps(decode_all(on_cpu, [[(37 * i) % 299 + 1 for i in range(20)]], 12)))
    return folder


@pytest.fixture
def driver(fake_cuda: Path, engine_emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of processes that have the driver, and none of the build's packages; the record of the driver."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for module in ("torch", "onnx", "onnx_ir", "onnxruntime", "yaml"):
        (absent / f"{module}.py").write_text("raise ImportError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent), str(REPOSITORY)]))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda))
    monkeypatch.setenv("OUTRIDER_EMULATOR", str(engine_emulator.library))
    monkeypatch.setenv("OUTRIDER_CUDA_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a shell script that is found as a tool of NVIDIA's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)

    return write


def run(prepared: Path, out: Path, *options: str) -> tuple[dict[str, Any], list[str]]:
    command = [sys.executable, "-m", "tools.gpu.measure", "--prepared", str(prepared), "--out", str(out), *options]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads((out / "report.json").read_text()), ended.stdout.splitlines()


def test_every_stage_is_measured(
    prepared: Path, driver: Path, tool: Callable[[str, str], None], tmp_path: Path
) -> None:
    tool("ncu", f'shift 10; printf %s \'{NCU}\' > "$1"; shift; exec "$@"')
    tool("compute-sanitizer", 'shift 2; "$@"; echo "ERROR SUMMARY: 0 errors"')
    report, said = run(prepared, tmp_path / "out", "--stages", ",".join(STAGES))
    stages = report["stages"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(STAGES, "complete"), log
    assert {path.name for path in (tmp_path / "out").iterdir()} <= FILES
    printed = (tmp_path / "out" / "report.md").read_text().splitlines()
    assert said[-len(printed) :] == printed
    assert len(printed) <= MOST_LINES
    assert all(row["passed"] for row in stages["smoke"]["rows"])
    assert {row["what"] for row in stages["env"]["rows"]} >= {"copy", "read", "node of a graph"}
    assert [(row["model"], row["rows"]) for row in stages["steps"]["rows"]] == [
        (f"8b.{kind}", rows) for kind in ("bfloat16", "int4") for rows in SETTINGS.rows
    ]
    for step in stages["steps"]["rows"]:
        own = [row for row in stages["kernels"]["rows"] if (row["model"], row["rows"]) == (step["model"], step["rows"])]
        assert sum(row["launches"] for row in own) == step["launches"]
    drafters = [row for row in stages["plan"]["rows"] if row["what"] == "drafter"]
    assert [(row["graphs"], row["drafter"]) for row in drafters] == [
        (graphs, drafter) for graphs in (True, False) for drafter in ("none", "ngram")
    ]
    assert {(row["runs"], row["tokens_equal"], row["bits_equal"]) for row in drafters} == {(2, 2, 2)}
    bits = next(row for row in stages["variants"]["rows"] if row["what"] == "bits")
    assert bits["equal"] == bits["cases"] > 0
    assert stages["ncu"]["rows"][1:] == [
        {"model": "8b.int4", "rows": 1, "part": "gate+up", "what": "kernel", "kernel": "a product"}
        | {"DRAM Throughput": "81.2 %"}
    ]
    assert [row["text"] for row in stages["sanitizer"]["rows"]] == ["ended; ERROR SUMMARY: 0 errors"] * 2


def test_stages_that_hang_and_crash_leave_the_others_alone(
    prepared: Path, driver: Path, tool: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a report that is resumed has what was complete."""
    tool("ncu", f"echo $$ > {tmp_path}/ncu.pid; exec sleep 600")
    tool("compute-sanitizer", "kill -SEGV $PPID")
    program = (
        "import sys; from dataclasses import replace; from tools.gpu import measure; "
        "measure.STAGES['ncu'] = replace(measure.STAGES['ncu'], seconds=6.0); sys.exit(measure.main(sys.argv[1:]))"
    )
    out = tmp_path / "out"
    options = ["--prepared", str(prepared), "--out", str(out), "--stages", "env,ncu,sanitizer,smoke"]
    done = subprocess.run([sys.executable, "-c", program, *options], cwd=REPOSITORY, timeout=120, check=False)
    assert done.returncode == 1
    stages = json.loads((out / "report.json").read_text())["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "env": "complete", "ncu": "killed after 6 s", "sanitizer": "crashed, SIGSEGV", "smoke": "complete",
    }  # fmt: skip
    assert "sanitizer: crashed, SIGSEGV" in (out / "faults.txt").read_text()
    status = Path(f"/proc/{(tmp_path / 'ncu.pid').read_text().strip()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "killed; where nobody waits for it, a zombie"

    tool("compute-sanitizer", "exit 3")
    again, said = run(prepared, tmp_path / "again", "--stages", "env,sanitizer", "--resume", str(out / "report.json"))
    assert "env: complete before" in said
    assert again["stages"]["env"] == stages["env"]
    assert again["stages"]["sanitizer"]["rows"][0]["text"].startswith("failed with status 3")
    (other := tmp_path / "other.json").write_text(json.dumps({**again, "cubin": "another"}))
    _, said = run(prepared, tmp_path / "anew", "--stages", "env", "--resume", str(other))
    assert "env: complete before" not in said


def test_what_is_prepared_is_refused_where_it_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--prepared", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "was not prepared; run python -m tools.gpu.prepare first" in capsys.readouterr().err
    assert measure.main(["--out", str(tmp_path), "--stages", "env,none"]) == 2
    assert "--stages: there is no none; choose of env, smoke" in capsys.readouterr().err


def test_other_bits_are_told_apart(prepared: Path) -> None:
    case = next(case for case in read_golden(prepared / "golden.npz") if case.company)
    right = case.after[case.rowwise]
    assert right is not None
    for change, passed in ((0.1 * case.tolerance, True), (10 * case.tolerance, False)):
        found = [*case.after]
        found[case.rowwise] = right + np.float32(change)
        verdict = compare(case, found)
        assert (verdict.passed, verdict.differ > 0, verdict.error > 0) == (passed, True, True)
        apart = replace(case, name="apart")
        assert [v.passed for v in compare_company([case, apart], [case.after, found])] == [False]


def test_golden_launches_have_every_kernel(engine_emulator: Emulator) -> None:
    """Each is the same when it is run again, in whatever order its blocks are."""
    recorder = golden.Recorder(engine_emulator)
    golden.record_tests(recorder)
    golden.record_evaluate(recorder)
    cases = list(golden.chosen(recorder.cases))
    assert {case.kernel for case in cases} == ENGINE_KERNELS.keys()
    assert {case.tolerance > 0 for case in cases if "half_product" not in case.kernel} == {False}


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_step_moves_the_weights_that_it_has(kind: str) -> None:
    """All but the embedding once, and little else; every constant is made up or known."""
    model = model_of(Shape(hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=2, vocab=8192), kind)
    constants = model.engine.constants
    assert made_up(model.engine).keys() | model.values.keys() == constants.keys()
    places = sorted((place.offset, place.size) for place in constants.values())
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))
    assert sum(places[-1]) <= model.weights_size
    read = sum(place.size for name, place in constants.items() if "embedding" not in name and "tables" not in name)
    moved = sum(cost.moved for cost in launch_costs(model.engine, model.sizes(1, 1)))
    assert moved == pytest.approx(read, rel=0.05)
    assert model.sizes(3, 8)[names.LOGITS] == 3


def test_a_long_report_is_cut() -> None:
    rows = [{"what": "clocks", "text": str(number)} for number in range(100)]
    stage = {"status": "complete", "seconds": 1.0, "rows": rows, "last": []}
    lines = table({"card": "a GPU", "cubin": "0" * 64, "stages": {"env": stage}})
    assert len(lines) == MOST_LINES
    assert lines[-1] == "... 43 lines more in report.json"


def test_a_variant_changes_what_is_there_once(tmp_path: Path) -> None:
    write_variant("one", [("engine.cu", '#include "kernels.cu"', "// none")], tmp_path)
    assert "// none" in (tmp_path / "cuda" / "engine.cu").read_text()
    with pytest.raises(OutriderError, match=r"variant two: engine\.cu has 'gone' 0 times, not once"):
        write_variant("two", [("engine.cu", "gone", "")], tmp_path / "two")


def test_kernels_are_compiled_once_for_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(compiling, "_compile", lambda *given: compiled.append(given) or CUBIN)
    monkeypatch.setenv(CUBINS, str(tmp_path / "cubins"))
    (sources := tmp_path / "csrc" / "cuda").mkdir(parents=True)
    for text, count in (("one", 1), ("one", 1), ("two", 2)):
        (sources / "engine.cu").write_text(text)
        assert compile_kernels("sm_90", "engine.cu", sources.parent) == CUBIN
        assert len(compiled) == count
