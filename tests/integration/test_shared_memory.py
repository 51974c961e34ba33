"""Processes of one machine that share a plan's memory: packed floats are mapped, and KV takes what is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.runtime.backends.shared_engines import SharedEngines
from outrider.runtime.exactness import kernels_here
from outrider.runtime.files import MappedFiles, cache_folder
from outrider.runtime.kv.memory import zeros
from tests.conftest import TOY_DRAFTERS, TOY_PROMPTS, BuildOnce

MAPS = Path("/proc/self/maps")
mapped_memory = pytest.mark.skipif(not MAPS.exists(), reason="the system does not say what is mapped")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(runtime: Runtime) -> Path:
    shared = SharedEngines.from_plan(runtime._plan, kernels_here(), MappedFiles())
    assert shared is not None
    return shared.folder


@mapped_memory
def test_packed_floats_are_mapped_and_tokens_stay_the_same(toy_plan: Path, toy: Runtime, cache: Path) -> None:
    made = None
    for _ in range(2):
        shared = Runtime.load(toy_plan, threads=1, share_memory=True)
        folder = folder_of(shared)
        assert folder.is_relative_to(cache)
        weights = folder / "target" / "weights.bin"
        assert str(weights) in MAPS.read_text(encoding="utf-8")
        made = made or weights.stat().st_mtime_ns
        assert weights.stat().st_mtime_ns == made  # the second load finds it
        for drafter in ("none", *TOY_DRAFTERS):
            own = {"max_new_tokens": 30, "temperature": 0.8, "seed": 3, "drafter": drafter, "logprobs": 2}
            for prompt in TOY_PROMPTS:
                found, expected = shared.generate(prompt, **own), toy.generate(prompt, **own)
                assert found.token_ids == expected.token_ids
                assert found.logprobs == expected.logprobs
        del shared
    assert not [left.name for left in folder.iterdir() if left.name.startswith(".")]


@mapped_memory
def test_packed_integers_are_mapped_from_the_plan(built: BuildOnce, cache: Path) -> None:
    plan = built("shared-int8-plan", ["target.weights={type: int8}", "drafters=[]"])
    shared = Runtime.load(plan, threads=1, share_memory=True)
    assert [file.name for file in (folder_of(shared) / "target").iterdir()] == ["files.json"]
    assert str(plan / "engines" / "onnxruntime-cpu" / "weights.bin") in MAPS.read_text(encoding="utf-8")
    expected = Runtime.load(plan).generate("x", max_new_tokens=5).token_ids
    assert shared.generate("x", max_new_tokens=5).token_ids == expected


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["weights.bin", "engine.onnx", "files.json"])
@pytest.mark.parametrize("damage", [shorten, change_a_byte, Path.unlink])
def test_damage_to_the_cache_is_logged_and_repaired(
    file: str,
    damage: Callable[[Path], None],
    toy_plan: Path,
    toy: Runtime,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folder_of(Runtime.load(toy_plan, threads=1, share_memory=True)) / "target"
    before = (folder / "weights.bin").read_bytes()
    damage(folder / file)
    with caplog.at_level(logging.WARNING, "outrider"):
        shared = Runtime.load(toy_plan, threads=1, share_memory=True)
    assert "it is made again" in caplog.text
    assert (folder / "weights.bin").read_bytes() == before
    assert [left.name for left in folder.parent.iterdir() if left.name.startswith(".")] == []
    assert shared.generate("x", max_new_tokens=20).token_ids == toy.generate("x", max_new_tokens=20).token_ids
    with caplog.at_level(logging.WARNING, "outrider"):
        caplog.clear()
        Runtime.load(toy_plan, threads=1, share_memory=True)
    assert not caplog.text


def test_without_verification_sizes_alone_are_compared(
    toy_plan: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a cache that is written over while it is used is refused."""
    shared = Runtime.load(toy_plan, threads=1, share_memory=True)
    weights = folder_of(shared) / "target" / "weights.bin"
    change_a_byte(weights)
    with pytest.raises(PlanError, match="was written to while the plan is in use"):
        shared.generate("x", max_new_tokens=5)
    with caplog.at_level(logging.WARNING, "outrider"):
        Runtime.load(toy_plan, threads=1, share_memory=True, verify=False)
        assert not caplog.text
        shorten(weights)
        Runtime.load(toy_plan, threads=1, share_memory=True, verify=False)
        assert "it is made again" in caplog.text


def test_where_the_cache_cannot_be_written_a_warning_is_logged_and_the_plan_runs(
    toy_plan: Path, toy: Runtime, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / "outrider").write_text("no folder")
    assert cache_folder() == cache / "outrider"
    with caplog.at_level(logging.WARNING, "outrider"):
        shared = Runtime.load(toy_plan, threads=1, share_memory=True)
    assert "are not shared between processes" in caplog.text
    assert shared.generate("x", max_new_tokens=5).token_ids == toy.generate("x", max_new_tokens=5).token_ids


@mapped_memory
def test_without_huge_pages_memory_is_taken_as_it_is_written() -> None:
    size = 64 * 2**20
    found = zeros((size,), np.uint8, huge_pages=False)
    found[:: 2 * 2**20] = 1
    place, resident, inside = found.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(each, 16) for each in words[0].split("-"))
            inside = first <= place < last
        elif inside and words[0] == "Rss:":
            resident = int(words[1]) * 1024
    assert 0 < resident < size // 8
