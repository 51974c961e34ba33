"""`environment.sh` installs once, says nothing it need not, and notices a change (pip is a stub that keeps a log);
`outrider doctor` says what is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import outrider.tools.doctor
from outrider.tools.doctor import examine, main
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


def test_a_plans_backends_and_the_extras_are_reported(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(toy_plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend onnxruntime-cpu"] == "runs here"
    assert {"outrider", "processor", "nvidia driver", "extra serve", "extra dev"} <= set(found)
    assert main([]) == 0
    assert "extra serve" in capsys.readouterr().out
    assert main([str(toy_plan.parent)]) == 2
    assert "plan.json" in capsys.readouterr().err


def test_what_an_extra_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy", "nothing-so-named>=2; extra == 'serve'", "numpy>=1; extra == 'serve'"]
    needed += ["outrider[serve]; extra == 'x'"]
    monkeypatch.setattr(outrider.tools.doctor, "requires", lambda _: needed)
    found = examine(None)
    assert found["extra serve"] == "lacks nothing-so-named"
    assert "extra x" not in found
