"""An op bound to a device's tensors: what `cuLaunchKernel`, and the emulator of the tests, get at each step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Protocol

from outrider.plans import names
from outrider.plugins.cuda.launches import ELEMENTS, as_number, move_unit
from outrider.plugins.ops import OPS
from outrider.plugins.schema import SLOT


class DeviceTensor(Protocol):
    """A tensor in a device's memory: its address, shape and dtype."""

    @property
    def address(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def itemsize(self) -> int: ...

    @property
    def dtype(self) -> str: ...


class DeviceOp:
    """An op on fixed tensors of a device, which computes the launch for the extents of a step.

    `workspace(name, bytes, zeroed)` returns the address of a part of the workspace; `STATUS` is one of all ops.
    """

    def __init__(
        self,
        op_name: str,
        tensors: Mapping[str, DeviceTensor],
        attributes: Mapping[str, int | float],
        workspace: Callable[[str, int, bool], int],
    ) -> None:
        op = OPS[op_name]
        assert op.launch is not None, f"{op_name} has no kernel on devices"
        self.launch, schema = op.launch, op.schema
        self._extents = schema.extents
        self._sizes: dict[str, int] = {
            spec.name: as_number(spec.kind, attributes.get(spec.name, spec.default or 0)) for spec in schema.attributes
        }
        for spec in schema.tensors:
            tensor = tensors[spec.name]
            for dim, size in zip(spec.shape, tensor.shape, strict=True):
                if isinstance(dim, str):
                    self._sizes.setdefault(dim, size)
        if names.KV in tensors:
            self._sizes["itemsize"] = tensors[names.KV].itemsize
            self._sizes["cache_rows"] = tensors[names.KV].shape[1]  # a call may have fewer
            self._sizes["element"] = ELEMENTS.index(tensors[names.KV].dtype)
            self._sizes["unit"] = move_unit(self._sizes)
            slot = self._sizes[SLOT] * self._sizes["itemsize"]
            self._sizes["units"] = slot // self._sizes["unit"]
        parts = self.launch.scratch.items()
        own = {name: workspace(name, part.size(self._sizes), part.zeroed) for name, part in parts}
        addresses = {name: tensor.address for name, tensor in tensors.items()} | own
        self._pointers = [addresses[name] for name in self.launch.pointers]

    def values(self, *extents: int) -> tuple[int, int, list[ctypes.c_uint64 | ctypes.c_int64]]:
        """Return blocks, threads per block, and kernel parameters, for the extents of the op's schema in order."""
        sizes = self._sizes | dict(zip(self._extents, extents, strict=True))
        parameters: list[ctypes.c_uint64 | ctypes.c_int64] = [ctypes.c_uint64(address) for address in self._pointers]
        parameters += [ctypes.c_int64(sizes[number]) for number in self.launch.numbers]
        return self.launch.blocks(sizes), self.launch.threads(sizes), parameters
