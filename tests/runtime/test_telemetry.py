"""ONNX Runtime's own packages report what they run unless an environment variable is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_importing_the_runtime_leaves_no_identity_of_the_machine(tmp_path: Path) -> None:
    unset = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-B", "-c", "import outrider.runtime.runtime"], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []  # it would keep one in .cache, and a database of what was not yet sent
