"""What compiled kernels take of a multiprocessor: registers, shared memory, stack; read from a cubin, without a GPU.

A cubin is an ELF file. Its section `.nv.info` says by kernel how many registers a thread has and how large its stack
is, and `.nv.shared.KERNEL` is as large as the shared memory that a block takes at least.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info
_PAIR = 0x04  # the format of an attribute with a symbol and a value
_WARP, _REGISTER_UNIT = 32, 256  # threads; registers that are given to a warp at once
_SYMBOLS = 2  # the type of a section with symbols

REGISTERS = 65536
"""Registers of a multiprocessor."""


@dataclass(frozen=True)
class Multiprocessor:
    """The most `threads` of a multiprocessor, and the bytes of `shared` memory that its blocks share."""

    threads: int
    shared: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, 164 * 1024),
    "sm_86": Multiprocessor(1536, 100 * 1024),
    "sm_89": Multiprocessor(1536, 100 * 1024),
    "sm_90": Multiprocessor(2048, 228 * 1024),
    "sm_100": Multiprocessor(2048, 228 * 1024),
    "sm_120": Multiprocessor(1536, 100 * 1024),
}
"""By architecture; CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


@dataclass(frozen=True)
class Resources:
    """Of one kernel: `registers` and bytes of `stack` of a thread, bytes of `shared` memory of a block."""

    registers: int
    stack: int
    shared: int

    def blocks(self, on: Multiprocessor, threads: int, dynamic: int = 0) -> int:
        """Return how many blocks of `threads`, with `dynamic` shared memory, a multiprocessor runs at a time."""
        warps = -(-threads // _WARP)
        own = -(-self.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT * warps
        shared = self.shared + dynamic
        return min(on.threads // (warps * _WARP), REGISTERS // own, on.shared // shared if shared else on.threads)


def kernel_resources(cubin: bytes) -> dict[str, Resources]:
    """Return the resources of every kernel of a cubin. Raises `ValueError` for bytes that are none."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("this is no cubin")
    known = list(sections(cubin))
    names = {name: (start, end) for name, _, start, end in known}
    symbols = next(cubin[start:end] for _, kind, start, end in known if kind == _SYMBOLS)
    strings = names[".strtab"][0]
    found: dict[int, dict[str, int]] = {}
    for attribute, symbol, value in _attributes(cubin[slice(*names[".nv.info"])]):
        found.setdefault(symbol, {})[attribute] = value
    resources = {}
    for symbol, values in found.items():
        (offset,) = struct.unpack_from("<I", symbols, 24 * symbol)
        name = _text(cubin, strings + offset)
        if "registers" not in values:  # a function that kernels call
            continue
        start, end = names.get(f".nv.shared.{name}", (0, 0))
        resources[name] = Resources(values["registers"], values.get("stack", 0), end - start)
    return resources


def sections(cubin: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, type, first and last byte of each section; one without content in the file counts its size all the
    same."""
    (first,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + size * index) for index in range(count)]
    for name, kind, _, _, start, length in headers:
        yield _text(cubin, headers[of_names][4] + name), kind, start, start + length


def _attributes(info: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the registers and stacks in `.nv.info`, by the number of a symbol."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == _PAIR and size == 8 and attribute in (_REGISTERS, _FRAME):
            symbol, value = struct.unpack_from("<II", info, at + 4)
            yield "registers" if attribute == _REGISTERS else "stack", symbol, value
        at += 4 + (size if form == _PAIR else 0)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
