"""The house's plan as a test: which package may know which, and what stays unloaded and unwritten."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
NAME = "outrider"  # under which all is installed
PACKAGES = ("plans", "plugins", "commands", "compiler", "runtime")
OURS = {*PACKAGES, "tools", "tests"}
ALLOWED = {
    "plans": {"plans"},
    "plugins": {"plugins", "plans"},
    "commands": {"commands", "plans"},
    "compiler": {"compiler", "plans", "plugins", "commands"},
    "runtime": {"runtime", "plans", "plugins", "commands"},
    "tools": OURS - {"tests"},
}
# Build-time libraries, and where alone they may be imported. `plugins.onnx_ops` serves the compiler.
HEAVY = {"torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "transformers", "yaml"}
GRAPH_OPS, HEAVY_OF_GRAPH_OPS = "plugins/onnx_ops/", {"onnx"}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (REPOSITORY / folder).rglob("*.py") if "build" not in p.relative_to(REPOSITORY).parts)


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever in it, relative ones resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"{NAME}.runtime" if alias.name == NAME else alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts[: -node.level]) if node.level else ""
            yield ".".join(part for part in (above, node.module or "") if part)
            if node.module == NAME:  # a folder, or what the runtime has for users
                yield from (f"{NAME}.{alias.name if alias.name in OURS else 'runtime'}" for alias in node.names)


def top(module: str) -> str:
    """Return the package of a module, or the name of our folder that it is in."""
    return module.removeprefix(f"{NAME}.").partition(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_arrows(package: str) -> None:
    turned = [
        f"{relative(path)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if top(module) in OURS - ALLOWED[package]
    ]
    assert turned == []


def test_the_laboratory_is_imported_by_nothing_that_is_installed() -> None:
    """`tools/lab` stays out of the wheel, so no module of the wheel may import it, by an import or by its name."""
    named = re.compile(r"""(["']|import |from )outrider\.tools(\.| import )lab\b""")
    users = [
        relative(path)
        for package in (*PACKAGES, "tools", NAME)
        for path in sources(package)
        if not path.is_relative_to(REPOSITORY / "tools" / "lab") and named.search(path.read_text("utf-8"))
    ]
    assert users == []
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    assert "outrider/tools/lab/**" in project["tool"]["scikit-build"]["wheel"]["exclude"]


def test_our_packages_are_imported_by_the_name_that_is_installed() -> None:
    """In code, in code within texts, and in documents."""
    said = re.compile(rf"(\b(import|from)|-m\",?) \"?({'|'.join(sorted(OURS - {'tests'}))})\b[. \";]")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    named = [
        f"{name}: {line.strip()}"
        for name in listed.stdout.split()
        if name.endswith((".py", ".c", ".sh", ".yaml", ".md")) and not name.startswith("tools/results/")
        for line in (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        if said.search(line)
    ]
    assert [line.partition(":")[0] for line in named] == ["tools/lab/paired_worker.py"], named  # of older checkouts


def test_nothing_refers_to_documents_outside_the_tree() -> None:
    cited = re.compile(r"\b(DESIGN|FEATURES|HOUSE|FACTS) (section|row)|\bseed 00\d")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = [
        name
        for name in listed.stdout.split()
        if name.endswith((".py", ".pyi", ".h", ".cc", ".c", ".md")) and name != "tests/test_architecture.py"
        if not name.startswith("tools/results/") and cited.search((REPOSITORY / name).read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("package", ["compiler", "runtime"])
def test_command_lines_are_known_to_commands_alone(package: str) -> None:
    """Neither `commands` nor a command's module is imported by anything that is no command."""
    commands = re.compile(
        rf"{package}/(__main__|arguments|cli/\w+|batch/command|batch/run|server/command|embed/command|ray_serve/command|ray_serve/__main__)\.py"
    )
    known = {
        f"{NAME}.{relative(p).removesuffix('.py').replace('/', '.')}"
        for p in sources(package)
        if commands.fullmatch(relative(p))
    }
    users = {relative(p) for p in sources(package) if any(top(m) == "commands" or m in known for m in imports(p))}
    assert [path for path in sorted(users) if not commands.fullmatch(path)] == []


@pytest.mark.parametrize("package", ["plans", "plugins", "commands", "runtime"])
def test_build_time_libraries_are_imported_by_the_compiler_alone(package: str) -> None:
    found = [
        f"{relative(path)} imports {module}"
        for path in sources(package)
        for module in imports(path)
        if top(module) in HEAVY - (HEAVY_OF_GRAPH_OPS if relative(path).startswith(GRAPH_OPS) else set())
    ]
    assert found == []


def test_the_runtime_knows_nothing_of_the_ops_as_graphs() -> None:
    found = [
        relative(path)
        for path in sources("runtime")
        if any(m.startswith("outrider.plugins.onnx_ops") for m in imports(path))
    ]
    assert found == []


def test_importing_the_runtime_loads_nothing_of_the_compiler() -> None:
    """In a fresh interpreter, all modules of the package but the command line's entry, and those on Ray, which itself
    loads PyYAML."""
    modules = [relative(p).removesuffix(".py").replace("/", ".") for p in sources("runtime")]
    modules = [m for m in modules if not m.endswith("__main__") and not m.startswith("runtime.ray_serve.")]
    modules = sorted(f"{NAME}.{m.removesuffix('.__init__')}" for m in modules)
    program = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps([*sys.modules]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    loaded = json.loads(ended.stdout)
    assert "outrider.runtime.session" in loaded
    assert {top(module) for module in loaded} & (HEAVY | {"compiler", "tools", "tests"}) == set()


def test_every_folder_of_ours_says_what_lives_in_it() -> None:
    folders = {path.parent for folder in (*PACKAGES, "tools", NAME) for path in sources(folder)}
    missing = sorted(relative(folder) for folder in folders if not (folder / "README.md").is_file())
    assert missing == []


WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "datetime.datetime.now",
              "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}  # fmt: skip
TELLS_THE_TIME = {
    "plans/chat_template.py",  # to templates that print the date
    "runtime/server/app.py",  # to clients: `created`
    "runtime/server/stamps.py",
    "runtime/server/record.py",  # to collectors of traces
    "runtime/batch/run.py",  # how long a batch took, told by processes of several machines; nothing waits by it
    "runtime/batch/ray_run.py",
}


def wall_clock_calls(path: Path) -> Iterator[str]:
    """Names by which a file refers to the wall clock, as they are imported."""
    tree, names = ast.parse(path.read_text(encoding="utf-8")), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            full = f"{names.get(first, first)}.{rest}".rstrip(".")
            if full in WALL_CLOCK:
                yield full


def test_nothing_is_timed_by_the_wall_clock() -> None:
    """It jumps. Deadlines, idle times and budgets count on clocks that do not (`time.monotonic`, `perf_counter`)."""
    found = {relative(path) for folder in ("runtime", "commands", "plans") for path in sources(folder)
             if any(wall_clock_calls(path))}  # fmt: skip
    assert found == TELLS_THE_TIME
    native = [path for path in (REPOSITORY / "plugins" / "csrc").rglob("*") if path.suffix in (".h", ".cc", ".cpp")]
    clocks = re.compile(r"system_clock|gettimeofday|CLOCK_REALTIME|\btime\((NULL|nullptr|0)\)")
    assert native
    assert [relative(path) for path in native if clocks.search(path.read_text(encoding="utf-8"))] == []


def test_importing_the_runtime_leaves_no_identity_of_the_machine(tmp_path: Path) -> None:
    unset = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-B", "-c", "import outrider.runtime.runtime"], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []  # it would keep one in .cache, and a database of what was not yet sent
