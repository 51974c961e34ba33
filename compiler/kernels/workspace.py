"""The workspace of an engine: where its intermediate tensors lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.plans.kernel_engine import Launch, Loop

_ALIGNMENT = 256  # bytes: what kernels may assume of an address


@dataclass(frozen=True)
class _Taken:
    """Bytes `[offset, end)`, from the `first` to the `last` item that names them."""

    first: int
    last: int
    offset: int
    end: int


def arrange(items: Sequence[Launch | Loop], areas: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each area, by its bytes, and the size of all. What is in use at the same time lies apart.

    An area is in use from the first item that names it to the last; a loop is one item.
    """
    uses: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        for launch in (item,) if isinstance(item, Launch) else item.launches:
            for tensor in launch.tensors:
                if tensor in areas:
                    uses.setdefault(tensor, []).append(place)
    offsets, taken = dict[str, int](), list[_Taken]()
    for name in sorted(areas, key=lambda name: (-areas[name], name)):
        first, last = (min(uses[name]), max(uses[name])) if name in uses else (0, 0)
        size = -(-areas[name] // _ALIGNMENT) * _ALIGNMENT
        offset = 0
        for other in sorted(taken, key=lambda each: each.offset):
            if other.last < first or last < other.first:
                continue
            if offset + size <= other.offset:
                break
            offset = max(offset, other.end)
        offsets[name] = offset
        taken.append(_Taken(first, last, offset, offset + size))
    return offsets, max((each.end for each in taken), default=0)
