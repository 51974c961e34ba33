"""Models as drafters: a decoder and an EAGLE3 head behind the interface that `export.draft` needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.models.config import DecoderConfig
from compiler.models.decoder import Decoder, Execution
from compiler.models.eagle3 import Eagle3Head
from compiler.models.eagle3_config import Eagle3Config


class DecoderDraft(nn.Module):
    """A small decoder with the target's vocabulary, which reads only tokens."""

    feature_size, lead = 0, 0
    vocabulary: Tensor | None = None

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def heads(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embedding.dtype

    def fuse(self, features: Tensor) -> Tensor:
        raise NotImplementedError("a decoder reads no features")

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> Tensor:
        return self.decoder.hidden(token_ids, execution)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden.squeeze(0)).unsqueeze(0)  # 2-D, so that the product becomes one Gemm


class Eagle3Draft(nn.Module):
    """An EAGLE3 head. Position i pairs the target's feature of token i with token i + 1."""

    lead = 1

    def __init__(self, head: Eagle3Head, target_embedding: nn.Parameter) -> None:
        super().__init__()
        self.head = head
        self.embedding = target_embedding if head.embedding is None else head.embedding
        c = head.config
        self.full = c.draft_vocab_size == c.vocab_size

    @property
    def heads(self) -> Eagle3Config:
        return self.head.config

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def feature_size(self) -> int:
        return self.head.config.feature_size

    @property
    def vocabulary(self) -> Tensor | None:
        return None if self.full else self.head.target_ids

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features.to(self.dtype))

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> Tensor:
        if hidden is None:
            raise ValueError("a head reads features")
        return self.head.layer(hidden, F.embedding(token_ids, self.embedding), execution)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
