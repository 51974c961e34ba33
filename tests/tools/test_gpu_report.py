"""The GPU report, as far as it goes without one: what it prints, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plans.errors import PlanError
from tools import gpu_report

ROW: dict[str, Any] = {
    "target": "onnxruntime-cuda", "drafter": "none", "tokens_per_second": 1234.5, "tokens_per_verify": 1.0,
    "round_ms": 0.81, "same_runs": 7, "runs": 8,
}  # fmt: skip
REPORT: dict[str, Any] = {
    "gpu": "a GPU", "date": "2026-01-02", "command": "python -m tools.gpu_report", "driver": 13000,
    "architecture": "sm_90", "copy_gb_s": 4000.0, "tests": {"summary": "9 passed"},
    "reference": [ROW, {"target": "tensorrt", "error": "no library"}],
    "shapes": [{
        "model": "1b", "weights_gb": 2.3, "tokens_per_second": 600.0, "read_gb_per_second": 1380.0,
        "share_of_copy_read": 0.69, "ttft_ms": 12.0,
    }],
}  # fmt: skip


def test_every_row_of_the_tables_has_every_column() -> None:
    lines = gpu_report.markdown(REPORT).splitlines()
    assert "| onnxruntime-cuda | none | 1234 | 1.00 | 0.810 | 7 of 8 |" in lines
    assert "| tensorrt | no library |  |  |  |  |" in lines
    assert "| 1b | 2.30 | 600.0 | 1380 | 69% | 12 |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}


def test_without_a_gpu_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> None:
        raise PlanError("there is no NVIDIA driver")

    monkeypatch.setattr(gpu_report, "driver", none)
    with pytest.raises(SystemExit) as left:
        gpu_report.main(["--out", str(tmp_path / "results")])
    assert left.value.code == 2
    assert "no report: there is no NVIDIA driver" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_random_llama_is_a_checkpoint_that_builds(tmp_path: Path) -> None:
    from compiler.models.config import read_config

    shape = gpu_report.Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocab=512)
    read = gpu_report.write_random_llama(shape, tmp_path)
    config = read_config(tmp_path)
    assert (config.num_layers, config.num_kv_heads, config.vocab_size) == (2, 2, 512)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert read == 2 * (2 * layer + 64 + 512 * 64)
