"""Compile the kernels ahead of time with NVRTC, to one cubin per architecture, without a GPU."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from outrider.plans.errors import PlanError
from outrider.plans.extras import install
from outrider.plans.plan import files_sha256

SOURCES = Path(__file__).resolve().parent.parent / "csrc"


CUBINS = "OUTRIDER_CUBINS"
"""The environment variable that names a folder of cubins, which are compiled once for the same sources, options and
NVRTC."""

_OPTIONS = {
    "std": "c++17",
    "device_as_default_execution_space": True,  # NVRTC 13.0 takes a generic lambda for a host function
    "fma": False,  # results must not depend on the compiler: csrc/portable.h
}


def compile_kernels(architecture: str, source: str = "kernels.cu", sources: Path = SOURCES) -> bytes:
    """Compile the kernels of `source` to a cubin for `architecture`, such as sm_90; the bytes are the same every time.

    `kernels.cu` has our ops', `engine.cu` those of engines as well; `sources` is the folder that has `cuda/` in it. A
    cubin of the same sources and options in the folder that `CUBINS` names is taken instead, and kept there where there
    is none; it must be of this machine's NVRTC, if there is one.

    Raises `PlanError`, with the compiler's log, where the kernels do not compile or NVRTC is missing.
    """
    if not (folder := os.environ.get(CUBINS)):
        return _compile(architecture, source, sources)
    headers = (path for path in sources.rglob("*") if path.suffix in (".h", ".cu"))
    files = {path.relative_to(sources).as_posix(): path for path in headers} | {"": sources / "cuda" / source}
    digest = hashlib.sha256(f"{files_sha256(files)} {_OPTIONS}".encode()).hexdigest()[:32]
    version = _nvrtc_version()
    name = f"{architecture}.{Path(source).stem}.{digest}.nvrtc-{version or '*'}.cubin"
    for kept in sorted(Path(folder).glob(name), reverse=True):  # without NVRTC here, the latest one's
        return kept.read_bytes()
    cubin = _compile(architecture, source, sources)
    if version:
        Path(folder).mkdir(parents=True, exist_ok=True)
        part = Path(folder) / f"{name}.{os.getpid()}"  # others may compile it now
        part.write_bytes(cubin)
        part.replace(Path(folder) / name)
    return cubin


def _nvrtc_version() -> str:
    """Return NVRTC's version, such as 13.0, or nothing where it cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        _, *version = nvrtc.nvrtcVersion()
    except Exception:  # ImportError, or of the search for its library
        return ""
    return ".".join(map(str, version))


def _compile(architecture: str, source: str, sources: Path) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise PlanError(f"our ops are compiled by NVRTC, which cannot be loaded ({error}); {install('gpu')}") from None

    options = ProgramOptions(arch=architecture, include_path=[str(sources), str(sources / "cuda")], **_OPTIONS)
    try:
        code = Program((sources / "cuda" / source).read_text(encoding="utf-8"), "c++", options).compile("cubin")
    except Exception as error:  # from NVRTC, with its log as the message, or from the search for its library
        raise PlanError(
            f"our ops cannot be compiled for {architecture}: {error}; if NVRTC is missing, {install('gpu')}"
        ) from None
    cubin = bytes(code.code)
    if not cubin:
        raise PlanError(f"NVRTC made nothing for {architecture}; name a real architecture, such as sm_90")
    return cubin
