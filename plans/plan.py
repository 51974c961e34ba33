"""A plan on disk: opened strictly, so that nothing but a whole and unchanged plan gets past this file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.plans.build_record import BUILD_RECORD
from outrider.plans.check import problems
from outrider.plans.errors import PlanError
from outrider.plans.manifest import FORMAT_VERSION, Manifest, PlanFile
from outrider.plans.pass_prices import PASS_PRICES

MANIFEST = "plan.json"
_DIGEST = "digest"  # the key of `plan.json` that no field of the manifest is: sha256 of all the others
_LARGEST_MANIFEST = 16 * 2**20  # bytes
# Names of letters, digits and `_.-`, at most 100 long each: the same file on every system, never a drive or a stream.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}(/[A-Za-z0-9_.-]{1,100}){0,9}\Z")


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
    """Read `plan.json` and check it and the folder: no file too many or too few, sizes, with `verify` hashes.

    Where links lead to `root`, the plan is the one that it leads to now, not a later one. Raises
    `PlanError`; the message names the file, what is wrong and what to do.
    """
    root = _followed(root)
    manifest = read_manifest(root)
    try:
        for entry in manifest.files:
            _check_file(inside(root, entry.path), entry, verify)
        _check_nothing_else(root, {MANIFEST, BUILD_RECORD, PASS_PRICES, *(entry.path for entry in manifest.files)})
    except OSError as error:
        raise PlanError(f"{root} cannot be read ({error}); build the plan again") from None
    return Plan(root, manifest)


def manifest_json(content: Mapping[str, Any]) -> str:
    """The text of `plan.json` for these fields of a manifest, as JSON values, with the digest that loading checks."""
    fields = {key: value for key, value in content.items() if key != _DIGEST}
    return json.dumps(fields | {_DIGEST: _digest_of(_canonical(fields))}, indent=1)


def _followed(root: Path) -> Path:
    """Follow links on the way to `root`; `root` as it was given where there are none, for messages."""
    is_link = False
    try:
        is_link = root.is_symlink()
        place = root.resolve(strict=is_link)
    except (OSError, RuntimeError, ValueError) as error:
        if is_link:
            raise PlanError(
                f"{root} is a link that leads nowhere ({error}); point it to the folder of a plan"
            ) from None
        raise PlanError(f"{_brief(str(root))} cannot be read ({error}); pass the folder of a plan") from None
    return root if place == root.absolute() else place


def read_manifest(root: Path) -> Manifest:
    """Parse `plan.json` alone, check its digest and validate it. Raises `PlanError` as `open_plan`."""
    path = root / MANIFEST
    try:
        if not path.is_file():
            raise PlanError(f"{root} is not a plan: it has no {MANIFEST}; build one with `outrider build`")
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise PlanError(f"{path} is larger than any plan's; build the plan again")
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); build the plan again") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{path} has format version {_brief(version)}, this runtime reads {FORMAT_VERSION}; "
            "build the plan with this version of outrider"
        )
    digest = raw.pop(_DIGEST, None)
    try:
        text = _canonical(raw)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); build the plan again") from None
    if digest != _digest_of(text):
        raise PlanError(
            f"{path} was changed after the build: its {_DIGEST} is not that of its content; build the plan again"
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanError(f"{path}: {_brief(key)}: {first['msg']}; build the plan again") from None
    problem = next(problems(manifest), None)
    if problem is not None:
        raise PlanError(f"{path}: {problem}; build the plan again")
    return manifest


def inside(root: Path, relative: str) -> Path:
    """`root / relative`, refused unless it stays inside `root` (links included)."""
    parts = relative.split("/")
    if not _PLAIN.match(relative) or any(part in (".", "..") for part in parts):
        raise PlanError(
            f"{root / MANIFEST} lists the path {_brief(relative)}, which is none of a plan's; do not use this plan"
        )
    path = root.joinpath(*parts)
    try:
        stays = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a link to itself
        stays = False
    if not stays:
        raise PlanError(
            f"{path} leads out of the plan through a link. The folder itself may be a link, what is in it may not: "
            "copy the plan with `cp -rL`, where you trust what it leads to, or build it again"
        )
    return path


def _check_file(path: Path, entry: PlanFile, verify: bool) -> None:
    if not path.is_file():
        raise PlanError(f"{path} is missing; the plan is incomplete, build it again")
    size = path.stat().st_size
    if size != entry.size:
        raise PlanError(f"{path} has {size} bytes where the plan says {entry.size}; build the plan again")
    if verify and file_sha256(path) != entry.sha256:
        raise PlanError(f"{path} does not match its sha256; it was changed or damaged, build the plan again")


def _check_nothing_else(root: Path, listed: set[str]) -> None:
    """An unlisted file has no hash, and an engine or the tokenizer might read it."""
    for folder, folders, files in os.walk(root, followlinks=False):
        here = Path(folder)
        for name in (*files, *(f for f in folders if (here / f).is_symlink())):
            path = here / name
            if path.relative_to(root).as_posix() not in listed:
                raise PlanError(f"{path} is not in the file list of {MANIFEST}; remove it, or build the plan again")


def _canonical(fields: Mapping[str, Any]) -> str:
    """Write values in one layout, so that equal values give equal text. Programs and tables are
    read in their order, so that it counts."""
    return json.dumps(fields, separators=(",", ":"))


def _digest_of(canonical: str) -> str:
    return hashlib.sha256(canonical.encode()).hexdigest()


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(files: Mapping[str, Path]) -> str:
    """Return the digest of files and of the names that they are given here."""
    listed = "".join(f"{file_sha256(files[name])} {name}\n" for name in sorted(files))
    return hashlib.sha256(listed.encode()).hexdigest()
