"""GGUF files: metadata and the list of tensors at once, tensors on request.

The container is read here rather than with the package `gguf`, whose reader keeps an object for every element of every
list: with a vocabulary of 128,000 tokens it takes 12 s and 600 MB, and it does not end on a damaged length. That
package is the oracle of the tests.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.formats.gguf_blocks import BLOCK_TYPES
from outrider.plans.errors import CheckpointError

Value = int | float | bool | str | list[str] | NDArray[np.generic]
"""A value of the metadata; lists of numbers are arrays. A float32 is the shortest decimal that it is the nearest to."""

_Scalar = TypeVar("_Scalar", bound=int | float | str)
_NOUNS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_MOST_DIMENSIONS = 4
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def shown(value: Value) -> str:
    """Return a value of the metadata as errors show it."""
    return f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else f"{value!r:.60}"


def is_gguf(path: Path) -> bool:
    """Return whether a checkpoint's path is that of a GGUF file."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's entry: `shape` has the inputs last; `offset` is its first byte's, from the beginning of the file."""

    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: of all numbers with the same indices but the last."""
        if self.type in _FLOATS:
            return self.shape[-1] * _FLOATS[self.type].itemsize
        block = BLOCK_TYPES[self.type]
        return self.shape[-1] // block.numbers * block.size

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    """The metadata and the tensors' entries of a GGUF file, both by name and in the file's order."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header."""
        if path.exists() and not path.is_file():  # a pipe, or a device: reading it may never end
            raise CheckpointError(f"{path} is no file; give a GGUF file")
        try:
            with path.open("rb") as file:
                return _Header(path, file).read()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    def value(self, key: str, kind: type[_Scalar]) -> _Scalar | None:
        """Return the metadata's value of `key`; None where there is none. An integer is a number (float), too."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if type(found) is kind or (kind is float and type(found) is int):
            return kind(found)
        raise self._mistyped(key, _NOUNS[kind], found)

    def texts(self, key: str) -> list[str] | None:
        """Return the metadata's list of texts of `key`; None where there is none."""
        found = self.metadata.get(key)
        if found is not None and not isinstance(found, list):
            raise self._mistyped(key, "a list of texts", found)
        return found

    def array(self, key: str, length: int, *, integers: bool = False) -> NDArray[np.generic] | None:
        """Return the metadata's list of `length` numbers of `key`; None where there is none.

        With `integers` no others will do.
        """
        found = self.metadata.get(key)
        if found is None:
            return None
        if isinstance(found, np.ndarray) and found.dtype.kind in ("iu" if integers else "iuf") and len(found) == length:
            return found
        raise self._mistyped(key, f"a list of {length} {'integers' if integers else 'numbers'}", found)

    def wrong(self, key: str, how: str) -> CheckpointError:
        """Return the error that names the file and a key of its metadata."""
        return CheckpointError(f"{self.path}: {key} {how}")

    def _mistyped(self, key: str, noun: str, found: Value) -> CheckpointError:
        return self.wrong(key, f"must be {noun}, found {shown(found)}; convert the model again")

    def numbers(self, name: str) -> NDArray[Any]:
        """Read a tensor of floats: float32, float16, or the bits of bfloat16 as uint16."""
        tensor = self.tensors[name]
        return self._bytes(name).view(_FLOATS[tensor.type]).reshape(tensor.shape)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Read the bytes of a tensor of blocks, uint8 `[rows, bytes of a row]`."""
        tensor = self.tensors[name]
        return self._bytes(name).reshape(tensor.rows, tensor.row_bytes)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        tensor = self.tensors[name]
        size = tensor.rows * tensor.row_bytes
        try:
            found = np.fromfile(self.path, np.uint8, size, offset=tensor.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if found.size != size:
            raise CheckpointError(f"{self.path} changed while it was read: tensor {name!r} is cut off; start again")
        return found


class _Header:
    """A pass over the header of one open file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size, self._at = path.stat().st_size, 0

    def read(self) -> GgufFile:
        if self._size < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with GGUF; download it again")
        version = self._integer("<u4")
        if version not in _VERSIONS:
            swapped = " (it is of the other byte order)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(
                f"{self._path} is of GGUF version {version}{swapped}; little-endian versions 2 and 3 are read: "
                "convert the model again with a current llama.cpp"
            )
        count, keys = self._integer("<u8"), self._integer("<u8")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the key {key!r} stands there twice")
            metadata[key] = self._value(self._integer("<u4"))
        tensors: dict[str, GgufTensor] = {}
        for _ in range(count):
            name, tensor = self._tensor()
            if name in tensors:
                raise self._damaged(f"tensor {name!r} stands there twice")
            tensors[name] = tensor
        given = GgufFile(self._path, metadata, tensors).value(_ALIGNMENT, int)
        alignment = 32 if given is None else given
        if alignment <= 0:
            raise self._damaged(f"{_ALIGNMENT} is {alignment}")
        start = -(-self._at // alignment) * alignment
        placed = {name: GgufTensor(t.type, t.shape, start + t.offset) for name, t in tensors.items()}
        for name, tensor in placed.items():
            if tensor.offset + tensor.rows * tensor.row_bytes > self._size:
                raise self._damaged(f"it ends before tensor {name!r} does")
        return GgufFile(self._path, metadata, placed)

    def _tensor(self) -> tuple[str, GgufTensor]:
        name, dimensions = self._string(), self._integer("<u4")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._integer("<u8") for _ in range(dimensions))[::-1]
        code, offset = self._integer("<u4"), self._integer("<u8")
        kind = _TYPES.get(code, f"type {code}")
        if kind not in _FLOATS and kind not in BLOCK_TYPES:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is stored as {kind}, which is not read; read are "
                f"{', '.join((*_FLOATS, *BLOCK_TYPES))}: give the model in one of them"
            )
        if kind in BLOCK_TYPES and shape[-1] % BLOCK_TYPES[kind].numbers:
            raise self._damaged(f"tensor {name!r} of shape {list(shape)} has no whole blocks of {kind}")
        return name, GgufTensor(kind, shape, offset)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(np.dtype(_SCALARS[kind]))
        if kind != _ARRAY:
            raise self._damaged(f"a value has the unknown type {kind}")
        kind, count = self._integer("<u4"), self._integer("<u8")
        if kind == _STRING:
            self._check_left(8 * count)
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"a list has elements of the type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _scalar(self, dtype: np.dtype[Any]) -> int | float | bool:
        found = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
        plain: int | float | bool = float(str(found)) if dtype == np.float32 else found.item()
        return plain

    def _integer(self, dtype: str) -> int:
        return int(self._scalar(np.dtype(dtype)))

    def _string(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        content = self._take(length)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{content[:40]!r} is no UTF-8 text") from None

    def _take(self, size: int) -> bytes:
        self._check_left(size)
        self._at += size
        return self._file.read(size)

    def _check_left(self, size: int) -> None:
        """Raise `CheckpointError` where fewer than `size` bytes are left, before a damaged length takes memory."""
        if size > self._size - self._at:
            raise self._damaged("it ends inside its header")

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or damaged: {how}; download it again")
