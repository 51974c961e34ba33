"""Reading messages of Protocol Buffers without their schema: fields by number and wire type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(data: bytes | memoryview) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield a message's fields: number and wire type, and the value, an integer or a slice of `data`.

    Raises ValueError or IndexError for damaged messages.
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key >= 1 << 32:  # other readers would cut it, and see another field
            raise ValueError("a field number of more than 29 bits")
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(data, place)
            yield (number, kind), value
            continue
        if kind == BYTES:
            size, place = _varint(data, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError("no such wire type")
        if place + size > len(data):
            raise ValueError("the message is cut off")
        yield (number, kind), data[place : place + size]
        place += size


def _varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number of more than 64 bits")
