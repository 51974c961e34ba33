"""The reference corpus: the Python standard library's own source, split by file.

A file is held out by the hash of its path, so the split is the same on every machine that has the file.
The tasks that later parts of the project need (outlines, retrieval) are made from the same files by `tasks`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.compiler.held_out import read_text

HELD_OUT_SHARE = 0.03
HELD_OUT = " held-out"
DIGITS = 8  # of a file's hash: enough to distinguish files
_SKIPPED_FOLDERS = {"site-packages", "__pycache__", "pydoc_data", "encodings", "lib2to3"}
_SKIPPED_PARTS = ("test/badsyntax", "test/bad_", "test/encoded_modules", "test/tokenize_tests")
_LARGEST = 300_000  # bytes: past this, stdlib files are tables


@dataclass(frozen=True)
class SourceFile:
    """One UTF-8 file. `name` is relative to the standard library, with forward slashes; `sha256` are the first DIGITS
    hexadecimal digits of its hash."""

    name: str
    text: str
    sha256: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32

    @property
    def is_test(self) -> bool:
        return any(part in ("test", "tests", "idle_test") for part in self.name.split("/"))


@dataclass(frozen=True)
class ListedFile:
    """What a list keeps of a `SourceFile`."""

    name: str
    sha256: str
    held_out: bool


def read_standard_library(folder: Path | None = None) -> list[SourceFile]:
    """Every usable source file of a standard library by name: that in `folder`, or the running interpreter's."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS & set(name.split("/")) or name.startswith(_SKIPPED_PARTS):
            continue
        data = path.read_bytes()
        if not data.strip() or len(data) > _LARGEST:
            continue
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        files.append(SourceFile(name, text, hashlib.sha256(data).hexdigest()[:DIGITS]))
    return files


def write_text(text: str, path: Path) -> None:
    """Write text as gzip with neither time nor name in it: the same text gives the same bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode("utf-8"))


def write_file_list(files: list[SourceFile], path: Path) -> None:
    """Keep the split, gzipped: Python version; under each folder's name, which ends in a slash, its files without
    `.py`: sha256, name, and a sign where the file is held out."""
    lines = [json.dumps({"python": platform.python_version(), "held_out_share": HELD_OUT_SHARE})]
    by_folder: dict[str, list[str]] = {}
    for file in files:
        folder, slash, name = file.name.rpartition("/")
        line = f"{file.sha256} {name.removesuffix('.py')}{HELD_OUT if file.held_out else ''}"
        by_folder.setdefault(folder + slash, []).append(line)
    for folder in sorted(by_folder):
        lines += [folder] * bool(folder) + by_folder[folder]
    write_text("\n".join(lines) + "\n", path)


def read_file_list(path: Path) -> Iterator[ListedFile]:
    """The files of such a list."""
    folder = ""
    for line in read_text(path).splitlines()[1:]:
        if line.endswith("/"):
            folder = line
        else:
            sha256, name = line.removesuffix(HELD_OUT).split(" ", 1)
            yield ListedFile(f"{folder}{name}.py", sha256, line.endswith(HELD_OUT))


def listed_hashes(path: Path, *, held_out: bool) -> set[str]:
    """The sha256 of every file of such a list on one side."""
    return {file.sha256 for file in read_file_list(path) if file.held_out == held_out}
