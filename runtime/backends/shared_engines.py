"""Engines whose weights all processes of a machine map: ONNX Runtime's packed floats, kept in a file.

ONNX Runtime packs the float weights of products for its kernels when it loads a graph, into memory of the process's
own. A graph that it has written out with its packed weights is mapped instead, so that a machine holds them once, and
loading copies nothing. Such a file is of one kind of processor and one build of ONNX Runtime: it is no part of the
plan, but made where a plan is first loaded to share memory, in the user's cache folder. It holds the weights twice, as
they are stored and as they are packed. Weights of 8 and 4 bits are mapped from the plan as they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp

import onnxruntime as ort

from plans.plan import Plan
from runtime.cache_folder import cache_folder
from runtime.file_lock import locked

_VERSION = 1
_NAME, _WEIGHTS, _AS_IT_IS = "engine.onnx", "weights.bin", "as_it_is"
_LEAST = 1024  # bytes of weights that lie outside of the graph's file
_PACKED = 1.05  # of the size of the weights, above which a file has packed ones
_LOG = logging.getLogger("outrider")


def shared_engines(plan: Plan, kernels: Mapping[str, str]) -> Path | None:
    """The folder of a plan's engines for these `kernels`; None, with a warning, where there is no cache folder."""
    files = {file.path: file.sha256 for file in plan.manifest.files if file.path.startswith("engines/")}
    told = json.dumps([_VERSION, files, dict(kernels)], sort_keys=True)
    try:
        return cache_folder() / "engines" / hashlib.sha256(told.encode()).hexdigest()[:32]
    except RuntimeError as error:
        _LOG.warning("weights are not shared between processes: there is no cache folder: %s", error)
        return None


def shared_engine(path: Path, weight_bytes: int, folder: Path, write: Callable[[Path, Path], None]) -> Path:
    """The file that an engine at `path` is to be loaded from, in `folder`, where it is made unless it is there.

    `write(path, to)` has ONNX Runtime write the graph with its packed weights. Where nothing is packed, and where the
    folder cannot be written, which is a warning, it is `path`.
    """
    made = folder / path.stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{path.stem}.lock"):
            if not made.exists():
                _make(path, weight_bytes, made, write)
    except OSError as error:
        _LOG.warning("weights of %s are not shared between processes: %s cannot be written: %s", path, made, error)
        return path
    return path if (made / _AS_IT_IS).exists() else made / _NAME


def write_packed(path: Path, to: Path, options: Callable[[], ort.SessionOptions], disabled: list[str]) -> None:
    """Have ONNX Runtime write the graph at `path`, with its packed weights beside it, and load what it wrote.

    Raises OSError where it cannot: it does not tell a full disk from other faults.
    """
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
            (unfinished / _AS_IT_IS).touch()
        for file in unfinished.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.rename(made)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
