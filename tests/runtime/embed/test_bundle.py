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
from tests.runtime.embed.test_embed import made_by_cmake

pytest.importorskip("cffi")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux, and a C and a C++ compiler"
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
WARNINGS = ("-Wall", "-Wextra", "-Werror")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "sessions.c": ("/plans/toy",),
    "wrong.c": ("/plans/toy", "/plans/damaged"),
    "branches.c": ("/plans/branches", "/plans/toy"),
    "throwing.cc": ("/plans/toy", "/plans/branches"),
    "again.c": ("/plans/toy", "3"),
    "fuzz.c": ("/plans/fuzzed", "1", "200", "50"),
    "requests.c": ("/plans/branches", "/scratch"),
    "storm.c": ("/plans/branches", "20"),
    "leave.c": ("/plans/branches", "40", "main"),
}
"""The C API's own tests, and what they are run with."""
SHORT = ("requests.c",)
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
        interpreter = re.search(r"interpreter: (/[^]]+)", _said("readelf", "--wide", "--program-headers", probe))
        assert interpreter is not None
        libraries = re.search(r"libc\.so\.6 => (\S+)/", _said("ldd", probe))
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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return program

    def run(self, *words: object, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program in this root, with /proc and without an environment."""
        enter = 'mount --rbind /proc "$0/proc" && exec env -i "$(command -v chroot)" "$0" "$@"'
        alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        return subprocess.run(
            [*alone, "sh", "-c", enter, str(self.folder), *map(str, words)],
            input=given, capture_output=True, text=True, check=False, timeout=300,
            env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )  # fmt: skip


def _said(*words: object) -> str:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="session")
def root(
    made: tuple[Path, dict[str, Any]],
    toy_plan: Path,
    branch_plan: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EmptyRoot:
    found = EmptyRoot(tmp_path_factory.mktemp("root"), made[0])
    named = {"toy": toy_plan, "branches": branch_plan, "damaged": toy_plan, "fuzzed": toy_plan}
    for name, plan in named.items():
        shutil.copytree(plan, found.folder / "plans" / name)
    manifest = found.folder / "plans" / "damaged" / "plan.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
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


@pytest.mark.parametrize(
    "program", [each if each in SHORT else pytest.param(each, marks=pytest.mark.long) for each in PROGRAMS]
)
def test_the_c_programs_run_where_there_is_only_a_c_library(program: str, root: EmptyRoot) -> None:
    root.compile(HERE / program)
    before = _files(root.folder)
    done = root.run(f"/programs/{Path(program).stem}", *PROGRAMS[program])
    assert done.returncode == (3 if program == "leave.c" else 0), f"{done.returncode}: {done.stderr[-3000:]}"
    assert done.stdout
    assert done.stderr == ""
    assert _files(root.folder) == before  # nothing was written: no byte code, no cache, no identity of the machine


def _files(folder: Path) -> dict[str, int]:
    return {
        str(path): path.lstat().st_mtime_ns
        for place in ("bundle", "programs", "etc", "root", "home", "tmp", "var")
        for path in (folder / place).rglob("*")
        if not path.is_dir()
    }


def test_every_c_program_of_the_tests_is_run_from_a_bundle() -> None:
    sources = {path.name for path in HERE.iterdir() if path.suffix in (".c", ".cc")}
    assert sources - {"run_python.c"} == set(PROGRAMS)


def test_whatever_is_imported_late_is_there(root: EmptyRoot, everything_plan: Path) -> None:
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
        (MODULES / "tokenizers" / "__init__.pyc", "tokenizers"),
        (PRIVATE / "libz.so.1", "libz.so.1: cannot open shared object file"),
        (Path("lib/liboutrider-python.so"), "Python cannot be loaded"),
        (MODULES, "Outrider cannot be started in /bundle/lib/outrider"),
    ],
)
def test_a_bundle_that_lacks_something_says_what(torn: EmptyRoot, missing: Path, said: str) -> None:
    path = torn.bundle / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = torn.run("/programs/again", "/plans/toy", 1)
    assert done.returncode == 1
    assert said in done.stderr
    assert "the bundle is incomplete, or made for another C library or processor: copy its whole folder" in done.stderr


def test_a_module_that_is_missed_late_is_a_sentence(torn: EmptyRoot) -> None:
    shutil.rmtree(torn.bundle / MODULES / "llguidance")
    torn.compile(HERE / "requests.c")
    done = torn.run("/programs/requests", "/plans/branches", "/scratch")
    assert done.returncode == 1
    assert "Outrider's environment is incomplete (No module named 'llguidance'); copy or install it" in done.stderr


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


def test_a_process_that_runs_a_python_is_told_so(made: tuple[Path, dict[str, Any]], toy_plan: Path) -> None:
    program = f"""
import ctypes
library = ctypes.CDLL({str(made[0] / "lib" / "liboutrider.so.0")!r})
library.outrider_last_error.restype = ctypes.c_char_p
out = ctypes.c_void_p()
print(library.outrider_params_create(ctypes.byref(out)), library.outrider_last_error().decode())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 ")
    assert "this process runs a Python of its own" in done.stdout


def test_cmake_finds_it_wherever_it_lies(made: tuple[Path, dict[str, Any]], toy_plan: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    _says_something(made_by_cmake(made[0], tmp_path), toy_plan)


@pytest.mark.parametrize("how", [[], ["--define-prefix"]])
def test_pkg_config_finds_it_wherever_it_lies(
    how: list[str], made: tuple[Path, dict[str, Any]], toy_plan: Path, tmp_path: Path
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    found = subprocess.run(
        ["pkg-config", *how, "--cflags", "--libs", "outrider"],
        env=os.environ | {"PKG_CONFIG_PATH": str(made[0] / "lib" / "pkgconfig")},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    program, source = tmp_path / "chat", ROOT / "tools" / "examples" / "c" / "chat.c"
    rpath = f"-Wl,-rpath,{made[0] / 'lib'}"
    subprocess.run(["cc", "-std=c11", str(source), "-o", str(program), *found, rpath], check=True)
    _says_something(program, toy_plan)


def _says_something(program: Path, plan: Path) -> None:
    done = subprocess.run(
        [program, plan, "4"], input="import\n", env={}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


# What it has.


def test_it_is_small_enough(made: tuple[Path, dict[str, Any]]) -> None:
    folder, said = made
    total = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    assert total == said["bytes"]
    assert total <= MOST_BYTES


@pytest.mark.long
def test_what_it_costs_is_measured(
    made: tuple[Path, dict[str, Any]], toy_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure_bundle([str(made[0]), str(toy_plan), "--reps", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == made[1]["bytes"]
    for stages in report["stages"].values():
        assert list(stages) == ["first_call", "open", "first_token", "second_token"]
        assert all(value > 0 for row in stages.values() for value in row.values())
    assert report["modules"]["numpy"] > 50
    # On the way to the first token of a plan that has a chat template and no structured outputs:
    assert not {"asyncio", "rich", "llguidance", "argparse", "unittest", "ssl"} & set(report["modules"])
    assert sum(report["modules"].values()) < 520
    assert measure_bundle([str(made[0]), str(toy_plan), "--reps", "1"]) == 0
    assert "first call and open together" in capsys.readouterr().out
    assert measure_bundle([str(toy_plan), str(toy_plan)]) == 2
    assert "is no bundle; make one with" in capsys.readouterr().err


def test_every_file_is_listed_once_with_its_licence(made: tuple[Path, dict[str, Any]], listed: dict[str, Any]) -> None:
    folder, said = made
    files = [file for component in listed["components"] for file in component["files"]]
    texts = [file for component in listed["components"] for file in component["licence_files"]]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    assert len(files) == len(set(files))
    assert {*files, *texts, LIST} == there
    names = {component["name"]: component for component in listed["components"]}
    assert {"Python", "outrider", "numpy", "onnxruntime", "tokenizers", "libstdc++", "libgcc_s"} <= set(names)
    for component in names.values():
        assert component["version"], component["name"]
        assert component["licence"] != "unknown", component["name"]
        assert component["licence_files"] or any(component["name"] in warning for warning in said["warnings"])
        assert component["bytes"] == sum((folder / file).lstat().st_size for file in component["files"])


def needed(path: Path) -> list[str]:
    """Names of the libraries that `path` needs."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _said("readelf", "--wide", "--dynamic", path))


def test_nothing_in_it_points_to_where_it_was_made(made: tuple[Path, dict[str, Any]], listed: dict[str, Any]) -> None:
    tools = Tools()
    names = {Path(file).name for component in listed["components"] for file in component["files"]}
    objects = [path for path in made[0].rglob("*.so*") if not path.is_symlink()]
    assert len(objects) > 30
    for path in objects:
        assert all(folder.startswith("$ORIGIN") for folder in tools.run_paths(path)), path
        assert {name for name in needed(path) if name not in names | SYSTEM} == set(), path
    assert "/" not in listed["glibc"]
    assert re.fullmatch(r"\d+\.\d+", listed["glibc"])
    for path in (made[0] / MODULES).rglob("*.pyc"):
        text = path.read_bytes()
        assert str(ROOT).encode() not in text, path
    assert not list(made[0].rglob("*.py"))


# Making one.


def test_a_folder_that_is_no_bundle_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(EmbedError, match="exists and is no bundle, so it is not replaced; pass another folder"):
        bundle(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(EmbedError, match="is no bundle"):
        bundle(tmp_path / "file")
    with pytest.raises(EmbedError, match=r"cannot be written to .*pass another folder"):
        bundle(tmp_path / "file" / "out")


@pytest.mark.parametrize("tool", ["readelf", "strip", "ldd", "patchelf"])
def test_a_missing_tool_is_named(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **how: None if name == tool else which(name, **how))
    with pytest.raises(EmbedError, match=rf"a bundle is made with {tool}, which is not on PATH; (install|run)"):
        bundle(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_modules, "DISTRIBUTIONS", ("no-such-package",))
    with pytest.raises(EmbedError, match=r"the package no-such-package is not installed in .*pip install"):
        find_modules(["outrider.runtime.embed.calls"])


@pytest.mark.long
def test_a_bundle_that_does_not_start_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not carried along, or a module that nothing names, is found while the bundle is made."""
    monkeypatch.setitem(bundle_modules.LEFT_OUT, "tokenizers.models", "is missed by this test")
    with pytest.raises(EmbedError, match=r"(?s)the bundle does not start: .*tokenizers"):
        bundle(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_packages_within_packages_are_listed_or_warned_of(tmp_path: Path) -> None:
    crates = {"name": "aho", "version": "1.2", "licenses": [{"license": {"id": "MIT"}}]}
    named = {"name": "base", "version": "3", "licenses": [{"expression": "MIT OR Apache-2.0"}]}
    silent, tests = {"name": "mute"}, {"name": "testing", "scope": "excluded"}
    info = tmp_path / "crusty-1.0.dist-info"
    (info / "sboms").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: crusty\nVersion: 1.0\nLicense-Expression: MIT\n")
    (info / "sboms" / "crusty.cyclonedx.json").write_text(json.dumps({"components": [crates, named, silent, tests]}))
    (info / "RECORD").write_text("crusty-1.0.dist-info/sboms/crusty.cyclonedx.json,,\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        found = of_distribution("crusty")
    assert found.inside == [
        {"name": "aho", "version": "1.2", "licence": "MIT"},
        {"name": "base", "version": "3", "licence": "MIT OR Apache-2.0"},
        {"name": "mute", "version": "", "licence": "unknown"},
    ]
    assert found.to_json()["inside"] == found.inside
    assert found.to_json()["licence_files"] == ["licences/crusty/crusty.cyclonedx.json"]
    assert not found.has_licence_text
    unlisted = Component("llguidance", "1", "MIT", {"LICENSE": tmp_path})
    listed = Component("tokenizers", "1", "MIT", {"LICENSE": tmp_path}, found.inside)
    (warning,) = Bundle(tmp_path, 1, [unlisted, listed], "2.36", "x86_64").warnings
    assert warning.startswith("llguidance 1 has other packages compiled into it and no list of them")


def test_imports_are_found_wherever_they_stand() -> None:
    names = {module.name for module in find_modules(["outrider.runtime.embed.calls"])}
    ours = {"outrider", "outrider.runtime", "outrider.runtime.embed.calls", "outrider.plans.chat_template"}
    assert {*ours, "jinja2.sandbox"} <= names  # within functions
    assert {"numpy._core._methods", "_strptime", "_sha256"} <= names  # by compiled code
    assert not {"outrider.runtime.server.app", "outrider.runtime.__main__", "numpy.testing", "torch", "rich"} & names
    assert set(HIDDEN["ctypes"]) <= names
