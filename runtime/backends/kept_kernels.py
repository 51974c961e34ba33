"""Kernels that TensorRT for RTX compiles on the GPU that runs them, kept for the next process.

They lie in the user's cache folder, never in a plan: a plan is data, and these are code.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.runtime.files import cache_folder, written_whole

_LOG = logging.getLogger("outrider")


def kernel_file(engine: Path, conditions: Mapping[str, str]) -> Path | None:
    """Return the file that keeps the kernels of the engine at `engine` under `conditions`: the GPU, its driver and the
    library, by name. None where there is no home folder.
    """
    described = json.dumps({"engine": str(engine.resolve()), **conditions}, sort_keys=True)
    try:
        folder = cache_folder()
    except RuntimeError:
        return None
    return folder / "kernels" / f"{engine.stem}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.bin"


class KeptKernels:
    """The kernels of one engine: a runtime cache of the library, read from `file` and written back to it.

    The library itself checks the GPU, the driver and its own version before it takes anything from a file. A file that
    it does not take, and one that cannot be read or written, costs a warning and the time of compiling.
    """

    def __init__(self, cache: Any, file: Path | None) -> None:
        """`cache` is an `IRuntimeCache`, still empty."""
        self._cache, self._file = cache, file
        self._written = b""  # sha256 of what the file has
        if file is None:
            return
        try:
            kept = file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _LOG.warning("kernels kept in %s cannot be read (%s); they are compiled again", file, error)
            return
        if cache.deserialize(kept):
            self._written = hashlib.sha256(kept).digest()
        else:
            _LOG.warning("%s is damaged, or of another GPU or driver; its kernels are compiled again", file)

    def save(self) -> None:
        """Write what has been compiled since the file was read or written, if there is any."""
        if self._file is None:
            return
        blob = self._cache.serialize()
        if blob is None:
            _LOG.warning("TensorRT for RTX gives no kernels to keep; the next process compiles them again")
            return
        data = memoryview(blob)
        digest = hashlib.sha256(data).digest()
        if digest == self._written:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._file) as file:
                file.write(data)
        except OSError as error:
            _LOG.warning("kernels cannot be kept in %s (%s); the next process compiles them again", self._file, error)
            self._file = None
            return
        self._written = digest
