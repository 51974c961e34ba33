"""The command `outrider`: what it runs, what it refuses, and that nothing of the user's stands in for our packages."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import outrider_command
from compiler.__main__ import _parser as compiler_parser
from runtime.__main__ import _parser as runtime_parser
from tests.conftest import REPOSITORY
from tools import command
from tools.command import COMMANDS, COMPILER, GROUPS, RUNTIME

Captured = pytest.CaptureFixture[str]

# What a wheel leaves in site-packages, without the finder of an editable installation: `sys.path` as Python makes it
# of PYTHONPATH, our packages behind everything else.
INSTALLED = """
import os, sys
before = os.environ["PYTHONPATH"].split(os.pathsep)
standard = [entry for entry in sys.path if entry and entry not in before]
sys.path[:] = [*map(os.path.abspath, before), *standard, *sys.argv.pop(1).split(":")]
from outrider_command import main
sys.exit(main())
"""


@pytest.mark.parametrize(("module", "make"), [(COMPILER, compiler_parser), (RUNTIME, runtime_parser)])
def test_every_command_of_a_package_is_listed_with_its_own_words(module: str, make) -> None:
    (commands,) = (a for a in make("outrider")._actions if isinstance(a, argparse._SubParsersAction))
    theirs = {choice.dest: choice.help for choice in commands._choices_actions}
    assert {name: c.help for name, c in COMMANDS.items() if c.module == module} == theirs


def test_help_lists_every_command_in_its_group(capsys: Captured) -> None:
    for arguments in (["--help"], ["-h"], []):
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
    assert "python -m" not in text.replace("`python -m tools.", "")
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
    def missing(module: str) -> None:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(command, "import_module", missing)
    assert command.main(["modes", "plan"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "outrider modes needs yaml" in said
    assert "pip install '.[compiler]'" in said


def test_the_command_starts_without_what_it_does_not_need() -> None:
    program = "import json, sys\nfrom tools import command\ncommand.main(['--help'])\nprint(json.dumps([*sys.modules]))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(ended.stdout.splitlines()[-1])}
    assert loaded & {"torch", "numpy", "onnx", "onnxruntime", "pydantic", "compiler", "runtime"} == set()


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A project of the user's whose modules are called as ours are, and say so."""
    said = "raise SystemExit(f'{__name__} of the user')\n"
    for name in outrider_command.OURS - {"plans"}:
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text(said, encoding="utf-8")
    (tmp_path / "project" / "plans.py").write_text(said, encoding="utf-8")
    return tmp_path / "project"


@pytest.mark.parametrize("path", [None, "", ".", f".{os.pathsep}", "ABSOLUTE"])
def test_a_users_modules_with_our_names_change_nothing(toy_plan: Path, users_folder: Path, path: str | None) -> None:
    (script,) = entry_points(group="console_scripts", name="outrider")
    assert script.value == "outrider_command:main"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(users_folder) if path == "ABSOLUTE" else path
    ended = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "outrider", "inspect", toy_plan],
        cwd=users_folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("toy ")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Our packages as a wheel installs them."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(REPOSITORY / "tools" / "outrider_command.py", folder)
    for name in outrider_command.OURS:
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


@pytest.mark.parametrize("path", ["", "."])
def test_nor_do_they_for_a_wheel(toy_plan: Path, users_folder: Path, site: Path, path: str) -> None:
    """Without the finder of an editable installation, ours are found behind the user's by their place alone."""
    places = f"{site}:{sysconfig.get_path('purelib')}"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", INSTALLED, places, "inspect", toy_plan],
        cwd=users_folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("toy ")
