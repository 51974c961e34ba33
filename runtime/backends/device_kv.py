"""KV in memory of a device: slots of all planes and heads go by one copy, on the device's own stream."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.backends.cuda_driver import Box
from outrider.runtime.backends.device_contract import Device
from outrider.runtime.kv.memory import KvMemory


@dataclass(frozen=True)
class KvShape:
    """Shape of KV `[planes, heads, slots, size]`; `stride` heads lie between a plane and the next, those of other rows
    too."""

    planes: int
    heads: int
    slots: int
    size: int
    stride: int
    dtype: Any

    @property
    def line(self) -> int:
        """Bytes of a slot of one head."""
        return int(self.size * np.dtype(self.dtype).itemsize)


class DeviceKv:
    """KV at `address` of a device. What it is copied to and from lies on the same device, or on the host."""

    def __init__(self, device: Device, address: int, shape: KvShape) -> None:
        self._device, self._address, self._shape = device, address, shape
        self.slots, self.slot_bytes = shape.slots, shape.planes * shape.heads * shape.line

    @classmethod
    def allocate(cls, device: Device, planes: int, heads: int, slots: int, size: int, dtype: Any) -> DeviceKv:
        """New memory of zeros, which is given back with this object. Raises `PlanError` where there is none."""
        shape = KvShape(planes, heads, slots, size, heads, dtype)
        made = cls(device, device.allocate(planes * heads * slots * shape.line), shape)
        finalize(made, device.free, made._address).atexit = False
        return made

    def copy(self, to: int, source: KvMemory, first: int, count: int) -> None:
        if not count:
            return
        if not isinstance(source, DeviceKv):
            self._write(to, source.array(first, count))
        elif source is self and abs(to - first) < count:
            apart = DeviceKv.allocate(self._device, *self._extent(count), self._shape.dtype)
            apart.copy(0, self, first, count)
            self.copy(to, apart, 0, count)
        else:
            with self._device.lock():
                self._move(self._box(to), source._box(first), count)

    def array(self, first: int, count: int) -> NDArray[Any]:
        host = self._host(count)
        with self._device.lock():
            self._move(self._box_of(host), self._box(first), count)
            there = self._device.mark()
        self._device.wait_for(there)
        return host

    def _write(self, to: int, values: NDArray[Any]) -> None:
        host = self._host(values.shape[2])
        host[:] = values
        with self._device.lock():
            self._move(self._box(to), self._box_of(host), values.shape[2])
            there = self._device.mark()
        self._device.wait_for(there)  # the host's copy goes with this call

    def _extent(self, count: int) -> tuple[int, int, int, int]:
        return self._shape.planes, self._shape.heads, count, self._shape.size

    def _host(self, count: int) -> NDArray[Any]:
        extent, dtype = self._extent(count), self._shape.dtype
        return self._device.pinned(prod(extent) * np.dtype(dtype).itemsize).array(0, extent, dtype)

    def _box(self, slot: int) -> Box:
        shape = self._shape
        return Box(self._address + slot * shape.line, shape.slots * shape.line, shape.stride)

    def _box_of(self, host: NDArray[Any]) -> Box:
        return Box(host.ctypes.data, host.shape[2] * self._shape.line, self._shape.heads)

    def _move(self, to: Box, source: Box, count: int) -> None:
        self._device.copy_box(to, source, count * self._shape.line, self._shape.heads, self._shape.planes)
