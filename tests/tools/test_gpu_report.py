"""The GPU report, as far as it goes without one: what it prints, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plans import names
from plans.errors import PlanError
from plans.kernel_costs import launch_costs
from plans.plan import Plan
from runtime import Runtime
from runtime.backends import BACKENDS, Driver
from tests.conftest import TOY_DRAFTERS
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice
from tools import gpu_figures, gpu_report
from tools.kernel_costs import engine_of

ROW: dict[str, Any] = {
    "backend": "onnxruntime-cuda", "cuda_graphs": True, "drafter": "none", "tokens_per_second": 1234.5,
    "tokens_per_verify": 1.0, "round_ms": 0.81, "device_ms": 0.76, "host_ms": 0.05, "launches": 3, "ops_share": 0.021,
    "same_runs": 7, "as_plain": 8, "runs": 8,
    "partings": [{"index": 3, "margin": 2e-6}],
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "model": "1b", "backend": "onnxruntime-cuda", "weights": "bfloat16", "cuda_graphs": False, "weights_gb": 2.3,
    "tokens_per_second": 600.0, "round_ms": 1.6, "host_share": 0.04, "launches": None, "ops_share": 0.012,
    "read_gb_per_second": 1380.0,
    "share_of_copy": 0.69, "verify_ms": {1: 1.6, 64: 2.0},
    "ngram": {"tokens_per_second": 900.0, "tokens_per_verify": 1.8},
}  # fmt: skip
REPORT: dict[str, Any] = {
    "gpu": "a GPU", "date": "2026-01-02", "command": "python -m tools.gpu_report", "driver": 13000,
    "architecture": "sm_90", "copy_gb_s": 4000.0, "tests": {"summary": "9 passed"}, "errors": ["model 8b: no memory"],
    "reference": [ROW, {"backend": "tensorrt-rtx", "cuda_graphs": True, "error": "no library"}],
    "shapes": [SHAPE, {"model": "1b", "backend": "tensorrt-rtx", "weights": "bfloat16", "error": "no library"}],
}  # fmt: skip


def test_every_row_of_the_tables_has_every_column() -> None:
    lines = gpu_report.markdown(REPORT).splitlines()
    row = "onnxruntime-cuda | yes | none | 1234 | 1.00 | 0.810 | 0.760 | 0.050 | 3 | 2.1%"
    assert f"| {row} | 7 of 8 | 8 of 8 | 2.0e-06 |" in lines
    assert "| tensorrt-rtx | no library |" + 11 * "  |" in lines
    row = "1b | onnxruntime-cuda | bfloat16 | no | 600.0 | 1.60 | 4.0% |  | 1.2% | 1380 | 69% | 900.0 | 1.80"
    assert f"| {row} | 1: 1.60, 64: 2.00 |" in lines
    assert "- failed: model 8b: no memory" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {14, 15}


def test_figures_of_a_plan_on_an_emulated_device(
    cuda_plan: Plan, toy: Runtime, monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    device = EmulatedDevice(emulator)
    monkeypatch.setitem(
        BACKENDS, "onnxruntime-cuda", Driver(lambda target: None, lambda target, settings: EmulatedBackend(device))
    )
    monkeypatch.setattr(gpu_figures, "_LAUNCHES", 2)
    runtime = Runtime.load(cuda_plan.root)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    plain = [toy.generate(ids, max_new_tokens=24, ignore_eos=True, drafter="none").token_ids for ids in prompts]
    wrong = [plain[0], [*plain[1][:4], (plain[1][4] + 1) % 300, *plain[1][5:]]]
    rows = {row["drafter"]: row for row in gpu_figures.plan_rows(runtime, False, prompts, 24, wrong, toy.session())}
    assert list(rows) == ["none", *TOY_DRAFTERS]
    for row in rows.values():
        assert (row["backend"], row["runs"], row["same_runs"], row["as_plain"]) == ("onnxruntime-cuda", 2, 1, 2)
        assert row["partings"][0]["index"] == 4
        assert row["tokens_per_second"] > 0
        assert 0 <= row["host_ms"] <= row["round_ms"]
        assert row["ops_share"] == pytest.approx(sum(row["op_ms"].values()) / row["round_ms"])
    assert rows["none"]["tokens_per_verify"] == 1.0
    assert rows["none"]["op_ms"].keys() == {"BimMask", "Sample"}
    assert rows["head"]["op_ms"].keys() == {"RaceNoise", "BimMask", "TreeAccept", "KvGather"}
    session = runtime.session()
    gpu_figures.decode(session, prompts[0], "none", 8)
    assert gpu_figures.verify_times(session, (0, 3, 6, 63), repeats=2).keys() == {1, 4, 7}


def test_without_a_gpu_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> None:
        raise PlanError("there is no NVIDIA driver")

    monkeypatch.setattr(gpu_report, "driver", none)
    assert gpu_report.main(["--out", str(tmp_path / "results")]) == 2
    assert "no report: there is no NVIDIA driver" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_random_llama_is_a_checkpoint_that_builds(tmp_path: Path) -> None:
    from compiler.opening import read_config

    shape = gpu_figures.Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocab=512)
    gpu_figures.write_random_llama(shape, tmp_path)
    config = read_config(tmp_path)
    assert (config.num_layers, config.num_kv_heads, config.vocab_size) == (2, 2, 512)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert shape.read_bytes("bfloat16") == 2 * (2 * layer + 64 + 512 * 64)
    weights = load_file(tmp_path / "model.safetensors")
    read = sum(weight.numel() for name, weight in weights.items() if "embed_tokens" not in name)
    assert 2 * read == shape.read_bytes("bfloat16")
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    assert all(0.015 < float(weight.float().std()) < 0.025 for weight in matrices)
    assert len(
        {weight.flatten()[:64].numpy(force=True).tobytes() for weight in map(torch.Tensor.float, matrices)}
    ) == len(matrices)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_bytes_that_a_token_reads_are_those_that_kernels_move(weights: str) -> None:
    shape = gpu_figures.Shape(hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=2, vocab=8192)
    costs = launch_costs(engine_of(shape, weights), dict.fromkeys(names.SYMBOLS, 1) | {names.CAPACITY: 8448})
    assert sum(cost.moved for cost in costs) == pytest.approx(shape.read_bytes(weights), rel=0.05)


@pytest.mark.parametrize("backend", ["cuda", "onnxruntime-cuda"])
def test_a_random_llama_is_built_with_integers(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of weights has those that a token reads, the embedding in 8 bits, and little else."""
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(gpu_figures, "architecture", lambda: "sm_90")
    shape = gpu_figures.Shape(hidden=256, intermediate=16384, layers=2, heads=4, kv_heads=2, vocab=4096)
    gpu_figures.write_random_llama(shape, tmp_path / "random")
    gpu_figures.build_shape(tmp_path / "random", backend, "int4", tmp_path / "plan")
    stored = sum(file.stat().st_size for file in (tmp_path / "plan" / "engines" / backend).glob("*.bin"))
    embedding = shape.vocab * shape.hidden * 8.5 / 8
    assert stored == pytest.approx(shape.read_bytes("int4") + embedding, rel=0.05)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU on which everything is measured at once; what was run."""
    ran: list[str] = []

    def built(folder: Path, backend: str) -> None:
        ran.append(f"build {backend}")
        (folder / backend).mkdir()

    def on_cpu(folder: Path, *_: int) -> Any:
        assert (folder / gpu_figures.CPU).is_dir()
        ran.append("reference on the CPU")
        return [ROW | {"backend": "onnxruntime-cpu", "cuda_graphs": False}], [[1, 2]]

    def on_gpu(folder: Path, backend: str, graphs: bool, *of: Any) -> list[dict[str, Any]]:
        assert (folder / backend).is_dir()
        assert of[-1] == [[1, 2]], "what the CPU decoded, in whichever call"
        ran.append(f"reference on {backend}, {graphs}")
        if backend == "tensorrt":
            raise PlanError("no library")
        return [ROW | {"backend": backend, "cuda_graphs": graphs}]

    def tests() -> dict[str, Any]:
        ran.append("tests")
        return {"status": 0, "summary": "9 passed", "failed": []}

    for name, stub in {
        "driver": lambda: None, "device_name": lambda: "a GPU", "architecture": lambda: "sm_90",
        "call": lambda function: 13000, "copy_speed": lambda: 4000.0, "run_tests": tests, "build_reference": built,
        "reference_on_cpu": on_cpu, "reference_rows": on_gpu,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_report, name, stub)
    return ran


def test_a_report_goes_on_in_another_call(
    stubbed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shapes", "", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert gpu_report.main([*given, "--budget", "100"]) == 0
    said = capsys.readouterr().out
    assert "1 of 16 stages are open: tests marked gpu." in said
    assert "The longest takes about 180 seconds." in said
    command = "python -m tools.gpu_report --shapes ''"
    assert f"    {command} --out {tmp_path}/out --work {tmp_path}/work --budget 100\n" in said
    assert "tests" not in stubbed
    assert len(stubbed) == 5 + 1 + 8
    stubbed.clear()

    assert gpu_report.main(given) == 0
    assert stubbed == ["tests"]
    said = capsys.readouterr().out
    assert "open" not in said
    (written,) = (tmp_path / "out").glob("gpu-*.md")
    assert written.read_text() in said
    assert f"    {command}\n" in said
    assert "| tensorrt | no library |" in said
    assert list((tmp_path / "work").iterdir()) == []

    assert gpu_report.main(given) == 0
    assert stubbed == ["tests"], "nothing is open"


def test_a_report_of_another_command_is_left_alone(
    stubbed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shapes", "", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    gpu_report.main(given)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert gpu_report.main([*given, "--new", "64"]) == 2
    assert "holds a report whose command is" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_name_that_there_is_not_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--shapes", "1b,3b"]) == 2
    assert "there is no '3b'; choose of 1b, 8b" in capsys.readouterr().err
    assert gpu_report.main(["--weights", "int4,int3"]) == 2
    assert "--weights: there is no 'int3'; choose of bfloat16, float16, int8, int4" in capsys.readouterr().err


def test_stages_of_a_large_model_are_small(tmp_path: Path) -> None:
    """Each fits into ten minutes, and no backend's plan waits for another's."""
    arguments = gpu_report._parser().parse_args(["--shapes", "8b", "--weights", "bfloat16,int4"])
    stages = list(gpu_report.stages_of(arguments, tmp_path))
    assert max(stage.seconds for stage in stages) < 540
    (name,) = [stage.name for stage in stages if "writing" in stage.name]
    assert [stage.needs for stage in stages if "building 8b" in stage.name] == [(name,)] * 2 * len(
        gpu_figures.GPU_BACKENDS
    )
    assert len({stage.name for stage in stages}) == len(stages)
