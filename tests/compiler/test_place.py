"""A build replaces plans and nothing else, and cleans up after builds that were killed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from outrider.compiler.place import Place
from outrider.plans.errors import PlanError

DEAD = 999_999_999  # above any system's largest process number
HOST = "this-host"


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.compiler.place._HOST", HOST)


def write_plan(folder: Path, *files: str, version: int = 1) -> Path:
    """What a build of another version left: listed files, and a manifest that this version cannot open."""
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    manifest = {"format_version": version, "identity": "0" * 64, "files": [{"path": name} for name in files]}
    (folder / "plan.json").write_text(json.dumps(manifest))
    return folder


def put_new(place: Place) -> None:
    """A build as short as can be."""
    assert place.plan() is None
    with place.workplace() as root:
        (root / "new").write_text("x")
        place.put(root)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_second_build_of_a_place_in_one_process_is_refused_and_the_first_ends_well(tmp_path: Path) -> None:
    place = Place(tmp_path / "plan")
    with place.workplace() as root:
        with pytest.raises(PlanError, match="already"), Place(tmp_path / "plan").workplace():
            pass
        (root / "new").write_text("x")
        place.put(root)
    assert names(tmp_path / "plan") == {"new"}


@pytest.mark.parametrize("version", [0, 1, 99])
def test_a_plan_of_any_version_is_replaced_with_what_was_recorded_beside_it(tmp_path: Path, version: int) -> None:
    plan = write_plan(tmp_path / "plan", "engines/a.onnx", "tokenizer/b.json", version=version)
    for name in ("build.json", "prices.json"):
        (plan / name).write_text("{}")
    put_new(Place(plan))
    assert names(tmp_path) == {"plan"}
    assert names(plan) == {"new"}


@pytest.mark.parametrize("text", ["[]", "not JSON", '{"name": "my itinerary"}', '{"format_version": 1}', "[" * 9999])
def test_a_folder_whose_plan_json_is_somebody_elses_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trip").mkdir()
    (tmp_path / "trip" / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="trip exists and is not a plan; choose another --out"):
        Place(tmp_path / "trip").plan()
    assert (tmp_path / "trip" / "plan.json").read_text() == text


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "engines/notes.txt", "mine/deep/notes.txt"])
def test_files_of_somebody_elses_in_a_plan_are_not_lost(tmp_path: Path, name: str) -> None:
    place = Place(write_plan(tmp_path / "plan", "engines/a.onnx"))
    assert place.plan() is None
    file = tmp_path / "plan" / name  # it came during the build
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(PlanError, match=f"{name} is no file of the plan"), place.workplace() as root:
        place.put(root)
    with pytest.raises(PlanError, match=f"{name} is no file of the plan .*move it away"):
        place.plan()
    assert names(tmp_path) == {"plan"}
    assert file.read_text() == "mine"
    file.unlink()
    (tmp_path / "plan" / "data").symlink_to(tmp_path)
    with pytest.raises(PlanError, match="data is no file of the plan"):
        place.plan()


@pytest.mark.parametrize("kind", ["building", "previous"])
def test_only_folders_of_dead_processes_of_this_host_are_removed(tmp_path: Path, kind: str) -> None:
    dead, ours = f".plan.{kind}-{HOST}-{DEAD}", f".plan.{kind}-{HOST}-{os.getpid()}"
    kept = {
        f".plan.{kind}-{HOST}-1",  # it lives
        f".plan.{kind}-other-{DEAD}",
        f".plan.{kind}-{DEAD}",
        f".plan.{kind}-{HOST}-notes",
        f".plan.{kind}-{HOST}-{DEAD}{DEAD}",
        f".planet.{kind}-{HOST}-{DEAD}",
    }
    for name in {dead, ours} | kept:
        (tmp_path / name).mkdir()
    put_new(Place(write_plan(tmp_path / "plan")))
    assert names(tmp_path) == kept | {"plan"}


def test_a_plan_that_a_killed_build_moved_away_is_put_back(tmp_path: Path) -> None:
    """Killed between the two renames of a swap."""
    place = Place(tmp_path / "plan")
    for process, file in ((DEAD - 1, "older"), (DEAD, "newer")):
        write_plan(tmp_path / f".plan.previous-{HOST}-{process}", file)
    os.utime(tmp_path / f".plan.previous-{HOST}-{DEAD - 1}", (1, 1))
    write_plan(tmp_path / f".other.previous-{HOST}-1", "file")  # it is being swapped right now
    Place(tmp_path / "other").plan()
    assert not (tmp_path / "other").exists()
    shutil.rmtree(tmp_path / f".other.previous-{HOST}-1")
    assert place.plan() is None  # not of this version
    assert names(tmp_path / "plan") == {"newer", "plan.json"}
    put_new(place)
    assert names(tmp_path) == {"plan"}


def test_a_swap_that_is_interrupted_puts_the_old_plan_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(write_plan(tmp_path / "plan", "old"))
    rename = Path.rename

    def interrupt(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt), place.workplace() as root:
        place.put(root)
    assert names(tmp_path) == {"plan"}
    assert names(tmp_path / "plan") == {"old", "plan.json"}


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "plan", Path("/proc/nowhere/plan"), tmp_path / ("x" * 250)):
        with pytest.raises(PlanError, match=r"cannot be written \(.*\); choose another --out"):
            put_new(Place(out))
    with pytest.raises(PlanError, match="choose another --out"):
        put_new(Place(tmp_path / "loop"))
    with pytest.raises(PlanError, match="mount point"):
        Place(Path("/proc")).plan()


def test_names_that_look_like_patterns_are_taken_literally(tmp_path: Path) -> None:
    other = f".plan1.building-{HOST}-{DEAD}"
    (tmp_path / other).mkdir()
    put_new(Place(tmp_path / "plan[1]"))
    assert names(tmp_path) == {"plan[1]", other}
