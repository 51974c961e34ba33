"""The vocabulary map of a drafter's checkpoint: which tokens of the target a smaller draft vocabulary has.

Draft token i is target token i + d2t[i]; t2d marks the target tokens that have a draft token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.compiler.slots import Slot
from outrider.compiler.tensor_source import TensorSource
from outrider.plans.errors import CheckpointError

D2T, T2D = "d2t", "t2d"


def map_slots(draft: int, vocab: int) -> dict[str, Slot]:
    """Return the optional tensors of a map from `draft` to `vocab` tokens, by name."""
    return {
        D2T: Slot("target_ids", (draft,), dtypes=("I64",)),
        T2D: Slot("target_ids", (vocab,), dtypes=("BOOL",)),
    }


def read_target_ids(tensors: TensorSource, listing: Path, draft: int, vocab: int) -> Tensor:
    """Return every draft token's target token, int64 `[draft]`, ascending, from d2t or t2d.

    `listing` is the file that lists the tensors. Raises `CheckpointError` where the checkpoint has both and they
    disagree, or has none of the two and needs one.
    """
    ids = torch.arange(draft)
    if D2T in tensors.found:
        ids = _mapped(tensors, ids + tensors.read(D2T), vocab)
    elif T2D not in tensors.found and draft < vocab:
        raise CheckpointError(
            f"{listing}: tensor {D2T!r} is missing, expected of a head whose draft vocabulary ({draft}) is "
            f"smaller than the target's ({vocab}); give a complete checkpoint"
        )
    if T2D not in tensors.found:
        return ids
    marked = tensors.read(T2D).nonzero().flatten()
    file = tensors.found[T2D].file
    if len(marked) != draft:
        raise CheckpointError(
            f"{file}: tensor {T2D!r} marks {len(marked)} tokens, expected {draft}, the draft vocabulary; "
            "give the original checkpoint"
        )
    if D2T in tensors.found and not torch.equal(marked, ids):
        at = int((marked != ids).nonzero()[0])
        raise CheckpointError(
            f"{file}: tensors {T2D!r} and {D2T!r} disagree: draft token {at} is target token {int(marked[at])} "
            f"by {T2D} and {int(ids[at])} by {D2T}; give the original checkpoint"
        )
    return marked


def _mapped(tensors: TensorSource, ids: Tensor, vocab: int) -> Tensor:
    """Return `ids`; raise `CheckpointError` unless they are ascending tokens of the target, each once."""
    below = torch.cat((torch.tensor([-1]), ids[:-1]))
    wrong = ((ids <= below) | (ids >= vocab)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise CheckpointError(
            f"{tensors.found[D2T].file}: tensor {D2T!r} makes draft token {at} target token {int(ids[at])}, expected "
            f"one above {int(below[at])} and below {vocab} (draft_id + d2t, ascending); give the original checkpoint"
        )
    return ids
