"""`python -m outrider.runtime.ray_serve` up to the cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import serve

from outrider.runtime.ray_serve.command import _delete

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("ray", "starlette", "fastapi", "uvicorn", "h11", "prometheus_client")))
from outrider.runtime.ray_serve.command import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)


def test_help_and_what_is_missing_are_told_without_the_extras(tmp_path: Path) -> None:
    helped = run_without_extras("--help")
    assert helped.returncode == 0, helped.stderr
    assert "--replicas" in helped.stdout
    missing = run_without_extras(str(tmp_path))
    assert missing.returncode == 2
    assert "Serving on Ray needs ray, which is not installed" in " ".join(missing.stderr.split())
    assert "Traceback" not in missing.stderr


@pytest.mark.parametrize(
    ("served_before", "present", "ended"),
    [
        (False, {"ours"}, ["all"]),
        (False, set(), ["all"]),  # told to end before it was there
        (False, {"ours", "another's"}, ["ours"]),
        (True, {"ours"}, ["ours"]),
        (True, {"another's"}, []),
    ],
)
def test_what_others_serve_is_left(
    monkeypatch: pytest.MonkeyPatch, served_before: bool, present: set[str], ended: list[str]
) -> None:
    """Which applications there are is made up: others come to one's Ray Serve only on a cluster of several users."""
    found: list[str] = []
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(present)))
    monkeypatch.setattr(serve, "delete", found.append)
    monkeypatch.setattr(serve, "shutdown", lambda: found.append("all"))
    _delete("ours", served_before)
    assert found == ended
