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


def test_a_clean_clone_installs_without_a_complaint_and_once(clone: Path) -> None:
    assert enter(clone, "compiler") == 1
    assert enter(clone, "compiler") == 1


def test_a_change_installs_again_for_every_set_of_extras(clone: Path) -> None:
    assert enter(clone, "compiler") == 1
    assert enter(clone, "compiler,dev") == 2
    (clone / "plugins" / "csrc" / "op.h").write_text("y")
    assert enter(clone, "compiler") == 3
    assert enter(clone, "compiler,dev") == 4
