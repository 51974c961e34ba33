"""`build.json`, beside `plan.json`: what a build took. It is no part of the plan: two builds differ in this file alone.

Nothing that runs reads it, so it has no hash, and a plan without it is whole.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from outrider.plans.buffers import Strict
from outrider.plans.errors import PlanError

BUILD_RECORD = "build.json"
_LARGEST = 2**16  # bytes


class BuildRecord(Strict):
    """`peak_rss_bytes` is that of the process that built, from its start; None where the system does not report it.

    `reused` names the backends whose engines an earlier build gave.
    """

    seconds: float
    peak_rss_bytes: int | None
    processor: str
    reused: tuple[str, ...] = ()


def write_build_record(record: BuildRecord, root: Path) -> None:
    (root / BUILD_RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_build_record(root: Path) -> BuildRecord | None:
    """The record of the plan at `root`; None where it has none. Raises `PlanError` for a file that is none."""
    path = root / BUILD_RECORD
    try:
        if not os.path.lexists(path):
            return None
        if not path.is_file():  # reading a pipe would never end
            raise OSError("it is no file")
        with path.open(encoding="utf-8") as file:
            return BuildRecord.model_validate_json(file.read(_LARGEST))
    except (OSError, UnicodeDecodeError, ValidationError):
        raise PlanError(f"{path} is no record of a build; remove it, the plan needs none") from None
