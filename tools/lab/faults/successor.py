"""Another plan of the same shape, with other weights: what a plan is replaced by."""

from __future__ import annotations

import json
import random
import shutil
from hashlib import sha256
from pathlib import Path

from outrider.plans.plan import MANIFEST, file_sha256, manifest_json

_BLOCK = 16  # bytes: as many as the largest number of a tensor has, so that swapped blocks hold numbers of its kind


def copy_plan(plan: Path, out: Path) -> Path:
    """A copy, so that the plan itself stays as it is."""
    return Path(shutil.copytree(plan, out))


def write_successor(plan: Path, out: Path, seed: int) -> Path:
    """A plan whose weights are those of `plan` in disorder: half of the pairs of neighbouring blocks are swapped."""
    copy_plan(plan, out)
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    draw = random.Random(seed)
    for file in manifest["files"]:
        path = out / file["path"]
        if path.suffix == ".bin":
            path.write_bytes(_disordered(path.read_bytes(), draw))
            file["sha256"] = file_sha256(path)
    manifest["identity"] = sha256(f"{manifest['identity']} {seed}".encode()).hexdigest()
    (out / MANIFEST).write_text(manifest_json(manifest), encoding="utf-8")
    return out


def _disordered(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for place in range(0, len(data) - 2 * _BLOCK, 2 * _BLOCK):
        if draw.random() < 0.5:
            one, two = slice(place, place + _BLOCK), slice(place + _BLOCK, place + 2 * _BLOCK)
            changed[one], changed[two] = data[two], data[one]
    return bytes(changed)


def write_over(plan: Path, other: Path) -> None:
    """What `dd conv=notrunc` or a careless program does: every file of `other` into the file of that name, in place,
    without making it shorter first."""
    for path in sorted(other.rglob("*")):
        if path.is_file():
            with (plan / path.relative_to(other)).open("r+b") as file:
                file.write(path.read_bytes())
