"""What tests of commands share: a folder to write into, and a command's output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Main = Callable[[list[str]], int]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    """A copy of the toy's folder: recipe, checkpoints, prompts, and the plan in `plan`."""
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints; of one that is to refuse (status 2), what it says on standard error, in one line."""

    def run(main: Main, *arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([str(each) for each in arguments]) == status
        printed = capsys.readouterr()
        return printed.out if status != 2 else " ".join(printed.err.split())

    return run


@pytest.fixture
def report(output: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """The JSON object that a command prints."""

    def run(main: Main, *arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(output(main, *arguments, "--json"))
        return found

    return run
