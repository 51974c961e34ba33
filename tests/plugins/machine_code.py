"""The instructions of a cubin for sm_80 and later: operations, targets of branches, and which waits for which.

An instruction has 16 bytes. A load says in its control bits which of six scoreboards it signals, and a later
instruction which ones it waits for; `nvdisasm -hex` shows the same bits. NVIDIA does not document them: the places are
from Zhe Jia et al. ("Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, section 2).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from outrider.plugins.cuda.resources import sections

LDG, IMMA, HMMA, DEPBAR, BRA = 0x981, 0x237, 0x23C, 0x91A, 0x947
"""By the lowest twelve bits, which say the operation and the kinds of its operands."""

_SIZE = 16
_NONE = 7  # no scoreboard


@dataclass(frozen=True)
class Instruction:
    """At `place` bytes of its kernel. It signals the scoreboard `signals` when its result is there, after it has waited
    for those of `waits`; a branch goes to the byte `target`, and a DEPBAR leaves `open_groups` of copies open."""

    place: int
    operation: int
    signals: int | None
    waits: frozenset[int]
    target: int | None
    open_groups: int | None


def instructions(cubin: bytes, kernel: str) -> list[Instruction]:
    """Return the instructions of a kernel, in order of place. Raises KeyError for a kernel that is not there."""
    places = {name: (start, end) for name, _, start, end in sections(cubin)}
    start, end = places[f".text.{kernel}"]
    return [_read(place, *struct.unpack_from("<QQ", cubin, start + place)) for place in range(0, end - start, _SIZE)]


def _read(place: int, low: int, high: int) -> Instruction:
    operation, signals, waits = low & 0xFFF, high >> 46 & 7, high >> 52 & 63
    target = None
    if operation == BRA:
        words = ((low >> 34 | high << 30) & (1 << 48) - 1) << 8 | low >> 16 & 0xFF  # of four bytes
        target = place + _SIZE + 4 * (words - (1 << 56) if words >> 55 else words)
    return Instruction(
        place,
        operation,
        None if signals == _NONE else signals,
        frozenset(board for board in range(6) if waits >> board & 1),
        target,
        low >> 38 & 63 if operation == DEPBAR else None,
    )


def loops_with(code: list[Instruction], *operations: int) -> list[list[Instruction]]:
    """Return the smallest loops that have all of `operations`, each from the target of a branch to that branch."""
    spans = sorted({(each.target, each.place) for each in code if each.target is not None and each.target < each.place})
    loops = [[each for each in code if first <= each.place <= last] for first, last in spans]
    loops = [loop for loop in loops if set(operations) <= {each.operation for each in loop}]
    return [loop for loop in loops if not any(_within(other, loop) for other in loops if other is not loop)]


def _within(inner: list[Instruction], outer: list[Instruction]) -> bool:
    return outer[0].place <= inner[0].place and inner[-1].place <= outer[-1].place
