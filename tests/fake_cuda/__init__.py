"""CUDA's libraries without a GPU, for ONNX Runtime's real CUDA provider: compiled for the CPU, and what they record.

Memory, copies, streams, captures and the placement of nodes are real; ONNX Runtime's kernels do nothing, ours are
emulated. The libraries declare what they need of CUDA themselves, so that none of its packages need be there.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVER = "libcuda.so.1"
LIBRARIES = {
    DRIVER: ("device.cc", "kernels.cc", "driver.cc"),
    "libcudart.so.13": ("runtime.cc",),
    **dict.fromkeys(("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcurand.so.10"), ("libraries.cc",)),
}
FUNCTIONS = {
    "CREATES": """
        cublasCreate_v2 cublasLtCreate cudnnCreate cudnnCreateTensorDescriptor
        cudnnCreateReduceTensorDescriptor
    """,
    "SUCCEEDS": """
        cublasDestroy_v2 cublasSetMathMode cublasLtDestroy cudnnDestroy cudnnDestroyTensorDescriptor
        cudnnSetTensorNdDescriptor cudnnDestroyReduceTensorDescriptor cudnnSetReduceTensorDescriptor
    """,
    "KERNEL": """
        cublasDgeam cublasDgemmBatched cublasDgemmStridedBatched cublasDgemm_v2 cublasGemmBatchedEx
        cublasGemmEx cublasGemmStridedBatchedEx cublasScopy_v2 cublasSgeam cublasSgemmBatched
        cublasSgemmStridedBatched cublasSgemm_v2 cublasSscal_v2 cudnnReduceTensor cudnnSoftmaxForward
    """,
    "NOT_EMULATED": """
        cublasDgetrfBatched cublasDgetriBatched cublasSgetrfBatched cublasSgetriBatched cublasLtMatmul
        cublasLtMatmulAlgoConfigSetAttribute cublasLtMatmulAlgoGetHeuristic cublasLtMatmulAlgoInit
        cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
        cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute
        cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy cublasLtMatrixLayoutSetAttribute
        cublasLtMatrixTransform cublasLtMatrixTransformDescCreate cublasLtMatrixTransformDescDestroy
    """,
}
"""Of `libraries.cc`: by its macros."""
_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def compile_libraries(folder: Path) -> None:
    """Compile the libraries into `folder`; the driver's has the device, which the others share."""
    folder.mkdir(parents=True)
    functions = [f"{macro}({name})\n" for macro, names in FUNCTIONS.items() for name in names.split()]
    (folder / "functions.h").write_text("".join(functions), encoding="utf-8")
    for name, sources in LIBRARIES.items():
        versions = folder / f"{name}.map"
        versions.write_text(f"{name} {{ global: *; }};\n", encoding="utf-8")  # NVIDIA's symbols have versions too
        ending = ["-ldl"] if name == DRIVER else [f"-Wl,--version-script={versions}", str(folder / DRIVER)]
        files = [str(HERE / source) for source in sources]
        subprocess.run(
            ["g++", *_FLAGS, f"-I{folder}", f"-Wl,-soname,{name}", *files, "-o", str(folder / name), *ending],
            check=True,
        )


@dataclass(frozen=True)
class Recorded:
    """A call that a library recorded: `event` says of what kind, `text` what it was."""

    thread: int
    event: str
    text: str


def read_record(file: Path) -> list[Recorded]:
    lines = (line.split("\t", 2) for line in file.read_text(encoding="utf-8").splitlines())
    return [Recorded(int(thread), event, text) for thread, event, text in lines]
