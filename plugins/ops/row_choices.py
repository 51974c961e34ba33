"""The ops that choose tokens from rows of logits: their inputs, scratch, and parts in TensorRT's engines."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.sampling import SETTINGS
from outrider.plugins.cuda.launches import STATUS, Launch, Scratch, Sizes
from outrider.plugins.ops.op import Tensors
from outrider.plugins.reference.choice import choice, sampling_of
from outrider.plugins.reference.race import RaceKey
from outrider.plugins.schema import INTEGER, AttributeSpec, OpSchema, Purpose, TensorSpec, one, per_new_token
from outrider.plugins.tensorrt.plugin import SAME_SIZE, Plugin

SLOTS = "B"  # sampling slots, one per branch
VOCABULARY = "V"

CHOICE_SLOTS = (
    TensorSpec(names.SAMPLING, "float64", (SLOTS, SETTINGS)),
    TensorSpec(names.SEED, "uint64", (SLOTS,)),
    TensorSpec(names.STREAM, INTEGER, (SLOTS,)),
)
CHOICE_INPUTS = (
    TensorSpec(names.LOGITS_OUT, "float32", (names.LOGITS, VOCABULARY)),
    TensorSpec(names.LOGIT_INDICES, INTEGER, (names.LOGITS,)),
    per_new_token(names.POSITIONS),
    per_new_token(names.BRANCH),
    *CHOICE_SLOTS,
)
COMMITTED = TensorSpec(names.COMMITTED, INTEGER, (names.LOGITS,))
TREE_INPUTS = (per_new_token(names.TOKEN_IDS), per_new_token(names.PARENT))
ACCEPT_OUTPUTS = (
    COMMITTED,
    TensorSpec(names.ACCEPTED_COUNT, INTEGER, ("trees",)),
    per_new_token(names.KEPT_INDICES),
    one(names.KEPT_COUNT),
)
PURPOSE = AttributeSpec("purpose", int, int(Purpose.TARGET))


@dataclass(frozen=True)
class SamplingSlots:
    """Settings `[B, SETTINGS]` and random streams `[B]` of all branches; dtypes as in the schema of Sample."""

    sampling: NDArray[np.float64]
    seed: NDArray[np.uint64]
    stream: NDArray[np.int64]

    @classmethod
    def among(cls, tensors: Tensors) -> SamplingSlots:
        """Return those of an op's tensors."""
        return cls(tensors[names.SAMPLING], tensors[names.SEED], tensors[names.STREAM])

    def key(self, branch: int, position: int, purpose: Purpose) -> RaceKey:
        """Return the race for the token after `position`: a race is numbered by the token that it draws."""
        return RaceKey(int(self.seed[branch]), int(self.stream[branch]), position + 1, purpose)

    def choose(self, logits: NDArray[np.float32], branch: int, position: int, purpose: Purpose) -> int:
        """Choose the token after `position` from `logits`."""
        return choice(logits, sampling_of(self.sampling, branch), self.key(branch, position, purpose))


# Rows of logits are shared out to blocks (csrc/cuda/row_share.h, candidates.h). Scratch of a row of V logits is
# 152 bytes for each 1024 of them, and 256 KiB of candidates: at V = 128k, 0.27 MiB.
SHARE = 1024  # logits of a block
SHARE_BYTES = 152
MOST_CANDIDATES = 16384
CANDIDATE_BYTES = 16


def shares(sizes: Sizes) -> int:
    """Return the number of blocks that a row of logits is shared out to."""
    return -(-sizes["V"] // SHARE)


def share_blocks(sizes: Sizes) -> int:
    """Return the number of blocks to which the rows of logits are shared out."""
    return sizes[names.LOGITS] * shares(sizes)


SHARED_OUT = {
    "shares": Scratch(lambda s: SHARE_BYTES * share_blocks(s)),
    "candidates": Scratch(lambda s: CANDIDATE_BYTES * MOST_CANDIDATES * s[names.LOGITS]),
    STATUS: Scratch(lambda s: 8, zeroed=True),
}
ARRIVED = {"arrived": Scratch(lambda s: 4 * s[names.LOGITS], zeroed=True)}  # of each row, how many blocks have arrived
NODES = {"chosen": Scratch(lambda s: 8 * s[names.LOGITS]), "next": Scratch(lambda s: 8 * s[names.LOGITS])}


CHOSEN = TensorSpec("chosen", INTEGER, (names.LOGITS,))
"""The token that each node would commit; below -1, its fault."""

NEXT = TensorSpec("next", INTEGER, (names.LOGITS,))
"""The place of the child where the walk continues, or -1."""

ROWS_FIT = f"rows_ascend({names.LOGIT_INDICES}, {names.LOGITS}, {names.NEW})"

_SHARES = TensorSpec("shares", "uint64", (names.LOGITS, "shares", SHARE_BYTES // 8))  # csrc/cuda/row_share.h
_CANDIDATES = TensorSpec("candidates", "uint64", (names.LOGITS, MOST_CANDIDATES * CANDIDATE_BYTES // 8))


def share_plugin(schema: OpSchema, name: str, kernel: str, others: tuple[str, ...], guard: str) -> Plugin:
    """Return the first part of a choice: blocks summarise their shares of every row of logits."""
    tensors = {spec.name: spec for spec in schema.inputs}
    inputs = (*CHOICE_INPUTS, *(tensors[other] for other in others))
    attributes = tuple(spec.name for spec in schema.attributes)
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, _SHARES)),
            numbers=(VOCABULARY, SLOTS, *attributes),
            blocks=share_blocks,
        ),
        inputs=inputs,
        outputs=(_SHARES,),
        attributes=attributes,
        derived={"shares": shares},
        guard=guard,
        extra=(names.LOGITS, names.NEW),
    )


def choice_plugin(
    schema: OpSchema,
    name: str,
    kernel: str,
    found: tuple[TensorSpec, ...],
    guard: str,
    reported: tuple[TensorSpec, ...] = (),
) -> Plugin:
    """Return the second part of a choice: one block for each row."""
    inputs = (*schema.inputs, _SHARES)
    attributes = tuple(spec.name for spec in schema.attributes)
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, *found, _CANDIDATES, *reported)),
            numbers=(VOCABULARY, SLOTS, *attributes),
            blocks=lambda s: s[names.LOGITS],
        ),
        inputs=inputs,
        outputs=(*found, *reported, _CANDIDATES),
        attributes=attributes,
        guard=guard,
        extra=(names.LOGITS, names.NEW),
    )


def walk_plugin(schema: OpSchema, name: str, kernel: str, found: tuple[TensorSpec, ...]) -> Plugin:
    """Return the last part of an acceptance: one warp reads the choices; its first thread walks and reports faults."""
    tensors = {spec.name: spec for spec in schema.inputs}
    inputs = (tensors[names.LOGIT_INDICES], tensors[names.PARENT], *found)
    status = one(STATUS)  # of the step: 0, or the number of a fault
    outputs = (
        replace(spec, shape=tuple(SAME_SIZE.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape))
        for spec in schema.outputs
    )
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, *schema.outputs, status)),
            numbers=(names.LOGITS, "trees", names.NEW),
            blocks=lambda s: 1,
            threads=lambda s: 32,
        ),
        inputs=(*inputs, TensorSpec("slots", INTEGER, (SLOTS,))),
        outputs=(*outputs, status),
        guard=f"{ROWS_FIT} && steps_forward(next, {names.LOGITS})",
    )
