"""The kernels, compiled ahead of time: a cubin for each architecture, by NVRTC, without a GPU."""

from __future__ import annotations

from pathlib import Path

from plans.errors import PlanError
from plans.extras import install

SOURCES = Path(__file__).resolve().parent.parent / "csrc"


def compile_kernels(architecture: str) -> bytes:
    """The cubin of all kernels for `architecture`, such as sm_90; the same bytes every time.

    Raises `PlanError`, with the compiler's log, where they do not compile or NVRTC is missing.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise PlanError(f"our ops are compiled by NVRTC, which cannot be loaded ({error}); {install('gpu')}") from None

    options = ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[str(SOURCES), str(SOURCES / "cuda")],
        fma=False,  # results must not depend on who compiled them: csrc/portable.h
    )
    try:
        code = Program((SOURCES / "cuda" / "kernels.cu").read_text(encoding="utf-8"), "c++", options).compile("cubin")
    except Exception as error:  # of NVRTC, whose log is the message, or of whoever looks for its library
        raise PlanError(
            f"our ops cannot be compiled for {architecture}: {error}; if NVRTC is missing, {install('gpu')}"
        ) from None
    cubin = bytes(code.code)
    if not cubin:
        raise PlanError(f"NVRTC made nothing for {architecture}; name a real architecture, such as sm_90")
    return cubin
