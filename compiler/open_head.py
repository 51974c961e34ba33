"""A draft head's checkpoint that passed all checks, of any kind of head, and whose weights are still to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from outrider.compiler.deferred import defer
from outrider.compiler.draft_vocabulary import map_slots, read_target_ids
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import Eagle3Config
from outrider.compiler.slots import Slot, check_tensors, fill, slots
from outrider.compiler.tensor_source import TensorSource

Config = TypeVar("Config", Eagle3Config, BlockConfig)
Head = TypeVar("Head", Eagle3Head, BlockHead)


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
        cls,
        config: Config,
        make: Callable[[Config], Head],
        tensors: TensorSource,
        stored_name: Callable[[str], str],
        *,
        listing: Path,
        description: Path,
        kind: str,
        optional: Mapping[str, Slot],
    ) -> OpenHead[Config, Head]:
        """Check all tensors by their headers; `stored_name` names a parameter in the checkpoint.

        Its tensors are listed by `listing` and described by `description`, and are those of a `kind` of head. The
        `optional` may stand beside them. Raises `CheckpointError`.
        """
        with torch.device("meta"):
            wanted = slots(make(config), stored_name)
        check_tensors(tensors, listing, description, kind, wanted, optional)
        ids = read_target_ids(tensors, listing, config.draft_vocab_size, config.vocab_size)
        return cls(config, make, tensors, wanted, ids)

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
    compared = {
        "verifier_norm.weight": Slot("", (hidden,)),
        "verifier_lm_head.weight": Slot("", (draft_vocab, hidden)),
    }
    return map_slots(draft_vocab, vocab) | (compared if training else {})
