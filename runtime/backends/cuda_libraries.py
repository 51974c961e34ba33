"""CUDA's libraries that ONNX Runtime's CUDA provider is linked with or opens, loaded before it looks for them."""

from __future__ import annotations

import ctypes
import sys
from contextlib import redirect_stdout
from io import StringIO

import onnxruntime as ort

LIBRARIES = ("libcudart.so.{cuda}", "libcublasLt.so.{cuda}", "libcublas.so.{cuda}", "libcurand.so.10", "libcudnn.so.9")


def missing_libraries() -> list[str]:
    """Load the libraries, from NVIDIA's packages or from where the system finds them; return the names of those that
    cannot be loaded. On Windows none is looked for by name.

    Where one is missing, ONNX Runtime makes sessions without the provider, and says so in its log alone.
    """
    with redirect_stdout(StringIO()):  # where it prints what is missing
        ort.preload_dlls()
    if sys.platform != "linux":
        return []
    cuda = ort.cuda_version.partition(".")[0]
    return [name for name in (library.format(cuda=cuda) for library in LIBRARIES) if not _loads(name)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
