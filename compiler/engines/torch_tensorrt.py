"""Import Torch-TensorRT for its converters only; its runtime, a C++ library, is not loaded.

On import the package asks for a GPU and for a PyTorch with CUDA. Its converters need neither.
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

from outrider.plans.errors import PlanError

_PACKAGE = "torch_tensorrt"
_WHEELS = {"tensorrt": "torch-tensorrt", "tensorrt_rtx": "torch-tensorrt-rtx"}
_RUNTIME = "libtorchtrt"
_LOCK = threading.RLock()


def load_torch_tensorrt(library: str) -> ModuleType:
    """Import the package made for `library`, "tensorrt" or "tensorrt_rtx", and for the installed PyTorch.

    Raises `PlanError` where the package is missing, is made for another library or PyTorch, or cannot be imported.
    """
    wheel = _WHEELS[library]
    _check_wheel(wheel)
    before = set(sys.modules)
    try:
        with _LOCK, _importable(), using_its_tensorrt():
            package = importlib.import_module(_PACKAGE)
            found = importlib.import_module(f"{_PACKAGE}._TensorRTProxyModule").package_name
    except Exception as error:  # the package raises its errors without a class of their own
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == _PACKAGE:  # a half-imported module
                del sys.modules[name]
        raise _refusal(wheel, f"cannot be imported ({' '.join(str(error).split())})") from None
    if found != library:
        raise _refusal(wheel, f"lies in one folder with {_WHEELS.get(found, _PACKAGE)}, which came later")
    return package


def installed_version(library: str) -> str:
    """Return name and version of the package for `library`. Raises `PlanError` where `load_torch_tensorrt` does."""
    load_torch_tensorrt(library)
    wheel = _WHEELS[library]
    return f"{wheel} {importlib.metadata.version(wheel).partition('+')[0]}"


def _check_wheel(wheel: str) -> None:
    """Raise `PlanError` unless `wheel` is made for this PyTorch; pip does not check that with `--no-deps`."""
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
    """Let `import tensorrt` inside give the library under Torch-TensorRT, which may be TensorRT for RTX; restore the
    former modules at the end."""
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
    """Make the package importable: hide its runtime, pretend an unknown device 0 where there is no GPU, and silence
    its output and warnings about missing parts."""
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
    """Remove environment variables that PyTorch's compiler, imported along, adds."""
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
