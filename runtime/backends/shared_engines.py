"""Engines whose weights all processes of a machine map: ONNX Runtime's packed floats, kept in a file.

ONNX Runtime packs the float weights of products for its kernels when it loads a graph, into memory of the process's
own. A graph that it has written out with its packed weights is mapped instead, so that a machine holds them once, and
loading copies nothing. Such a file is of one kind of processor and one build of ONNX Runtime: it is no part of the
plan, but made where a plan is first loaded to share memory, in the user's cache folder. It holds the weights twice, as
they are stored and as they are packed. Weights of 8 and 4 bits are mapped from the plan as they are.

A folder of the cache holds one engine, and a list of its files, which a load holds them against as it does those of the
plan: what was damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from outrider.plans.plan import Plan, file_sha256
from outrider.runtime.files import MappedFiles, cache_folder, locked

if TYPE_CHECKING:
    import onnxruntime as ort

_VERSION = 2
_NAME, _WEIGHTS, _LIST = "engine.onnx", "weights.bin", "files.json"
_LEAST = 1024  # bytes of weights that lie outside of the graph's file
_PACKED = 1.05  # of the size of the weights, above which a file has packed ones
_LOG = logging.getLogger("outrider")


@dataclass(frozen=True)
class SharedEngines:
    """A plan's engines in `folder`; `files` hold those that are used, and `verify` reads them against their sha256."""

    folder: Path
    files: MappedFiles
    verify: bool = True

    @classmethod
    def from_plan(
        cls, plan: Plan, kernels: Mapping[str, str], files: MappedFiles, verify: bool = True
    ) -> SharedEngines | None:
        """Those of a plan for these `kernels`; None, with a warning, where there is no cache folder."""
        engines = {file.path: file.sha256 for file in plan.manifest.files if file.path.startswith("engines/")}
        described = json.dumps([_VERSION, engines, dict(kernels)], sort_keys=True)
        try:
            return cls(cache_folder() / "engines" / hashlib.sha256(described.encode()).hexdigest()[:32], files, verify)
        except RuntimeError as error:
            _LOG.warning("weights are not shared between processes: there is no cache folder: %s", error)
            return None

    def engine(self, path: Path, weight_bytes: int, write: Callable[[Path, Path], None]) -> Path:
        """The file that an engine at `path` is to be loaded from, which is made unless it is there and whole.

        `write(path, to)` has ONNX Runtime write the graph with its packed weights. Where nothing is packed, and where
        the folder cannot be written, which is a warning, it is `path`.
        """
        made, lock = self.folder / path.stem, self.folder / f"{path.stem}.lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(lock, shared=True):
                whole = self._hold_whole(made)
            if not whole:
                with locked(lock):
                    if not self._hold_whole(made):  # nobody else has made it meanwhile
                        _remove(made)
                        _make(path, weight_bytes, made, write)
                        if not self._hold_whole(made):
                            raise OSError("what was written cannot be read again as it was")
        except OSError as error:
            _LOG.warning("weights of %s are not shared between processes: %s cannot be used: %s", path, made, error)
            return path
        return made / _NAME if (made / _NAME).exists() else path

    def _hold_whole(self, made: Path) -> bool:
        """Return whether a folder is there and whole; its weights are held then. Raises OSError."""
        if not made.exists():
            return False
        weights = made / _WEIGHTS
        # Held before it is read, so that what is written to it meanwhile is noticed.
        release = self.files.hold(weights) if weights.exists() else None
        wrong = _what_is_wrong(made, self.verify)
        if wrong is None:
            return True
        if release is not None:
            release()
        _LOG.warning("%s: %s; it is made again", made, wrong)
        return False


def write_packed(path: Path, to: Path, options: Callable[[], ort.SessionOptions], disabled: list[str]) -> None:
    """Have ONNX Runtime write the graph at `path`, with its packed weights beside it, and load what it wrote.

    Raises OSError where it cannot: it does not distinguish a full disk from other faults.
    """
    import onnxruntime as ort

    writing = options()
    writing.optimized_model_filepath = str(to)
    for key, value in (
        ("optimized_model_external_initializers_file_name", _WEIGHTS),
        ("optimized_model_external_initializers_min_size_in_bytes", str(_LEAST)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        writing.add_session_config_entry(f"session.{key}", value)
    try:
        for source, how in ((path, writing), (to, options())):
            ort.InferenceSession(str(source), how, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
    except Exception as error:  # ONNX Runtime raises bare RuntimeErrors of its own kinds
        raise OSError(str(error)) from None


def _make(path: Path, weight_bytes: int, made: Path, write: Callable[[Path, Path], None]) -> None:
    """Make the folder `made` as a whole. Raises OSError."""
    for left in made.parent.glob(f".{made.name}.*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(mkdtemp(prefix=f".{made.name}.", dir=made.parent))
    try:
        write(path, unfinished / _NAME)
        weights = unfinished / _WEIGHTS
        if not weights.exists() or weights.stat().st_size < _PACKED * weight_bytes:
            weights.unlink(missing_ok=True)
            (unfinished / _NAME).unlink()
        listed = {file.name: [file.stat().st_size, file_sha256(file)] for file in unfinished.iterdir()}
        (unfinished / _LIST).write_text(json.dumps(listed), encoding="utf-8")
        for file in unfinished.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.rename(made)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _what_is_wrong(made: Path, verify: bool) -> str | None:
    """None for a folder that is whole. Raises OSError."""
    try:
        listed = json.loads((made / _LIST).read_text(encoding="utf-8"))
        if {file.name for file in made.iterdir()} != {_LIST, *listed}:
            return f"it has other files than {_LIST} lists"
        for name, (size, sha256) in listed.items():
            if (found := (made / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
            if verify and file_sha256(made / name) != sha256:
                return f"{name} does not match its sha256"
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError) as error:
        return f"{_LIST} cannot be read ({error})"
    return None


def _remove(made: Path) -> None:
    """Remove a folder, if it is there; who has mapped its files keeps them. Raises OSError."""
    if not made.exists():
        return
    old = Path(mkdtemp(prefix=f".{made.name}.", dir=made.parent))
    made.rename(old / made.name)
    shutil.rmtree(old, ignore_errors=True)
