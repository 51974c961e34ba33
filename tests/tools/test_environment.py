"""`environment.sh` installs once, says nothing it need not, and notices a change. pip is a stub that keeps a log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "tools/constraints.txt", "plugins/CMakeLists.txt", "plugins/csrc/op.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    shutil.copy(REPOSITORY / "tools" / "environment.sh", tmp_path / "tools")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> pip.log\n')
    python.chmod(0o755)
    (python.parent / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    return tmp_path


def enter(clone: Path, extras: str) -> int:
    """Source the script; gives how many installations there have been."""
    script = f"set -euo pipefail; source tools/environment.sh {extras}"
    environment = os.environ | {"PYTHON": sys.executable}
    ended = subprocess.run(["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return sum("-e" in line.split() for line in (clone / "pip.log").read_text().splitlines())


def test_what_is_compiled_is_installed_once_and_again_after_a_change(clone: Path) -> None:
    for extras in ("compiler", "compiler", "compiler,dev", "compiler,dev"):
        assert enter(clone, extras) == 1
    assert (clone / "pip.log").read_text().splitlines().count("- compiler,dev") == 1
    (clone / "plugins" / "csrc" / "op.h").write_text("y")
    assert enter(clone, "compiler,dev") == enter(clone, "compiler") == 2


def test_extras_are_added_by_their_packages() -> None:
    script = (REPOSITORY / "tools" / "environment.sh").read_text()
    program = script.partition("<<'END'")[2].partition("\n")[2].partition("\nEND\n")[0]

    def packages(extras: str) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, "-c", program, extras]
        return subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True)

    found = packages("ray,embed").stdout.splitlines()
    assert {'"cffi>=2"', '"ray[serve]>=2.60"', '"fastapi>=0.115"'} <= set(found)  # an extra of extras has theirs
    assert not any("outrider" in each for each in found)
    assert "There is no extra 'sevre'; there are compiler, " in packages("sevre").stderr
