"""Whether a loaded plan gives the results of a batch that was begun, perhaps on another kind of processor."""

from __future__ import annotations

from os import PathLike
from socket import gethostname

from outrider.plans.errors import RequestError
from outrider.runtime.batch.folder import BatchState
from outrider.runtime.exactness import foreign_kernels, kernels_that_count
from outrider.runtime.runtime import Runtime


def check_loaded(runtime: Runtime, plan: str | PathLike[str], state: BatchState) -> None:
    """Raise RequestError where the plan that was loaded, or this machine, would give other results than `state`."""
    if runtime.manifest.identity != state.plan:
        raise RequestError(
            f"{plan} is another plan on {gethostname()} than the batch was begun with; put that one there."
        )
    here = kernels_that_count(runtime.manifest, state.backend)
    if here and (foreign := foreign_kernels(here, state.kernels)):
        raise RequestError(
            f"{gethostname()} has {foreign}, and ONNX Runtime multiplies floats otherwise there, so that results "
            "could differ: use nodes of one kind, or a plan with weights of int8 or int4, the same bits everywhere."
        )
