"""A plan on disk: opened strictly, so that nothing but a whole and unchanged plan gets past this file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from plans.errors import PlanError
from plans.manifest import FORMAT_VERSION, Manifest

MANIFEST = "plan.json"
_LARGEST_MANIFEST = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Plan:
    """An opened plan. `file()` is the only way to a path inside it."""

    root: Path
    manifest: Manifest

    def file(self, relative: str) -> Path:
        """Absolute path of a listed file. Raises `PlanError` for any other path."""
        if all(entry.path != relative for entry in self.manifest.files):
            raise PlanError(
                f"{self.root / MANIFEST} refers to {relative!r}, which is not in its file list; build it again"
            )
        return self.root / relative


def open_plan(root: Path, *, verify: bool = True) -> Plan:
    """Read `plan.json` and check format version, paths, sizes and (with `verify`) hashes of every file.

    Raises `PlanError`; the message names the file, what is wrong and what to do.
    """
    manifest = read_manifest(root)
    for entry in manifest.files:
        path = inside(root, entry.path)
        if not path.is_file():
            raise PlanError(f"{path} is missing; the plan is incomplete, build it again")
        size = path.stat().st_size
        if size != entry.size:
            raise PlanError(f"{path} has {size} bytes where the plan says {entry.size}; build the plan again")
        if verify and file_sha256(path) != entry.sha256:
            raise PlanError(f"{path} does not match its sha256; it was changed or damaged, build the plan again")
    return Plan(root, manifest)


def read_manifest(root: Path) -> Manifest:
    """Parse and validate `plan.json` alone."""
    path = root / MANIFEST
    if not path.is_file():
        raise PlanError(f"{root} is not a plan: it has no {MANIFEST}; build one with `python -m compiler build`")
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise PlanError(f"{path} is larger than any plan's; build the plan again")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); build the plan again") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{path} has format version {version!r}, this runtime reads {FORMAT_VERSION}; "
            "build the plan with this version of outrider"
        )
    try:
        return Manifest.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"{path}: {key}: {first['msg']}; build the plan again") from None


def inside(root: Path, relative: str) -> Path:
    """`root / relative`, refused unless it stays inside `root` (links included)."""
    pure = PurePosixPath(relative)
    parts = relative.split("/")
    if pure.is_absolute() or "\\" in relative or ":" in relative or not all(p and p not in (".", "..") for p in parts):
        raise PlanError(f"{root / MANIFEST} lists the path {relative!r}, which leaves the plan; do not use this plan")
    path = root.joinpath(*parts)
    if not path.resolve().is_relative_to(root.resolve()):
        raise PlanError(f"{path} leads out of the plan through a link; do not use this plan")
    return path


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
