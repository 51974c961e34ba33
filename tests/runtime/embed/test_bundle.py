"""A bundle, copied to a root directory that has a C library, a plan and a program, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.errors import EmbedError
from outrider.runtime.__main__ import main
from outrider.runtime.embed.bundle import modules as bundle_modules
from outrider.runtime.embed.bundle.bundle import LIST, MODULES, PRIVATE, Bundle, bundle
from outrider.runtime.embed.bundle.component import Component, of_distribution
from outrider.runtime.embed.bundle.contents import HIDDEN, SYSTEM
from outrider.runtime.embed.bundle.modules import find_modules
from outrider.runtime.embed.bundle.shared_objects import Tools
from outrider.tools.lab.bundle import main as measure_bundle
from tests.runtime.embed.test_embed import HERE, ROOT, output, run

pytest.importorskip("cffi")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux, and a C and a C++ compiler"
)

WARNINGS = ("-Wall", "-Wextra", "-Werror")
PROGRAMS = {"requests.c": ("/plans/branches", "/scratch"), "throwing.cc": ("/plans/toy", "/plans/branches")}
MOST_BYTES = 130e6


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle that was moved after it was made, and what the command said."""
    folder = tmp_path_factory.mktemp("bundle")
    with redirect_stdout(StringIO()) as said:
        assert main(["embed", "--bundle", str(folder / "made"), "--json"]) == 0
    return (folder / "made").rename(folder / "moved"), json.loads(said.getvalue())


@pytest.fixture(scope="session")
def listed(made: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made[0] / LIST).read_text())
    return found


class EmptyRoot:
    """A root directory with glibc, a bundle, programs, and plans."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.folder, self.bundle = folder, folder / "bundle"
        for name in ("proc", "plans", "programs", "scratch"):
            (folder / name).mkdir()
        shutil.copytree(bundle, self.bundle, symlinks=True, copy_function=os.link)
        probe = self.compile(HERE / "again.c")
        interpreter = re.search(r"interpreter: (/[^]]+)", output("readelf", "--wide", "--program-headers", probe))
        assert interpreter is not None
        libraries = re.search(r"libc\.so\.6 => (\S+)/", output("ldd", probe))
        assert libraries is not None
        for name in SYSTEM:
            if (path := Path(libraries[1]) / name).is_file():
                self._take(path)
        self._take(Path(interpreter[1]))

    def _take(self, path: Path) -> None:
        to = self.folder / path.relative_to("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            shutil.copyfile(path, to)
            to.chmod(0o755)

    def compile(self, source: Path) -> Path:
        program = self.folder / "programs" / source.stem
        compiler, runtime_path = ["cc", "-std=gnu11"], "$ORIGIN/../bundle/lib"
        if source.suffix == ".cc":  # it needs C++'s library itself
            compiler, runtime_path = ["c++", "-std=c++17"], f"{runtime_path}:{runtime_path}/outrider"
        command = [
            *compiler, *WARNINGS, f"-I{self.bundle / 'include'}", str(source), "-o", str(program),
            f"-L{self.bundle / 'lib'}", "-loutrider", f"-Wl,-rpath,{runtime_path}", "-pthread", "-ldl",
        ]  # fmt: skip
        output(*command)
        return program

    def files(self) -> dict[Path, int]:
        places = ("bundle", "programs", "etc", "root", "home", "tmp", "var")
        paths = (path for place in places for path in (self.folder / place).rglob("*") if not path.is_dir())
        return {path: path.lstat().st_mtime_ns for path in paths}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a program in this root, with /proc and without an environment."""
        enter = 'mount --rbind /proc "$0/proc" && exec env -i "$(command -v chroot)" "$0" "$@"'
        alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        return subprocess.run(
            [*alone, "sh", "-c", enter, str(self.folder), *map(str, words)],
            capture_output=True, text=True, check=False, timeout=300,
            env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )  # fmt: skip


@pytest.fixture(scope="session")
def root(
    made: tuple[Path, dict[str, Any]],
    toy_plan: Path,
    branch_plan: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EmptyRoot:
    found = EmptyRoot(tmp_path_factory.mktemp("root"), made[0])
    for name, plan in {"toy": toy_plan, "branches": branch_plan}.items():
        shutil.copytree(plan, found.folder / "plans" / name)
    entered = found.run("/programs/again", "/plans/toy", 1)
    if "unshare" in entered.stderr or "mount:" in entered.stderr or "chroot:" in entered.stderr:
        pytest.skip(f"no root directory can be entered here: {entered.stderr.strip()}")
    return found


@pytest.fixture
def torn(root: EmptyRoot) -> Iterator[EmptyRoot]:
    """The same root with a bundle that a test may take files from."""
    whole = root.folder / "whole"
    root.bundle.rename(whole)
    shutil.copytree(whole, root.bundle, symlinks=True, copy_function=os.link)
    yield root
    shutil.rmtree(root.bundle)
    whole.rename(root.bundle)


# In a root directory with a C library alone.


@pytest.mark.parametrize("program", ["requests.c", pytest.param("throwing.cc", marks=pytest.mark.long)])
def test_the_c_programs_run_where_there_is_only_a_c_library(program: str, root: EmptyRoot) -> None:
    root.compile(HERE / program)
    before = root.files()
    done = root.run(f"/programs/{Path(program).stem}", *PROGRAMS[program])
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    assert done.stdout
    assert done.stderr == ""
    assert root.files() == before  # nothing was written: no byte code, no cache, no identity of the machine


def test_modules_that_are_imported_late_are_there(root: EmptyRoot, everything_plan: Path) -> None:
    """All drafters, forms, modes and options from Python, within the bundle; then each module of ours."""
    shutil.copytree(everything_plan, root.folder / "plans" / "everything")
    root.compile(HERE / "run_python.c")
    shutil.copyfile(HERE / "everything.py", root.folder / "everything.py")
    done = root.run("/programs/run_python", "/everything.py", "/plans/everything")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ok\n"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (MODULES / "outrider" / "runtime" / "session.pyc", "No module named 'outrider.runtime.session'"),
        (PRIVATE / "libz.so.1", "libz.so.1: cannot open shared object file"),
        (Path("lib/liboutrider-python.so"), "Python cannot be loaded"),
    ],
)
def test_a_bundle_that_lacks_something_says_what(torn: EmptyRoot, missing: Path, said: str) -> None:
    path = torn.bundle / missing
    path.unlink()
    done = torn.run("/programs/again", "/plans/toy", 1)
    assert done.returncode == 1
    assert said in done.stderr
    assert "the bundle is incomplete, or made for another C library or processor: copy its whole folder" in done.stderr


# On this machine, whose Python it leaves alone.


def test_it_reads_no_environment_of_another_python(root: EmptyRoot, toy_plan: Path, tmp_path: Path) -> None:
    program = root.compile(HERE / "again.c")
    version = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    (tmp_path / version).write_text("no library")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    misleading = {
        name: str(tmp_path) for name in ("PYTHONHOME", "PYTHONPATH", "OUTRIDER_HOME", "LD_LIBRARY_PATH", "HOME")
    }
    done = subprocess.run(
        [program, toy_plan, "1"], cwd=tmp_path, env=misleading, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".pyc" or "Microsoft" in path.parts]


def test_a_process_that_runs_a_python_is_refused(made: tuple[Path, dict[str, Any]]) -> None:
    program = f"""
import ctypes
library = ctypes.CDLL({str(made[0] / "lib" / "liboutrider.so.0")!r})
library.outrider_last_error.restype = ctypes.c_char_p
out = ctypes.c_void_p()
print(library.outrider_params_create(ctypes.byref(out)), library.outrider_last_error().decode())
"""
    said = output(sys.executable, "-c", program)
    assert said.startswith("6 ")
    assert "this process runs a Python of its own" in said


def test_pkg_config_finds_it_where_it_was_moved(
    made: tuple[Path, dict[str, Any]], toy_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    monkeypatch.setenv("PKG_CONFIG_PATH", str(made[0] / "lib" / "pkgconfig"))
    found = output("pkg-config", "--cflags", "--libs", "outrider").split()
    program, source = tmp_path / "chat", ROOT / "tools" / "examples" / "c" / "chat.c"
    output("cc", "-std=c11", source, "-o", program, *found, f"-Wl,-rpath,{made[0] / 'lib'}")
    done = run(program, toy_plan, 4, given="import\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


# What it has.


def test_every_file_is_listed_once_with_its_licence(made: tuple[Path, dict[str, Any]], listed: dict[str, Any]) -> None:
    folder, said = made
    files = [file for component in listed["components"] for file in component["files"]]
    texts = [file for component in listed["components"] for file in component["licence_files"]]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    assert len(files) == len(set(files))
    assert {*files, *texts, LIST} == there
    assert sum((folder / file).lstat().st_size for file in there) == said["bytes"] <= MOST_BYTES
    names = {component["name"]: component for component in listed["components"]}
    assert {"Python", "outrider", "numpy", "onnxruntime", "tokenizers", "libstdc++", "libgcc_s"} <= set(names)
    for component in names.values():
        assert component["version"], component["name"]
        assert component["licence"] != "unknown", component["name"]
        assert component["licence_files"] or any(component["name"] in warning for warning in said["warnings"])
        assert component["bytes"] == sum((folder / file).lstat().st_size for file in component["files"])


def test_nothing_in_it_points_to_where_it_was_made(made: tuple[Path, dict[str, Any]], listed: dict[str, Any]) -> None:
    tools = Tools()
    names = {Path(file).name for component in listed["components"] for file in component["files"]}
    objects = [path for path in made[0].rglob("*.so*") if not path.is_symlink()]
    assert len(objects) > 30
    for path in objects:
        assert all(folder.startswith("$ORIGIN") for folder in tools.run_paths(path)), path
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--wide", "--dynamic", path))
        assert set(needed) <= names | SYSTEM, path
    assert re.fullmatch(r"\d+\.\d+", listed["glibc"])
    for path in (made[0] / MODULES).rglob("*.pyc"):
        assert str(ROOT).encode() not in path.read_bytes(), path
    assert not list(made[0].rglob("*.py"))


@pytest.mark.long
def test_its_costs_are_measured(
    made: tuple[Path, dict[str, Any]], toy_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure_bundle([str(made[0]), str(toy_plan), "--reps", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == made[1]["bytes"]
    for stages in report["stages"].values():
        assert list(stages) == ["first_call", "open", "first_token", "second_token"]
    # Up to the first token of a plan that has a chat template and no structured outputs:
    assert not {"asyncio", "rich", "llguidance", "argparse", "unittest", "ssl"} & set(report["modules"])
    assert sum(report["modules"].values()) < 520


# Making one.


def test_a_bundle_that_cannot_be_made_leaves_its_place_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(EmbedError, match="exists and is no bundle, so it is not replaced; pass another folder"):
            bundle(folder)
    with pytest.raises(EmbedError, match=r"cannot be written to .*pass another folder"):
        bundle(tmp_path / "file" / "out")
    with monkeypatch.context() as patch:
        patch.setattr(bundle_modules, "DISTRIBUTIONS", ("no-such-package",))
        with pytest.raises(EmbedError, match=r"the package no-such-package is not installed in .*pip install"):
            find_modules(["outrider.runtime.embed.calls"])
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **how: None if name == "patchelf" else which(name, **how))
    with pytest.raises(EmbedError, match=r"a bundle is made with patchelf, which is not on PATH; (install|run)"):
        bundle(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_packages_within_packages_are_listed_or_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [
        {"name": "aho", "version": "1.2", "licenses": [{"license": {"id": "MIT"}}]},
        {"name": "base", "version": "3", "licenses": [{"expression": "MIT OR Apache-2.0"}]},
        {"name": "mute"},
        {"name": "testing", "scope": "excluded"},
    ]
    info = tmp_path / "crusty-1.0.dist-info"
    (info / "sboms").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: crusty\nVersion: 1.0\nLicense-Expression: MIT\n")
    (info / "sboms" / "crusty.cyclonedx.json").write_text(json.dumps({"components": inside}))
    (info / "RECORD").write_text("crusty-1.0.dist-info/sboms/crusty.cyclonedx.json,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = of_distribution("crusty")
    assert found.inside == [
        {"name": "aho", "version": "1.2", "licence": "MIT"},
        {"name": "base", "version": "3", "licence": "MIT OR Apache-2.0"},
        {"name": "mute", "version": "", "licence": "unknown"},
    ]
    assert found.to_json()["licence_files"] == ["licences/crusty/crusty.cyclonedx.json"]
    assert not found.has_licence_text
    unlisted = Component("llguidance", "1", "MIT", {"LICENSE": tmp_path})
    listed = Component("tokenizers", "1", "MIT", {"LICENSE": tmp_path}, found.inside)
    (warning,) = Bundle(tmp_path, 1, [unlisted, listed], "2.36", "x86_64").warnings
    assert warning.startswith("llguidance 1 has other packages compiled into it and no list of them")


def test_imports_of_functions_and_of_compiled_code_are_found() -> None:
    names = {module.name for module in find_modules(["outrider.runtime.embed.calls"])}
    ours = {"outrider", "outrider.runtime", "outrider.runtime.embed.calls", "outrider.plans.chat_template"}
    assert {*ours, "jinja2.sandbox", "numpy._core._methods", "_strptime", *HIDDEN["ctypes"]} <= names
    assert not {"outrider.runtime.server.app", "outrider.runtime.__main__", "numpy.testing", "torch", "rich"} & names


@pytest.mark.long
def test_a_bundle_that_does_not_start_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not carried along, or a module that nothing names, is found while the bundle is made."""
    monkeypatch.setitem(bundle_modules.LEFT_OUT, "tokenizers.models", "is missed by this test")
    with pytest.raises(EmbedError, match=r"(?s)the bundle does not start: .*tokenizers"):
        bundle(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
