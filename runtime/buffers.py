"""The buffers of one session. This object owns the addresses: each buffer is allocated once, at its largest size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.check import buffer_shape, session_bytes
from plans.errors import PlanError
from plans.manifest import TargetPlan
from runtime.sampling import SamplingParams


class Buffers:
    """Arrays by name, views included. Zero-initialised: what no step has written is finite."""

    def __init__(self, plan: TargetPlan) -> None:
        try:
            self.arrays: dict[str, NDArray[Any]] = {
                buffer.name: np.zeros(buffer_shape(plan, buffer), buffer.dtype.numpy) for buffer in plan.buffers
            }
        except MemoryError:
            raise PlanError(
                f"a session of this plan needs {session_bytes(plan) / 1e9:.1f} GB for its buffers, more than this "
                "machine gives; build the plan with a smaller capacity.context"
            ) from None
        for name, view in plan.views.items():
            self.arrays[name] = self.arrays[view.buffer][view.plane]

    def of(self, model: str, tensor: str) -> NDArray[Any]:
        """The buffer that holds `tensor` for `model`."""
        return self.arrays[names.of(model, tensor)]

    def set_sampling(self, branch: int, params: SamplingParams) -> None:
        """Fill a branch's sampling slot."""
        self.arrays[names.TEMPERATURE][branch] = params.temperature
        self.arrays[names.TOP_K][branch] = params.top_k
        self.arrays[names.TOP_P][branch] = params.top_p
        self.arrays[names.FILTER_ORDER][branch] = params.filter_order == "temperature_last"
        self.arrays[names.SEED][branch] = params.seed
        self.arrays[names.STREAM][branch] = params.stream
        self.arrays[names.SKIP_SAMPLE_ADJUSTMENT][branch] = params.skip_sample_adjustment
