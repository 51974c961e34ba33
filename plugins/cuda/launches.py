"""The kernel launch of each op on a device: one kernel, its parameters in order, and the numbers of blocks and threads.

This is data, and its marshalling: a kernel's parameters are the op's tensors, its workspace, and numbers; a float is
passed as the bits of a float32. Nothing here needs a device: `csrc/cuda/*.cu.h` has the kernels, and `cuLaunchKernel`
and the emulator of the tests get the same values.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from outrider.plans import names
from outrider.plugins.schema import SLOT
from outrider.plugins.schemas import SCHEMAS

THREADS = 256
ROW_THREADS = 512  # for kernels whose few blocks read much: the most that a block may have (csrc/cuda/block.h)

# Dtypes of a KV cache on a device, in the kernels' numbering (csrc/cuda/element.h).
ELEMENTS = ("float32", "float16", "bfloat16")
_SHARES = 16  # CUDA blocks per head for new KV blocks: few are new in a step, many at once after a long prompt

# Rows of logits are shared out to blocks (csrc/cuda/row_share.h, candidates.h). Scratch of a row of V logits is
# 152 bytes for each 1024 of them, and 256 KiB of candidates: at V = 128k, 0.27 MiB.
SHARE = 1024  # logits of a block
SHARE_BYTES = 152
MOST_CANDIDATES = 16384
CANDIDATE_BYTES = 16

Sizes = Mapping[str, int]
"""Sizes of an op by symbol: those of its tensors, and the extents of the call."""


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


@dataclass(frozen=True)
class Scratch:
    """A part of an op's workspace: `size` gives its bytes from the op's largest sizes; `zeroed`: it starts as zeros."""

    size: Callable[[Sizes], int]
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel's parameters: names of tensors and of scratch, then of sizes (symbols) and attributes, as int64.

    `blocks` and `threads` compute the numbers of blocks, and of threads per block, from the sizes of the call.
    """

    kernel: str
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    blocks: Callable[[Sizes], int]
    threads: Callable[[Sizes], int] = lambda sizes: THREADS
    scratch: Mapping[str, Scratch] = field(default_factory=dict)


STATUS = "status"  # int64 [1]: 0, or the number of a fault (FAULTS); shared by all ops of a session
FAULTS = {
    1: "the logits contain NaN",
    2: "the logits are -inf for every token",
    3: "an index, a branch or a drafter's probability is out of range",
}

_CHOICE = (
    names.LOGITS_OUT, names.LOGIT_INDICES, names.POSITIONS, names.BRANCH, names.SAMPLING, names.SEED, names.STREAM,
)  # fmt: skip
_DRAFT = (names.NOISE, names.DRAFT_SAMPLING)
_TREE = (names.TOKEN_IDS, names.PARENT)
_ACCEPTED = (names.COMMITTED, names.ACCEPTED_COUNT, names.KEPT_INDICES, names.KEPT_COUNT)
_PARTIAL_LAYOUT = ("block_size", "sink_blocks", "window_blocks")
_COUNTER = {"counter": Scratch(lambda s: 8, zeroed=True)}
_SHARED_OUT = {
    "shares": Scratch(lambda s: SHARE_BYTES * s[names.LOGITS] * shares(s)),
    "candidates": Scratch(lambda s: CANDIDATE_BYTES * MOST_CANDIDATES * s[names.LOGITS]),
    "arrived": Scratch(lambda s: 4 * s[names.LOGITS], zeroed=True),  # of each row, how many blocks have arrived
}
_WALK = {
    **_SHARED_OUT,
    "chosen": Scratch(lambda s: 8 * s[names.LOGITS]),
    "next": Scratch(lambda s: 8 * s[names.LOGITS]),
    **_COUNTER,
}


def as_number(kind: type[int] | type[float], value: int | float) -> int:
    """Return an attribute as kernels take it: an integer, or the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0]) if kind is float else int(value)


def move_unit(sizes: Sizes) -> int:
    """Return the bytes that a thread moves at once, a divisor of a slot's bytes."""
    slot = sizes[SLOT] * sizes["itemsize"]
    return next(unit for unit in (16, 4, 2) if slot % unit == 0)


def shares(sizes: Sizes) -> int:
    """Return the number of blocks that a row of logits is shared out to."""
    return -(-sizes["V"] // SHARE)


LAUNCHES: dict[str, Launch] = {
    "BimMask": Launch(
        kernel="outrider_bim_mask",
        pointers=(names.BIM, names.PAST_LENGTH, names.ROW_SPLITS, names.BRANCH, names.PARENT, names.ATTN_BIAS),
        numbers=("capacity", names.VIEW, names.ROWS, names.PLACES),
        blocks=lambda s: s[names.ROWS] * s[names.PLACES],
    ),
    "Sample": Launch(
        kernel="outrider_sample",
        pointers=(*_CHOICE, names.COMMITTED, "shares", "candidates", STATUS, "arrived"),
        numbers=("V", "B", "purpose"),
        blocks=lambda s: s[names.LOGITS] * shares(s),
        scratch=_SHARED_OUT,
    ),
    "TreeAccept": Launch(
        kernel="outrider_tree_accept",
        pointers=(*_CHOICE, *_TREE, *_ACCEPTED, "shares", "candidates", STATUS, "chosen", "next", "arrived", "counter"),
        numbers=("V", "B", "trees", names.NEW, "purpose"),
        blocks=lambda s: s[names.LOGITS] * shares(s),
        scratch=_WALK,
    ),
    "ChainAccept": Launch(
        kernel="outrider_chain_accept",
        pointers=(
            *_CHOICE, *_TREE, names.DRAFT_PROBS, names.SKIP_SAMPLE_ADJUSTMENT, names.BY_REJECTION, *_ACCEPTED,
            names.TRIALS, "shares", "candidates", STATUS, "chosen", "next", "weighed", "arrived", "counter",
        ),
        numbers=("V", "B", "trees", names.NEW),
        blocks=lambda s: s[names.LOGITS] * shares(s),
        scratch={**_WALK, "weighed": Scratch(lambda s: 16 * s[names.LOGITS])},
    ),
    "RaceNoise": Launch(
        kernel="outrider_race_noise",
        pointers=(
            names.TIP_POSITION, names.SAMPLING, names.SEED, names.STREAM, names.NOISE, names.DRAFT_SAMPLING,
        ),
        numbers=("B", "depths", "V", "purpose"),
        blocks=lambda s: -(-s["B"] * s["depths"] * s["V"] // (4 * THREADS)),
    ),
    "KvGather": Launch(
        kernel="outrider_kv_gather",
        pointers=(names.KV, "source", "source_count", names.ROW_SPLITS, "source_base", "destination"),
        numbers=(names.ROWS, "cache_rows", "heads", "capacity", "units", "unit"),
        blocks=lambda s: s["planes"] * s[names.ROWS] * s["heads"],
        threads=lambda s: min(THREADS, max(32, s["units"])),
    ),
    "BlockSummary": Launch(
        kernel="outrider_block_summary",
        pointers=(
            names.KV, names.LAYER_WINDOWS, names.ROW, names.COVERED, names.SUMMARISED, names.KEY_MAX, names.KEY_MIN,
        ),
        numbers=(names.ROWS, "layers", "heads", "capacity", "head_dim", "blocks", "element", *_PARTIAL_LAYOUT),
        blocks=lambda s: s["layers"] * s["heads"] * min(s["blocks"], _SHARES),
        threads=lambda s: min(THREADS, max(32, s["head_dim"])),
    ),
    "BlockSelect": Launch(
        kernel="outrider_block_select",
        pointers=(
            names.QUERIES, names.KEPT_INDICES, names.KEPT_COUNT, names.KEY_MAX, names.KEY_MIN, names.LAYER_WINDOWS,
            names.ROW, names.COVERED, names.BUDGET, names.SELECTED, "scores",
        ),
        numbers=(
            names.ROWS, "layers", "heads", "head_dim", "blocks", "retrieval", names.NEW, "num_heads * head_dim",
            *_PARTIAL_LAYOUT, "reduction", "most_queries",
        ),
        blocks=lambda s: s["layers"] * s["heads"],
        threads=lambda s: ROW_THREADS,
        scratch={"scores": Scratch(lambda s: 4 * s["layers"] * s["heads"] * s["blocks"])},
    ),
    "PartialKvGather": Launch(
        kernel="outrider_partial_kv_gather",
        pointers=(names.KV, names.ROW, names.COVERED, names.SELECTED, "partial_kv", names.RESIDENT),
        numbers=(
            names.ROWS, "layers", "heads", "capacity", "partial_capacity", "retrieval", *_PARTIAL_LAYOUT, "units",
            "unit",
        ),
        blocks=lambda s: s["layers"] * s["heads"],
        threads=lambda s: ROW_THREADS,
    ),
    "DraftSample": Launch(
        kernel="outrider_draft_sample",
        pointers=("logits", *_DRAFT, "token", "probability"),
        numbers=("nodes", "V"),
        blocks=lambda s: s["trees"] * s["nodes"],
        threads=lambda s: ROW_THREADS,
    ),
    "TreeExpand": Launch(
        kernel="outrider_tree_expand",
        pointers=(
            "logits", "score", *_DRAFT, "token", "candidate_score", "frontier", "counter",
        ),
        numbers=("frontier", "V", "top_k", "doubt"),
        blocks=lambda s: s["trees"] * s["frontier"],
        threads=lambda s: ROW_THREADS,
        scratch=_COUNTER,
    ),
    "TreeRerank": Launch(
        kernel="outrider_tree_rerank",
        pointers=(
            "candidate_token", "candidate_score", "candidate_parent", "candidate_depth", "candidate", "token", "parent",
            "depth", "score",
        ),
        numbers=("candidates", "nodes"),
        blocks=lambda s: s["trees"],
    ),
}  # fmt: skip


class DeviceOp:
    """An op on fixed tensors of a device, which computes the launch for the extents of a step.

    `workspace(name, bytes, zeroed)` returns the address of a part of the workspace; `STATUS`, int64 [1], is one part.
    """

    def __init__(
        self,
        op_name: str,
        tensors: Mapping[str, DeviceTensor],
        attributes: Mapping[str, int | float],
        workspace: Callable[[str, int, bool], int],
    ) -> None:
        schema = self._schema = SCHEMAS[op_name]
        self.launch = LAUNCHES[op_name]
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
        if STATUS in self.launch.pointers:
            own[STATUS] = workspace(STATUS, 8, True)
        addresses = {name: tensor.address for name, tensor in tensors.items()} | own
        self._pointers = [addresses[name] for name in self.launch.pointers]

    def values(self, *extents: int) -> tuple[int, int, list[ctypes.c_uint64 | ctypes.c_int64]]:
        """Return blocks, threads per block, and kernel parameters, for the extents of the op's schema in order."""
        sizes = self._sizes | dict(zip(self._schema.extents, extents, strict=True))
        parameters: list[ctypes.c_uint64 | ctypes.c_int64] = [ctypes.c_uint64(address) for address in self._pointers]
        parameters += [ctypes.c_int64(sizes[number]) for number in self.launch.numbers]
        return self.launch.blocks(sizes), self.launch.threads(sizes), parameters
