"""What the tests of damaged plans share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def plan(toy_plan: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(toy_plan, tmp_path / "plan")
