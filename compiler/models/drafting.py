"""Models as drafters: a decoder, an EAGLE3 head and a block head, with what they take from the target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder, Execution
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import HeadConfig


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

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> tuple[Tensor, ...]:
        return (self.decoder.hidden(token_ids, execution)[0],)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden.squeeze(0)).unsqueeze(0)  # 2-D, so that the product becomes one Gemm


class _HeadDraft(nn.Module):
    """A head, which reads the target's features."""

    lead = 1
    head: Eagle3Head | BlockHead
    embedding: nn.Parameter

    @property
    def heads(self) -> HeadConfig:
        return self.head.config

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def feature_size(self) -> int:
        return self.head.config.feature_size

    @property
    def vocabulary(self) -> Tensor | None:
        """Target token of each draft token, int64 `[draft_vocab]`, ascending; None where the vocabularies are one."""
        c = self.head.config
        return None if c.draft_vocab_size == c.vocab_size else self.head.target_ids

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., feature_size]` to the head's input `[..., H]`."""
        return self.head.fuse(features.to(self.dtype))


class Eagle3Draft(_HeadDraft):
    """An EAGLE3 head. Position i pairs the target's feature of token i with token i + 1."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, target_embedding: nn.Parameter) -> None:
        super().__init__()
        self.head = head
        self.embedding = target_embedding if head.embedding is None else head.embedding

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> tuple[Tensor, ...]:
        if hidden is None:
            raise ValueError("a head reads features")
        return self.head.layer(hidden, F.embedding(token_ids, self.embedding), execution)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


class BlockDraft(_HeadDraft):
    """A block head, and the target's embedding and output weights where the head has none of its own.

    Position i has keys and values made of the target's feature of token i, which the tip has not yet.
    """

    head: BlockHead

    @property
    def heads(self) -> BlockConfig:
        return self.head.config

    def __init__(self, head: BlockHead, target: Decoder) -> None:
        super().__init__()
        self.head = head
        self.embedding = target.embedding if head.embedding is None else head.embedding
        self.lm_head = target.lm_head if head.lm_head is None else head.lm_head
        self.tied = target.embedding if self.lm_head is None else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings `[..., H]` of a block's tokens, as the target numbers them."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores `[..., draft_vocab]` for hidden states of `BlockHead.run`, without the Markov bias."""
        if self.tied is not None:
            return F.linear(hidden, self.tied)
        scores: Tensor = self.lm_head(hidden)  # type: ignore[misc]
        return scores
