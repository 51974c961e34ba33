"""Hashes of a plan's inputs: equal inputs give an equal identity on any machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from outrider.plans.manifest import FORMAT_VERSION

PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnx-ir", "safetensors")
"""Distributions that every build needs."""
_SOURCES = ("compiler", "plans", "plugins")
_KERNELS = ("plugins/csrc/*.h", "plugins/csrc/cuda/**/*")
_TEXT = ("tokenizer", "added_tokens", "special_tokens_map", "chat_template", "additional_chat_templates")
"""How the names of files begin that engines do not depend on."""


def tool_versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return versions of all packages that shape an engine, and a digest of the compiler's own source.

    `packages` are the ones that a backend needs; a missing package has the version "".
    """
    # The local part ("2.13.0+cpu") says where a package runs; graphs are the same everywhere.
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    versions |= {name: package_version(name) for name in packages}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    versions["compiler"] = _source_digest()
    return versions


def package_version(package: str) -> str:
    """Return the version of an installed distribution, "" for a missing one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def digest(value: object) -> str:
    """Return the sha256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plan_identity(recipe: Mapping[str, JsonValue], checkpoint: Mapping[str, str], tools: Mapping[str, str]) -> str:
    """Return the hash of a plan's inputs: the resolved recipe, the checkpoint files' hashes, and the tools."""
    return digest([FORMAT_VERSION, dict(recipe), dict(checkpoint), dict(tools)])


def engines_key(checkpoint: Mapping[str, str], shape: Mapping[str, object], tools: Mapping[str, str]) -> str:
    """Return the hash of all inputs of one backend's engines; the rest, such as names, may change without an export."""
    weights = {name: sha for name, sha in checkpoint.items() if not name.startswith(_TEXT)}
    return digest([weights, dict(shape), dict(tools)])


def _source_digest() -> str:
    root = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    files = [path for package in _SOURCES for path in sorted((root / package).rglob("*.py"))]
    files += [path for pattern in _KERNELS for path in sorted(root.glob(pattern)) if path.is_file()]
    for path in files:
        total.update(path.relative_to(root).as_posix().encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]
