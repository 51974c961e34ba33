"""The backends of a recipe: what to build engines for, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator
from pydantic_core import PydanticCustomError

from outrider.compiler.models.config import WeightType
from outrider.compiler.recipe_sections import Section, WrittenPath
from outrider.plans.errors import RecipeError

RtxCapability = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"]

CudaCapability = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]

KernelCapability = Literal[
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"
]
"""GPUs that have the tensor-core instructions of our kernels of engines."""


class _Backend(Section):
    """A backend of any kind."""

    kind: str
    dtype: WeightType | None = Field(None, description="type of the weights for this backend, in place of target.dtype")


class _Gpu(_Backend):
    """A backend that runs on GPUs."""

    compute_capabilities: tuple[str, ...]

    @field_validator("compute_capabilities")
    @classmethod
    def _distinct(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if not given:
            raise PydanticCustomError("capability", "must have at least 1 entry, found []")
        for index, capability in enumerate(given):
            if capability in given[:index]:
                context = {"value": capability, "at": (index,)}
                raise PydanticCustomError("capability", "repeats '{value}'; keep one of them", context)
        return given


class _TensorRt(_Gpu):
    """A backend whose engines TensorRT builds."""

    workspace_mb: int = Field(1024, ge=1, le=2**20, description="MB that an engine may use beside weights and KV")
    frontend: Literal["onnx", "torch-tensorrt"] = Field(
        "onnx",
        description="what reads graphs: TensorRT's parser, or Torch-TensorRT, which leaves those of drafts to the "
        "parser",
    )


class OnnxRuntimeCpuSection(_Backend):
    """ONNX Runtime on the CPU: the embedded default, which runs everywhere. Computes in float32."""

    kind: Literal["onnxruntime-cpu"] = Field(description="the backend")


class OnnxRuntimeCudaSection(_Gpu):
    """ONNX Runtime on an NVIDIA GPU. The engines are the same for every GPU; our own ops are compiled for each."""

    kind: Literal["onnxruntime-cuda"] = Field(description="the backend")
    compute_capabilities: tuple[CudaCapability, ...] = Field(
        ("sm_80", "sm_90", "sm_120"), strict=False, description="GPUs that our own ops are compiled for"
    )


class CudaSection(_Gpu):
    """Our own kernels on an NVIDIA GPU: a step is one recorded launch, and a token the same in any company."""

    kind: Literal["cuda"] = Field(description="the backend")
    compute_capabilities: tuple[KernelCapability, ...] = Field(
        ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
        strict=False,
        description="GPUs that the kernels are compiled for",
    )


class TensorRtRtxSection(_TensorRt):
    """TensorRT for RTX: engines are built without a GPU, and finished on the user's GPU at the first run."""

    kind: Literal["tensorrt-rtx"] = Field(description="the backend")
    compute_capabilities: tuple[RtxCapability, ...] = Field(
        ("sm_80", "sm_86", "sm_89", "sm_120"),
        strict=False,
        description="GPUs that the engines are for; each adds to their size",
    )


class TensorRtSection(_TensorRt):
    """TensorRT: engines with our ops inside, built and timed on the GPU that is to run them."""

    kind: Literal["tensorrt"] = Field(description="the backend")
    compute_capabilities: tuple[CudaCapability, ...] = Field(
        ("sm_80", "sm_90", "sm_100", "sm_120"),
        strict=False,
        description="GPUs that the ops beside engines are compiled for; engines are for the GPU that builds them",
    )
    timing_cache: WrittenPath | None = Field(
        None,
        description="file, relative to the recipe, of how long kernels took: read before a build, written after it",
    )
    version_compatible: bool = Field(
        False, description="later versions of TensorRT with the same first number may load the engines; may cost speed"
    )
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = Field(
        "none",
        description="GPUs that may run the engines beside the kind that built them: none, those of the same compute "
        "capability, or all from sm_80 on; may cost speed",
    )


BackendBuild = OnnxRuntimeCpuSection | OnnxRuntimeCudaSection | CudaSection | TensorRtRtxSection | TensorRtSection
Kind = Literal["onnxruntime-cpu", "onnxruntime-cuda", "cuda", "tensorrt-rtx", "tensorrt"]
_Discriminated = Annotated[BackendBuild, Field(discriminator="kind")]
BackendEntry = Annotated[
    _Discriminated,
    BeforeValidator(
        lambda written: {"kind": written} if isinstance(written, str) else written,
        json_schema_input_type=_Discriminated | Kind,
    ),
]
"""A backend's section, or its kind alone."""

_KERNELS = ("nvidia-cuda-nvrtc",)
PACKAGES: dict[str, tuple[str, ...]] = {
    "onnxruntime-cpu": (),
    "onnxruntime-cuda": _KERNELS,
    "cuda": _KERNELS,
    "tensorrt-rtx": ("tensorrt_rtx", *_KERNELS),
    "tensorrt": ("tensorrt", *_KERNELS),
}
"""Distributions whose versions shape a backend's engines, beside those that every backend needs."""

KINDS = tuple(PACKAGES)

DEFAULT_BACKENDS: tuple[BackendBuild, ...] = (OnnxRuntimeCpuSection(kind="onnxruntime-cpu"),)


def choose_backends(listed: Sequence[BackendBuild], kinds: Sequence[str]) -> tuple[BackendBuild, ...]:
    """Return the sections of `kinds`, as `listed`, else with defaults. Raises `RecipeError` for an unknown backend."""
    for kind in kinds:
        if kind not in KINDS:
            raise RecipeError(f"there is no backend {kind!r}; choose from {', '.join(KINDS)}")
    own: dict[str, BackendBuild] = {section.kind: section for section in listed}
    return tuple(own.get(kind) or _ENTRY.validate_python(kind) for kind in dict.fromkeys(kinds))


_ENTRY: TypeAdapter[BackendBuild] = TypeAdapter(BackendEntry)
