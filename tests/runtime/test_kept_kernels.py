"""Kernels that a library compiles are there in the next process; the library's cache is recorded, never run."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider.runtime.backends.kept_kernels import KeptKernels, kernel_file

CONDITIONS = {"library": "tensorrt_rtx 1.7.1", "gpu": "a GPU", "architecture": "sm_89", "driver": "13.0"}


class Cache:
    """An `IRuntimeCache`: takes only what another one gave."""

    def __init__(self, *kernels: str) -> None:
        self.kernels = list(kernels)

    def serialize(self) -> bytes:
        return b"kernels:" + " ".join(self.kernels).encode()

    def deserialize(self, blob: bytes) -> bool:
        head, _, rest = blob.partition(b":")
        if head != b"kernels":
            return False
        self.kernels = rest.decode().split()
        return True


def test_new_kernels_are_there_in_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outrider" / "kernels" / "target.bin"
    first = Cache()
    kept = KeptKernels(first, file)
    first.kernels += ["a", "b"]
    kept.save()
    second = Cache()
    KeptKernels(second, file).save()
    assert second.kernels == ["a", "b"]
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("no space left on device")))
    kept.save()  # nothing new is not written
    first.kernels.append("c")
    kept.save()
    assert file.read_bytes() == b"kernels:a b"
    assert list(file.parent.iterdir()) == [file]


def test_a_damaged_file_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "target.bin"
    file.write_bytes(b"half of i")
    cache = Cache()
    kept = KeptKernels(cache, file)
    assert "is damaged, or of another GPU or driver" in caplog.text
    cache.kernels.append("a")
    kept.save()
    assert file.read_bytes() == b"kernels:a"


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_text("a file in the folder's place")
    cache = Cache()
    kept = KeptKernels(cache, tmp_path / "kernels" / "target.bin")
    for name in "ab":
        cache.kernels.append(name)
        kept.save()
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING and "be kept in" in each.message]
    assert len(warnings) == 1


def test_each_engine_gpu_driver_and_version_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engines = [tmp_path / "plan" / "engines" / "tensorrt-rtx" / f"{name}.engine" for name in ("target", "head")]
    others = [{**CONDITIONS, name: f"{value} other"} for name, value in CONDITIONS.items()]
    files = {kernel_file(engine, conditions) for engine in engines for conditions in (CONDITIONS, *others)}
    assert len(files) == 2 * (1 + len(CONDITIONS))
    assert {file.parent for file in files if file is not None} == {tmp_path / "outrider" / "kernels"}
