"""Torch-TensorRT, imported for what it converts alone.

Its package expects a GPU and a PyTorch with CUDA as soon as it is imported, for a runtime that is not used here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os.path
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from plans.errors import PlanError

_PACKAGE = "torch_tensorrt"
_WHEELS = {"tensorrt": "torch-tensorrt", "tensorrt_rtx": "torch-tensorrt-rtx"}
_RUNTIME = "libtorchtrt"


def installed_version(library: str) -> str:
    """Of the package for `library`, with its name. Raises `PlanError` where it is missing."""
    wheel = _WHEELS[library]
    try:
        return f"{wheel} {importlib.metadata.version(wheel)}"
    except importlib.metadata.PackageNotFoundError:
        raise _refusal(wheel, "is not installed") from None


def load_torch_tensorrt(library: str) -> ModuleType:
    """The package, made for `library`, "tensorrt" or "tensorrt_rtx". Raises `PlanError` where it is missing or made
    for the other."""
    wheel = _WHEELS[library]
    try:
        with _importable(), using_its_tensorrt():
            package = importlib.import_module(_PACKAGE)
            found = importlib.import_module(f"{_PACKAGE}._TensorRTProxyModule").package_name
    except Exception as error:  # its own, without a class of theirs
        raise _refusal(wheel, f"cannot be loaded ({' '.join(str(error).split())})") from None
    if found != library:
        raise PlanError(
            f"frontend: torch-tensorrt needs {wheel}, and the {_WHEELS.get(found, _PACKAGE)} that is here converts for "
            f"{found}; install that, or leave frontend at onnx"
        )
    return package


def _refusal(wheel: str, fault: str) -> PlanError:
    return PlanError(
        f"frontend: torch-tensorrt needs {wheel}, which {fault}; run `pip install --no-deps {wheel} dllist psutil`, "
        "or leave frontend at onnx"
    )


@contextlib.contextmanager
def using_its_tensorrt() -> Iterator[None]:
    """In here `import tensorrt` gives what Torch-TensorRT stands on, which may be TensorRT for RTX; behind it, what it
    gave before."""
    name, before = "tensorrt", sys.modules.get("tensorrt")
    converters = sys.modules.get(f"{_PACKAGE}.dynamo.conversion.converter_utils")
    if converters is not None:
        sys.modules[name] = converters.trt
    try:
        yield
    finally:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Without CUDA the package is told that its runtime is not installed, and that there is a device 0, of no kind it
    knows; and it says nothing of what it lacks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, before)
        if not torch.cuda.is_available():
            real = os.path.isfile
            stand_ins: list[tuple[Any, str, Any]] = [
                (os.path, "isfile", lambda path: _RUNTIME not in str(path) and real(path)),
                (torch.cuda, "get_device_capability", lambda *_: (0, 0)),
                (torch.cuda, "current_device", lambda: 0),
                (torch._C, "_CudaDeviceProperties", object),
            ]
            for owner, name, value in stand_ins:
                stack.enter_context(_replaced(owner, name, value))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = getattr(owner, name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
