"""What every backend has: its section of a recipe, which knows how engines are built for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from outrider.compiler.identity import PACKAGES, package_version
from outrider.compiler.models.config import WeightType
from outrider.compiler.recipe_sections import Section, check_distinct
from outrider.plans.backends import BACKENDS, BackendSupport
from outrider.plans.errors import PlanError
from outrider.plans.extras import install

if TYPE_CHECKING:
    from outrider.compiler.engines import EngineFolder
    from outrider.compiler.lowering.rule import Rule

Report = Callable[[str], None]
"""Called with the phases of long work."""

CudaCapability = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]
"""GPUs that our own ops are compiled for."""


class Backend(Section):
    """A library that reads ONNX files of standard ops. Other backends override what they do otherwise."""

    kind: str = Field(description="the backend")
    dtype: WeightType | None = Field(None, description="type of the weights for this backend, in place of target.dtype")

    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions shape the engines, beside those that every backend needs."""
    widens: ClassVar[bool] = False
    """Whether graphs are in float32 for weights of any type, because kernels widen what they read."""
    bounded: ClassVar[bool] = False
    """Whether engines are built for the plan's largest steps; others take steps of any size."""
    holds_ops: ClassVar[bool] = False
    """Whether engines may hold our ops, which then report errors in buffers of status."""
    kernels: ClassVar[tuple[str, str]] = ("kernels.cu", "kernels")
    """The source of the kernels that are compiled for each of `architectures`, and their folder in the plan."""

    @property
    def support(self) -> BackendSupport:
        return BACKENDS[self.kind]

    @property
    def architectures(self) -> tuple[str, ...]:
        """The GPUs that kernels are compiled for, such as sm_80."""
        return ()

    @property
    def cache(self) -> str | None:
        """The recipe's path of a file that builds read and write beside the plan."""
        return None

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """Return the rules that lower a graph for the backend, in order."""
        from outrider.compiler.lowering.attention import AroundAttention
        from outrider.compiler.lowering.functions import FunctionBody

        return (AroundAttention(), FunctionBody())

    def open_folder(self, folder: Path, report: Report, cache: Path | None, dtype: WeightType) -> EngineFolder:
        """Return the writer of engines, which builds with the file `cache`; `dtype` is the type of the weights.

        Raises `PlanError` where the backend's library is missing.
        """
        from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines

        return OnnxRuntimeEngines(folder)

    def facts_of_machine(self) -> dict[str, str]:
        """Return facts of this machine that shape the engines. Raises `PlanError` where it cannot build them."""
        return {}

    def reason_against(self) -> str | None:
        """Return why this machine cannot build engines for the backend; None where it can."""
        for packages, extra in (((*PACKAGES, "ml-dtypes", "pyyaml"), "compiler"), (self.packages, self.support.extra)):
            if missing := [name for name in packages if not package_version(name)]:
                return f"it lacks {', '.join(missing)}; {install(extra)}"
        try:
            self.facts_of_machine()
        except PlanError as error:
            return str(error)
        return None


class GpuBackend(Backend):
    """A backend that runs on GPUs."""

    compute_capabilities: tuple[str, ...]

    packages: ClassVar[tuple[str, ...]] = ("nvidia-cuda-nvrtc",)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.compute_capabilities

    @field_validator("compute_capabilities")
    @classmethod
    def _distinct(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        check_distinct(given)
        return given
