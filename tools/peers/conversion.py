"""A checkpoint in onnxruntime-genai's own format, converted by the package's own builder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from commands.console import stderr
from compiler.checkpoint import checkpoint_hashes
from compiler.identity import digest
from plans.errors import OutriderError


def convert_for_genai(checkpoint: Path, work: Path) -> Path:
    """The checkpoint in fp32 for the CPU; kept in `work` under the hash of the checkpoint's files.

    Raises `OutriderError` with the builder's last words where it fails.
    """
    folder = work / f"genai-fp32-{digest(checkpoint_hashes(checkpoint))[:12]}"
    if folder.is_dir():
        return folder
    unfinished = work / f".{folder.name}.building"
    shutil.rmtree(unfinished, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(checkpoint),
        "-o",
        str(unfinished),
    ]
    with stderr.status(f"converting {checkpoint} with onnxruntime-genai's builder"):
        ended = subprocess.run([*command, "-p", "fp32", "-e", "cpu"], capture_output=True, text=True, errors="replace")
    if ended.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        raise OutriderError(f"onnxruntime-genai's builder cannot convert {checkpoint} ({said[-1].strip()})")
    unfinished.rename(folder)
    return folder
