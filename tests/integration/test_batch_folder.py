"""The folder that a batch is written to: its files, its state, and what is refused of it."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.batch.folder import BatchFolder, BatchState
from outrider.runtime.batch.run import _on_ray


def a_state(**own: Any) -> BatchState:
    return replace(BatchState("plan", "requests", "toy", 0, "onnxruntime-cpu", {}, 1, 16), **own)


def test_a_folder_whose_first_run_was_killed_early_is_begun_again(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.runtime.batch.folder.locked", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), folder.begun(a_state()):
            pass
    with folder.begun(a_state()) as state:
        assert state == a_state()


@pytest.mark.parametrize("name", ["lock", "parts", "batch.json", "results.jsonl", "parts/000000.begun"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_outside_of_the_folder_is_touched(tmp_path: Path, name: str, kind: str) -> None:
    folder, elsewhere = BatchFolder(tmp_path / "out"), tmp_path / "elsewhere"
    with folder.begun(a_state()):
        pass
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    there = folder.path / name
    if there.is_dir():
        there.rmdir()
    there.unlink(missing_ok=True)
    if kind == "link":
        there.symlink_to(elsewhere if name == "parts" else elsewhere / "file")
    else:
        os.mkfifo(there)
    with pytest.raises(RequestError, match="is a link, or not of its kind"), folder.begun(a_state()):
        pass
    assert [each.read_text() for each in elsewhere.iterdir()] == ["kept"]


@pytest.mark.parametrize("change", [{"block_size": 0}, {"kernels": 3}, "[" * 5000, "7"], ids=lambda c: str(c)[:20])
def test_a_state_that_was_tampered_with_is_refused(tmp_path: Path, change: Any) -> None:
    folder = BatchFolder(tmp_path / "out")
    with folder.begun(a_state()):
        (folder.path / "parts" / "\u00b2\u00b2.jsonl").touch()
        assert folder.written() == set()
    path = folder.path / "batch.json"
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=r"cannot be read: .*; choose another") as refused, folder.begun(a_state()):
        pass
    assert "\n" not in str(refused.value)


def test_another_release_of_outrider_does_not_continue(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "out")
    with folder.begun(a_state(release="0.0.1")):
        pass
    with pytest.raises(RequestError, match=r"Outrider 0\.0\.1 wrote them"), folder.begun(a_state()):
        pass


def test_files_of_a_batch_are_for_whom_any_new_file_is(tmp_path: Path) -> None:
    """The workers of a cluster may be of another user than the command."""
    (other := tmp_path / "other").touch()
    folder = BatchFolder(tmp_path / "out")
    with folder.begun(a_state()):
        folder.write(0, [b"{}\n"])
        with folder.beginning(1):
            pass
        files = [each for each in folder.path.rglob("*") if each.is_file()]
        assert len(files) == 4
        assert {each.stat().st_mode for each in files} == {other.stat().st_mode}


def test_backends_of_gpus_are_refused_on_a_cluster(tmp_path: Path) -> None:
    state = a_state(backend="onnxruntime-cuda")
    with pytest.raises(RequestError, match="actors ask Ray for CPUs alone"):
        next(_on_ray(Namespace(), BatchFolder(tmp_path), state, {}))
