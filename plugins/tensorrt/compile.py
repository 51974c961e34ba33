"""Compile the kernels of plugins ahead of time to PTX, without a GPU or its driver."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from outrider.plans.extras import install
from outrider.plugins.cuda.compile import SOURCES
from outrider.plugins.tensorrt.plugin import Plugin
from outrider.plugins.tensorrt.source import PARTS, cuda_source

OLDEST = "compute_75"  # the oldest that NVRTC 13 and TensorRT 11 support; its PTX runs on all later GPUs
NEWEST = (9, 0)  # the PTX version of CUDA 13.0: all drivers that TensorRT 11 and ONNX Runtime 1.31 run on (580) take it


def compile_plugin(plugin: Plugin, architecture: str = OLDEST) -> str:
    """Compile a plugin's kernel to PTX for GPUs of `architecture` (such as compute_90) and later; the same every time.

    TensorRT takes PTX, not cubins. The PTX version is NVRTC's, and a driver refuses PTX that is newer than itself, so
    that a newer NVRTC than 13.0 is refused.

    Raises RuntimeError with the compiler's log or with the version that is refused, and ImportError where
    `cuda-bindings` or NVRTC is missing.
    """
    return compile_ptx(cuda_source(plugin), plugin.kernel, architecture)


@cache
def compile_ptx(source: str, name: str, architecture: str = OLDEST, headers: Path = SOURCES) -> str:
    """Compile `source`, called `name` in messages, to PTX, with the headers of the folder `headers`.

    Raises as `compile_plugin` does.
    """
    from cuda.bindings import nvrtc  # not cuda.core, which asks the driver for its version before it makes PTX

    done = nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--device-as-default-execution-space",  # NVRTC 13.0 takes a generic lambda for a host function
        "--fmad=false",  # results must not depend on the compiler: csrc/portable.h
        *(f"--include-path={folder}" for folder in (headers, headers / "cuda", PARTS)),
    ]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    if error != done:
        raise RuntimeError(f"NVRTC cannot start on {name}: {error.name}")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error != done:
            log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.rstrip(b"\0").decode(errors="replace").strip() or error.name
            raise RuntimeError(f"{name} does not compile for {architecture}: {said}")
        ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return _for_every_driver(ptx.rstrip(b"\0").decode())


def _for_every_driver(ptx: str) -> str:
    """Return the PTX; raise RuntimeError if it is newer than the oldest driver takes."""
    found = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    assert found is not None
    version = int(found[1]), int(found[2])
    if version > NEWEST:
        raise RuntimeError(
            f"NVRTC makes PTX {version[0]}.{version[1]}, and drivers from 580 on take {NEWEST[0]}.{NEWEST[1]} alone: "
            f"TensorRT could not load our plugins; {install('gpu')}, which has an NVRTC of CUDA 13.0"
        )
    return ptx
