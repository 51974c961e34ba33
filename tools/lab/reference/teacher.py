"""The frozen target that drafters learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.compiler.checkpoint import checkpoint_hashes, load_decoder
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import CausalExecution


@dataclass(frozen=True)
class Reading:
    """What the target makes of sequences `[batch, length]`.

    `logits` `[batch, length, vocab]`; `features` `[batch, length, taps * hidden]`, the residual streams asked for.
    """

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target of a checkpoint folder, f32. `sha256` is that of its weights."""

    model: Decoder
    folder: Path
    tokenizer: Tokenizer
    sha256: str

    @classmethod
    def load(cls, folder: Path, device: str) -> Teacher:
        """Raises `CheckpointError` where the folder holds no decoder."""
        model = load_decoder(folder).to(device)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(model, folder, tokenizer, checkpoint_hashes(folder)["model.safetensors"])

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    @torch.no_grad()
    def read(self, ids: Tensor, taps: tuple[int, ...] = (), *, exact: bool = False) -> Reading:
        """One pass over `ids` `[batch, length]`, in f32 where `exact`, else in mixed precision."""
        batch, length = ids.shape
        execution = CausalExecution(self.model.config, batch, length, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not exact):
            hidden, streams = self.model.hidden(ids.reshape(-1), execution, taps)
            logits = self.model.logits(hidden)
        features = torch.cat(streams, dim=-1) if streams else hidden[:, :0]
        return Reading(logits.view(batch, length, -1), features.view(batch, length, features.shape[-1]))
