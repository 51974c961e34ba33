"""The same function in processes that use other instructions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

BETTER_THAN_PLAIN = (
    ("neon", "i8mm") if platform.machine() in ("aarch64", "arm64") else ("avx2", "avxvnni", "avx512", "amx")
)
"""What processors of this machine's kind may have."""
Results = dict[str, NDArray[Any]]


def with_instructions(isa: str, module: str, function: str, argument: Path) -> Results:
    """Return what the function of the module gives for the argument; skip the test where the processor lacks `isa`."""
    found = _run(isa, module, function, argument)
    if found is None:
        pytest.skip(f"this processor has no {isa}")
    return found


@cache
def _run(isa: str, module: str, function: str, argument: Path) -> Results | None:
    out = Path(tempfile.mkdtemp()) / "found.npz"
    code = (
        "import sys; sys.path.insert(0, '.'); import numpy; from pathlib import Path; "
        f"from {module} import {function}; numpy.savez({str(out)!r}, **{function}(Path({str(argument)!r})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OUTRIDER_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "lacks" in ran.stderr:
        return None
    assert ran.returncode == 0, ran.stderr[-3000:]
    with np.load(out) as arrays:
        return dict(arrays)
