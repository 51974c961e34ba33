"""Torch-TensorRT, imported for what it converts alone: its runtime, with a library of C++, stays out.

As soon as it is imported the package asks for a GPU and for a PyTorch with CUDA. It needs neither to convert.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import os.path
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from packaging.requirements import Requirement

from plans.errors import PlanError

_PACKAGE = "torch_tensorrt"
_WHEELS = {"tensorrt": "torch-tensorrt", "tensorrt_rtx": "torch-tensorrt-rtx"}
_RUNTIME = "libtorchtrt"
_LOCK = threading.RLock()


def load_torch_tensorrt(library: str) -> ModuleType:
    """The package, made for `library`, "tensorrt" or "tensorrt_rtx", and for the PyTorch that is here.

    Raises `PlanError` where it is missing, made for another, or cannot be imported.
    """
    wheel = _WHEELS[library]
    _check_wheel(wheel)
    before = set(sys.modules)
    try:
        with _LOCK, _importable(), using_its_tensorrt():
            package = importlib.import_module(_PACKAGE)
            found = importlib.import_module(f"{_PACKAGE}._TensorRTProxyModule").package_name
    except Exception as error:  # its own, without a class of theirs
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == _PACKAGE:  # half of it
                del sys.modules[name]
        raise _refusal(wheel, f"cannot be imported ({' '.join(str(error).split())})") from None
    if found != library:
        raise _refusal(wheel, f"lies in one folder with {_WHEELS.get(found, _PACKAGE)}, which came later")
    return package


def installed_version(library: str) -> str:
    """Of the package for `library`, with its name. Raises `PlanError` where `load_torch_tensorrt` does."""
    load_torch_tensorrt(library)
    wheel = _WHEELS[library]
    return f"{wheel} {importlib.metadata.version(wheel).partition('+')[0]}"


def _check_wheel(wheel: str) -> None:
    """A wheel holds for one PyTorch, which nobody checks where it is installed without its dependencies."""
    try:
        needs = importlib.metadata.requires(wheel) or ()
    except importlib.metadata.PackageNotFoundError:
        raise _refusal(wheel, "is not installed") from None
    ours = torch.__version__.partition("+")[0]
    for need in map(Requirement, needs):
        if need.name == "torch" and not need.specifier.contains(ours, prereleases=True):
            raise _refusal(wheel, f"is for torch{need.specifier}, and {ours} is here")


def _refusal(wheel: str, fault: str) -> PlanError:
    ours = ".".join(torch.__version__.split(".")[:2])
    return PlanError(
        f"frontend: torch-tensorrt needs {wheel}, which {fault}; run "
        f"`pip install --force-reinstall --no-deps '{wheel}=={ours}.*' dllist psutil`, or leave frontend at onnx"
    )


@contextlib.contextmanager
def using_its_tensorrt() -> Iterator[None]:
    """In here `import tensorrt` gives what Torch-TensorRT stands on, which may be TensorRT for RTX; behind it, what it
    gave before."""
    name, there = "tensorrt", dict(sys.modules)
    converters = sys.modules.get(f"{_PACKAGE}.dynamo.conversion.converter_utils")
    if converters is not None:
        sys.modules[name] = converters.trt
    try:
        yield
    finally:
        for added in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[added]
        sys.modules.update({m: module for m, module in there.items() if m == name or m.startswith(f"{name}.")})


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """The package is told that its runtime is not installed, and, where none is, that there is a device 0 of no kind
    that it knows; it says nothing of what it lacks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, before)
        real = os.path.isfile
        stand_ins: list[tuple[Any, str, Any]] = [
            (os.path, "isfile", lambda path: _RUNTIME not in str(path) and real(path))
        ]
        if not torch.cuda.is_available():
            stand_ins += [
                (torch.cuda, "get_device_capability", lambda *_: (0, 0)),
                (torch.cuda, "current_device", lambda: 0),
            ]
        if not hasattr(torch._C, "_CudaDeviceProperties"):
            stand_ins.append((torch._C, "_CudaDeviceProperties", object))
        for owner, name, value in stand_ins:
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(_same_environment())
        yield


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """PyTorch's compiler, which comes along, writes variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


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
