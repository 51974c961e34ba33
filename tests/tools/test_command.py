"""The command `outrider`: what it runs, what it refuses, and that nothing of the user's stands in for our packages."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points, version
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider import Runtime
from outrider.compiler.__main__ import _parser as compiler_parser
from outrider.runtime.__main__ import _parser as runtime_parser
from outrider.tools import command
from outrider.tools.command import COMMANDS, COMPILER, GROUPS, RUNTIME
from tests.conftest import REPOSITORY

Captured = pytest.CaptureFixture[str]

PROGRAM = """
import sys
import runtime, tools, compiler  # the user's
from outrider import Runtime
assert {runtime.OWN, tools.OWN, compiler.OWN} == {True}
print(Runtime.load(sys.argv[1], threads=1).generate("a", max_new_tokens=3).token_ids)
"""


@pytest.mark.parametrize(("module", "make"), [(COMPILER, compiler_parser), (RUNTIME, runtime_parser)])
def test_every_command_of_a_package_is_listed_with_its_own_words(module: str, make) -> None:
    (commands,) = (a for a in make("outrider")._actions if isinstance(a, argparse._SubParsersAction))
    theirs = {choice.dest: choice.help for choice in commands._choices_actions}
    assert {name: c.help for name, c in COMMANDS.items() if c.module == module} == theirs


def test_help_lists_every_command_in_its_group(capsys: Captured) -> None:
    for arguments in (["--help"], []):
        assert command.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        for group, commands in GROUPS.items():
            below = lines[lines.index(f"{group}:") + 1 :][: len(commands)]
            assert [line.split()[0] for line in below] == list(commands)
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"outrider {version('outrider')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_calls_itself_as_it_was_called(name: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: outrider {name} ")
    assert "python -m" not in text.replace("`python -m outrider.tools.", "")
    assert command.main([name, "--no-such-option"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"ee outrider {name} --help")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["biuld"], "no command 'biuld'; did you mean build? See outrider --help"),
        (["xyzzy"], "no command 'xyzzy'; it has build, inspect"),
        (["--json", "build"], "--json stands before a command; see outrider --help"),
    ],
)
def test_what_is_no_command_is_refused(arguments: list[str], said: str, capsys: Captured) -> None:
    assert command.main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_package_that_a_command_lacks_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    missing = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    monkeypatch.setattr(command, "import_module", Mock(side_effect=missing))
    assert command.main(["exactness", "plan"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "outrider exactness needs yaml" in said
    assert "pip install '.[compiler]'" in said


def test_the_command_starts_without_what_it_does_not_need() -> None:
    program = (
        "import json, sys; from outrider.tools.command import main; main(['--help']); print(json.dumps([*sys.modules]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("outrider.").partition(".")[0] for name in json.loads(ended.stdout.splitlines()[-1])}
    assert loaded & {"torch", "numpy", "onnx", "onnxruntime", "pydantic", "compiler", "runtime"} == set()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with modules that are called as our folders are."""
    for name in ("commands", "compiler", "plugins", "runtime", "tools"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("OWN = True\n", encoding="utf-8")
    (tmp_path / "project" / "plans.py").write_text("OWN = True\n", encoding="utf-8")
    return tmp_path / "project"


def run_in(project: Path, *command: str | Path) -> str:
    ended = subprocess.run(
        command, cwd=project, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_a_project_may_have_folders_of_the_same_names(toy: Runtime, toy_plan: Path, project: Path) -> None:
    (script,) = entry_points(group="console_scripts", name="outrider")
    assert script.value == "outrider.__main__:main"
    shown = run_in(project, Path(sysconfig.get_path("scripts")) / "outrider", "inspect", toy_plan)
    assert shown.startswith("toy ")
    assert run_in(project, sys.executable, "-m", "outrider", "inspect", toy_plan) == shown
    assert run_in(project, sys.executable, "-m", "outrider.compiler", "inspect", toy_plan) == shown
    expected = toy.generate("a", max_new_tokens=3).token_ids
    assert run_in(project, sys.executable, "-c", PROGRAM, toy_plan) == f"{expected}\n"


@pytest.mark.long
def test_a_users_type_checker_sees_the_options(project: Path) -> None:
    (project / "own.py").write_text(
        "from outrider import Runtime, __version__\n"
        "def answer(runtime: Runtime) -> str:\n"
        "    return __version__ + runtime.generate('a', max_new_tokens=3, temperature=0.5).text\n"
        "def wrong(runtime: Runtime) -> None:\n"
        "    runtime.generate('a', max_new_tokens='3')\n",
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", project / "cache", "own.py"],
        cwd=project, env=os.environ | {"MYPYPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    first, *_, last = ended.stdout.splitlines()
    assert first.startswith("own.py:5: error: No overload variant"), ended.stdout
    assert last.startswith("Found 1 error in 1 file"), ended.stdout
