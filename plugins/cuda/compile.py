"""Compile the kernels ahead of time with NVRTC, to one cubin per architecture, without a GPU."""

from __future__ import annotations

from pathlib import Path

from plans.errors import PlanError
from plans.extras import install

SOURCES = Path(__file__).resolve().parent.parent / "csrc"


def compile_kernels(architecture: str, source: str = "kernels.cu") -> bytes:
    """Compile the kernels of `source` to a cubin for `architecture`, such as sm_90; the bytes are the same every time.

    `kernels.cu` has our ops', `engine.cu` those of engines as well.

    Raises `PlanError`, with the compiler's log, where the kernels do not compile or NVRTC is missing.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise PlanError(f"our ops are compiled by NVRTC, which cannot be loaded ({error}); {install('gpu')}") from None

    options = ProgramOptions(
        arch=architecture,
        std="c++17",
        device_as_default_execution_space=True,  # NVRTC 13.0 takes a generic lambda for a host function
        include_path=[str(SOURCES), str(SOURCES / "cuda")],
        fma=False,  # results must not depend on the compiler: csrc/portable.h
    )
    try:
        code = Program((SOURCES / "cuda" / source).read_text(encoding="utf-8"), "c++", options).compile("cubin")
    except Exception as error:  # from NVRTC, with its log as the message, or from the search for its library
        raise PlanError(
            f"our ops cannot be compiled for {architecture}: {error}; if NVRTC is missing, {install('gpu')}"
        ) from None
    cubin = bytes(code.code)
    if not cubin:
        raise PlanError(f"NVRTC made nothing for {architecture}; name a real architecture, such as sm_90")
    return cubin
