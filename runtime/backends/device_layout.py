"""Where a session's small buffers lie in one block on a device, and which parts of it go up and come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from outrider.plans import names
from outrider.plans.buffers import Tensor
from outrider.plans.check import buffer_shape
from outrider.plans.manifest import BackendPlan, Stage
from outrider.runtime.backends.table_changes import LIST_BYTES

_ALIGNMENT = 256  # bytes: what kernels may assume of an address
UNSEEN = frozenset({names.KV, names.FEATURES, names.NOISE, names.QUERIES, names.KEY_MAX, names.KEY_MIN, names.SELECTED})
LARGE = UNSEEN | {names.ATTN_BIAS, names.LOGITS_OUT, names.DRAFT_PROBS, names.RESIDENT}
"""Tensors that stay on the device; the host asks for rows of them, or sends its own, but for the first, which it has
no side of."""
TABLES = (names.BIM, names.SLOT_POSITIONS)
"""Slot tables, of which the host sends what it has changed."""


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes of the small buffers in the block: those that stages only read, those that they read and write,
    and what they only write, the status of our ops among the second. The first two are `sent` to the device, from 0 on
    with the changes of slot tables; the last two are `fetched` from it. After them lie those that no stage knows, and
    slot tables."""

    offsets: dict[str, int]
    status: int
    sent: slice
    fetched: slice
    size: int


def lay_out(plan: BackendPlan) -> Layout:
    """All buffers whose tensors are not LARGE, one after another; last those that no stage knows, and tables."""
    read = {name for stage in _stages(plan) for name in stage.inputs.values()}
    written = {name for stage in _stages(plan) for name in stage.outputs.values()}
    small = [buffer for buffer in plan.buffers if buffer.name.rpartition(".")[2] not in LARGE]
    kinds: tuple[list[Tensor], ...] = ([], [], [], [])
    for buffer in small:
        status_of_op = buffer.name.rpartition(".")[2] == names.STATUS  # which the host resets
        reads, writes = buffer.name in read or status_of_op, buffer.name in written
        table = buffer.name.rpartition(".")[2] in TABLES
        kinds[3 if table else 0 if reads and not writes else 1 if reads else 2 if writes else 3].append(buffer)
    offsets, ends, end, status = dict[str, int](), list[int](), _aligned(LIST_BYTES), 0
    for index, kind in enumerate(kinds):
        for buffer in kind:
            offsets[buffer.name] = end
            end += _aligned(prod(buffer_shape(plan, buffer)) * buffer.dtype.itemsize)
        if index == 1:
            status, end = end, end + _ALIGNMENT
        ends.append(end)
    return Layout(offsets, status, slice(0, ends[1]), slice(ends[0], ends[2]), end)


def _stages(plan: BackendPlan) -> Iterator[Stage]:
    """Stages that run on the device."""
    for program in plan.programs.values():
        yield from program.stages


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
