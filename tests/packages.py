"""Packages that a test installs from the package index, or is skipped without."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

# What pip says when it cannot reach its index; anything else that fails is a failure of ours.
UNREACHABLE = (
    "Could not fetch URL",
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
)
_NO_WHEEL = ("No matching distribution found", "Could not find a version")  # for this Python and this machine


def skip_without_index(ended: subprocess.CompletedProcess[str]) -> None:
    """Skip the test if pip has failed because it cannot reach its index."""
    if ended.returncode != 0 and any(sign in ended.stdout + ended.stderr for sign in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {ended.stderr.strip().splitlines()[-1]}")


def install_apart(requirement: str, folder: Path) -> Path:
    """Install a package without its dependencies into `folder`, where it is kept: for the head of a `PYTHONPATH`.

    Skips the test where there is no such wheel for this machine, or no index.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = folder.with_suffix(".made")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1"]
            install += ["--no-deps", "--only-binary", ":all:", "--upgrade", "--target", str(folder), requirement]
            ended = subprocess.run(install, capture_output=True, text=True, timeout=900)
            skip_without_index(ended)
            if ended.returncode != 0 and any(sign in ended.stderr for sign in _NO_WHEEL):
                pytest.skip(f"there is no wheel of {requirement} for this machine")
            assert ended.returncode == 0, ended.stderr
            made.touch()
    return folder
