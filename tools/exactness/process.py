"""The parent's side of a worker: a process whose conditions' outcomes are read as they come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from typing import Any


def run_process(job: dict[str, Any], isa: str | None, without: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the answer to every condition of a job (see `worker`), run in a process of its own.

    Our kernels use `isa`, and NumPy's do `without` these features of the processor.

    A process that ends before its time gives its last words as `error` in place of the condition it ended in.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider.tools.exactness.worker"],
            env=environment(isa, without),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            encoding="utf-8",
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(job), file=process.stdin, flush=True)
            answered, failed = 0, False
            for line in process.stdout:
                answer: dict[str, Any] = json.loads(line)
                answered, failed = answered + 1, "error" in answer
                yield answer
            process.wait()
            if answered < len(job["conditions"]) and not failed:
                said.seek(0)
                words = said.read().strip().splitlines() or [f"exit status {process.returncode}"]
                yield {"error": f"its process ended: {words[-1]}"}
        finally:
            process.kill()
            process.communicate()


def environment(isa: str | None, without: Sequence[str]) -> dict[str, str]:
    """The variables of a process with other instructions (see `run_process`)."""
    found = dict(os.environ)
    if isa is not None:
        found["OUTRIDER_ISA"] = isa
    if without:
        found["NPY_DISABLE_CPU_FEATURES"] = " ".join(without)
    return found
