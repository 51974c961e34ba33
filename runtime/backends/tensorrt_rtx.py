"""TensorRT for RTX: driven as TensorRT is, and its engines are finished on the GPU that runs them."""

from __future__ import annotations

from functools import partial

from outrider.runtime.backends.base import Driver
from outrider.runtime.backends.tensorrt import Library, TensorRt, reason_against

RTX = Library("tensorrt_rtx", "TensorRT for RTX", "tensorrt-rtx", jit=True)
DRIVER = Driver(partial(reason_against, RTX), partial(TensorRt, RTX))
