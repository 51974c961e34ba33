"""A draft head's checkpoint that passed all checks, of any kind of head, and whose weights are still to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from outrider.compiler.deferred import defer
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.eagle3_config import HeadConfig
from outrider.compiler.slots import Slot, check_tensors, fill, slots
from outrider.compiler.tensor_source import TensorSource
from outrider.plans.errors import CheckpointError

D2T, T2D = "d2t", "t2d"
"""Draft token i is target token i + d2t[i]; t2d marks the target tokens that have a draft token."""
Config = TypeVar("Config", bound=HeadConfig)
Head = TypeVar("Head", bound=nn.Module)


@dataclass(frozen=True)
class HeadFiles:
    """The tensors of a `kind` of head, which the file `listing` lists and `description` describes; the `optional` may
    stand beside them."""

    tensors: TensorSource
    listing: Path
    description: Path
    kind: str
    optional: Mapping[str, Slot]


@dataclass(frozen=True)
class OpenHead(Generic[Config, Head]):
    """The geometry, and what makes a head of it: the module, its tensors, and each draft token's target token."""

    config: Config
    make: Callable[[Config], Head]
    tensors: TensorSource
    wanted: Mapping[str, Slot]
    target_ids: Tensor

    @classmethod
    def check(
        cls, config: Config, make: Callable[[Config], Head], files: HeadFiles, stored_name: Callable[[str], str]
    ) -> OpenHead[Config, Head]:
        """Check all tensors by their headers; `stored_name` names a parameter in the checkpoint."""
        with torch.device("meta"):
            wanted = slots(make(config), stored_name)
        check_tensors(files.tensors, files.listing, files.description, files.kind, wanted, files.optional)
        ids = _target_ids(files.tensors, files.listing, config.draft_vocab_size, config.vocab_size)
        return cls(config, make, files.tensors, wanted, ids)

    def load(self, dtype: WeightType = "float32") -> Head:
        """Load the head with all weights in `dtype`, on the CPU, frozen and in eval mode.

        Projections are transposed to `[in, out]`; `embedding` and `lm_head` are None where the target's serve. Raises
        `CheckpointError` naming the file, the tensor, the expectation and the finding.
        """
        module, values = self._module(), fill(self.tensors, self.wanted, dtype)
        module.load_state_dict(values | {"target_ids": self.target_ids}, assign=True)
        return module.requires_grad_(False).eval()

    def defer(self, dtype: WeightType = "float32") -> Head:
        """Return the head of `load` without values, for graphs that read them as they are written.

        Values that are not finite raise `CheckpointError` only then.
        """
        module = self._module()
        defer(module, self.tensors, self.wanted, dtype)
        module.target_ids = self.target_ids
        return module.eval()

    def _module(self) -> Head:
        with torch.device("meta"):
            return self.make(self.config)


def optional_tensors(draft_vocab: int, vocab: int, hidden: int, *, training: bool) -> dict[str, Slot]:
    """Return the tensors that may stand beside a head's: the vocabulary map, and with `training` what speculators
    stores, the target's last norm and output weights, which training compares with."""
    mapped = {
        D2T: Slot("target_ids", (draft_vocab,), dtypes=("I64",)),
        T2D: Slot("target_ids", (vocab,), dtypes=("BOOL",)),
    }
    compared = {
        "verifier_norm.weight": Slot("", (hidden,)),
        "verifier_lm_head.weight": Slot("", (draft_vocab, hidden)),
    }
    return mapped | (compared if training else {})


def _target_ids(tensors: TensorSource, listing: Path, draft: int, vocab: int) -> Tensor:
    """Return every draft token's target token, int64 `[draft]`, ascending, from d2t or t2d.

    `listing` is the file that lists the tensors.
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
