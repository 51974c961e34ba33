"""What a bundle has of other people's work, and of ours: versions, licences, files."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from outrider.runtime.embed.bundle.contents import OURS
from outrider.runtime.embed.bundle.modules import PYTHON

_LICENCE_FILE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|ThirdPartyNotices)", re.IGNORECASE)
_LICENCES = Path("/usr/share/common-licenses")
_COMMON = re.compile(rf"{_LICENCES}/([A-Za-z]+(?:-[0-9.]*[0-9])?)")
_LIST = ".cyclonedx.json"
_APACHE = "Apache-2.0"
_LIBRARIES = {
    "libstdc++": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libgcc_s": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libcrypto": _APACHE,
    "libffi": "MIT",
    "libz": "Zlib",
    "libexpat": "MIT",
    "libbz2": "bzip2-1.0.6",
}
"""Licences (SPDX) of system libraries that Python's own modules and C++ need."""


@dataclass
class Component:
    """A distribution, Python, or a library of the system. `licence` is "unknown" where nothing says it.

    `files` are those in the bundle, relative to it, and `bytes` how large they are; `texts` are the licence's own, by
    the names that they get there. `inside` are the packages that were compiled into its shared objects: the name,
    version and licence of each; None where they are not known.
    """

    name: str
    version: str
    licence: str
    texts: Mapping[str, Path]
    inside: list[dict[str, str]] | None = None
    files: list[str] = field(default_factory=list)
    bytes: int = 0

    @property
    def has_licence_text(self) -> bool:
        """Whether there is one of its own, beside a list of what is inside."""
        return any(not name.endswith(_LIST) for name in self.texts)

    def to_json(self) -> dict[str, object]:
        """The entry of `bundle.json`."""
        return {
            "name": self.name,
            "version": self.version,
            "licence": self.licence,
            "licence_files": [f"licences/{self.name}/{name}" for name in sorted(self.texts)],
            "bytes": self.bytes,
            "inside": self.inside,
            "files": sorted(self.files),
        }


def of_distribution(name: str) -> Component:
    """An installed Python package."""
    found = distribution(name)
    metadata = found.metadata
    texts, lists = {}, list[Path]()
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        if _LICENCE_FILE.search(file.name) and file.suffix not in (".py", ".pyc") and path.is_file():
            below = file.parts[file.parts.index("licenses") + 1 :] if "licenses" in file.parts else file.parts[-1:]
            texts["-".join(below)] = path
        elif "sboms" in file.parts and file.name.endswith(_LIST) and path.is_file():
            lists.append(path)
    classified = [value.rpartition(" :: ")[2] for value in metadata.get_all("Classifier") or () if "License" in value]
    named = [metadata[key] for key in ("License-Expression", "License") if key in metadata]
    licence = ", ".join(named[:1] if "License-Expression" in metadata else classified or named) or "unknown"
    if not texts and "Apache" in licence:
        texts["LICENSE"] = _apache_text()
    texts |= {path.name: path for path in lists}
    inside = [each for path in lists for each in _inside(path)] if lists else None
    return Component(name, found.version, licence, texts, inside)


def _inside(path: Path) -> list[dict[str, str]]:
    """The packages that a list in CycloneDX's format names, but for those that only building or testing took."""
    return [
        {
            "name": each["name"],
            "version": str(each.get("version", "")),
            "licence": ", ".join(map(_licence, each.get("licenses", ()))) or "unknown",
        }
        for each in json.loads(path.read_text(encoding="utf-8")).get("components", ())
        if each.get("scope") != "excluded"
    ]


def _licence(listed: Mapping[str, Any]) -> str:
    licence = listed.get("license", {})
    return str(listed.get("expression") or licence.get("id") or licence.get("name") or "unknown")


def of_python() -> Component:
    """The interpreter and its standard library."""
    beside = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    library = Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))
    texts = {"LICENSE.txt": beside} if beside.is_file() else _system_texts(_package(library))
    return Component(PYTHON, platform.python_version(), "PSF-2.0", texts)


def of_library(path: Path) -> Component:
    """A library of the system: its package's version and copyright, where Debian's tools know it."""
    stem = path.name.partition(".so")[0]
    package = _package(path)
    version = _output("dpkg-query", "--show", "--showformat=${Version}", package) if package else ""
    licence = _LIBRARIES.get(stem, "unknown")
    texts = _system_texts(package)
    if not texts and licence == _APACHE:
        texts = {"LICENSE": _apache_text()}
    return Component(stem, version or path.resolve().name.partition(".so.")[2], licence, texts)


def _apache_text() -> Path:
    found = distribution(OURS)
    return next(
        path
        for file in found.files or ()
        if file.name == "LICENSE" and "third_party" not in file.parts
        and (path := Path(str(found.locate_file(file)))).is_file()
    )  # fmt: skip


def _package(path: Path) -> str:
    """Debian's package that has this file; empty where it has none, or the system is another one."""
    real = str(path.resolve())
    for place in (real, real.removeprefix("/usr")):
        if owner := _output("dpkg-query", "--search", place):
            return owner.splitlines()[0].rpartition(": ")[0]
    return ""


def _system_texts(package: str) -> dict[str, Path]:
    """What Debian says of a package's licence, and the texts that this refers to."""
    said = Path("/usr/share/doc") / package.partition(":")[0] / "copyright"
    if not package or not said.is_file():
        return {}
    common = set(_COMMON.findall(said.read_text(encoding="utf-8", errors="replace")))
    return {"copyright": said} | {name: path for name in common if (path := _LICENCES / name).is_file()}


def _output(*words: str) -> str:
    """What a program prints; nothing where it fails or is not there."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def write_licences(components: Iterable[Component], folder: Path) -> None:
    """Copy every licence's text to `folder`, a folder for each component."""
    for component in components:
        for name, text in component.texts.items():
            to = folder / component.name / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, to)
