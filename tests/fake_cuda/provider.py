"""Processes in which ONNX Runtime's CUDA provider runs over the libraries of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_cuda import LIBRARIES, Recorded, read_record

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Ended:
    """What a program said, and what CUDA's libraries recorded of it."""

    answer: Any
    log: str
    record: list[Recorded]

    def events(self, event: str) -> list[str]:
        return [each.text for each in self.record if each.event == event]


@dataclass(frozen=True)
class CudaProvider:
    """`site` holds onnxruntime-gpu, `libraries` those of CUDA, `emulator` our ops' kernels."""

    site: Path
    libraries: Path
    emulator: Path

    def run(self, program: str, *arguments: object, folder: Path, without: str | None = None) -> Ended:
        """Run a program that prints JSON; `without` names a library that cannot be loaded."""
        there = folder / "libraries"
        there.mkdir()
        for name in LIBRARIES:
            if name == without:
                (there / name).touch()  # hides one of the system's
            else:
                (there / name).symlink_to(self.libraries / name)
        environment = {
            "LD_LIBRARY_PATH": str(there),
            "OUTRIDER_CUDA_RECORD": str(folder / "record"),
            "OUTRIDER_EMULATOR": str(self.emulator),
            "PYTHONPATH": os.pathsep.join([str(self.site), str(REPOSITORY)]),
        }
        ended = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=os.environ | environment, cwd=folder, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        record = folder / "record"
        return Ended(json.loads(ended.stdout), ended.stderr, read_record(record) if record.exists() else [])
