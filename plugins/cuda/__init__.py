"""The ops on CUDA devices: which kernels they launch, and how those are compiled ahead of time."""

from plugins.cuda.launches import LAUNCHES, DeviceOp, DeviceTensor, Launch

__all__ = ["LAUNCHES", "DeviceOp", "DeviceTensor", "Launch"]
