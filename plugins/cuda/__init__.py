"""The ops on CUDA devices: their kernel launches, and the compilation of kernels ahead of time."""

from outrider.plugins.cuda.launches import LAUNCHES, DeviceOp, DeviceTensor, Launch

__all__ = ["LAUNCHES", "DeviceOp", "DeviceTensor", "Launch"]
