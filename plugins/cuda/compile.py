"""The kernels, compiled ahead of time: a cubin for each architecture, by NVRTC, without a GPU."""

from __future__ import annotations

from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")


def compile_kernels(architecture: str) -> bytes:
    """The cubin of all kernels for `architecture`, such as sm_90; the same bytes every time.

    Raises RuntimeError with the compiler's log, and ImportError where `cuda-core` or NVRTC is missing.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[str(SOURCES), str(SOURCES / "cuda")],
        fma=False,  # results must not depend on who compiled them: csrc/portable.h
    )
    try:
        code = Program((SOURCES / "cuda" / "kernels.cu").read_text(encoding="utf-8"), "c++", options).compile("cubin")
    except ImportError:
        raise
    except Exception as error:  # of NVRTC, whose log is the message
        raise RuntimeError(f"the kernels do not compile for {architecture}: {error}") from None
    cubin = bytes(code.code)
    if not cubin:
        raise RuntimeError(f"NVRTC made nothing for {architecture}; name a real architecture, such as sm_90")
    return cubin
