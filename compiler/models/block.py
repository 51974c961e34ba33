"""The head of a block drafter: a few decoder layers that predict a whole block of tokens in one pass.

The head reads two kinds of tokens. The *context* are the committed tokens before the tip: `fuse` makes one vector of
each token's features, and every layer makes keys and values of that vector, at the token's position; context has no
queries and no stream of its own, so its keys and values are kept and never change. The *block* is the tip and the
masks after it: `run` maps their embeddings to hidden states, each layer attending over the kept context and the block.
The keys of the block are dropped after the pass.

DFlash (arXiv 2602.06036) sees the whole block from each slot. DSpark (DeepSpec) adds a low-rank bias of the logits by
the token before, and a confidence for each drafted token. JetSpec makes attention causal inside the block. Like the
decoder, the head computes on flat tokens `[..., hidden]` and leaves rotation and attention to an `Execution`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov
from outrider.compiler.models.decoder import DecoderLayer, Execution, Linear, RmsNorm, run_layers


class MarkovHead(nn.Module):
    """The bias of the logits by the token before; `embedding` `[vocab, rank]` is of the target's tokens."""

    def __init__(self, config: BlockConfig, markov: Markov) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, markov.rank
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.gate = Linear(hidden + rank, rank, bias=True) if markov.kind == "gated" else None
        self.joint = Linear(2 * rank + hidden, 3 * rank, bias=True) if markov.kind == "rnn" else None
        self.output = Linear(rank, config.draft_vocab_size, bias=False)

    def latent(self, token_ids: Tensor) -> Tensor:
        """Return `[..., rank]` of the tokens."""
        return F.embedding(token_ids, self.embedding)

    def forward(self, state: Tensor | None, previous_token: Tensor, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the next state and the bias; see `BlockHead.markov_bias`."""
        latent = self.latent(previous_token)
        if self.gate is not None:
            latent = torch.sigmoid(self.gate(torch.cat((hidden, latent), dim=-1))) * latent
        elif self.joint is not None:
            state = torch.zeros_like(latent) if state is None else state
            gate, candidate, out = self.joint(torch.cat((state, latent, hidden), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return state, self.output(latent)


class BlockHead(nn.Module):
    """Features and a block of tokens to draft logits.

    `embedding` `[vocab, H]` and `lm_head` `[H, draft_vocab]` are None where the target's serve (`drafting.BlockDraft`).
    `target_ids` int64 `[draft_vocab]`, ascending, holds the target token of every draft token.
    """

    target_ids: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, c = config.hidden_size, config
        self.config = config
        self.embedding = nn.Parameter(torch.empty(c.vocab_size, hidden)) if c.own_embedding else None
        self.fc = Linear(c.feature_size, hidden, bias=False)
        self.context_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.norm = RmsNorm(hidden, c.rms_norm_eps)
        self.lm_head = Linear(hidden, c.draft_vocab_size, bias=False) if c.own_lm_head else None
        self.markov = None if c.markov is None else MarkovHead(c, c.markov)
        predicts = c.confidence is not Confidence.NONE
        self.confidence_head = Linear(c.confidence_size, 1, bias=True) if predicts else None
        self.register_buffer("target_ids", torch.empty(c.draft_vocab_size, dtype=torch.int64))

    def fuse(self, features: Tensor) -> Tensor:
        """Map features of context tokens `[..., taps * Ht]` to the context `[..., H]` that `context_kv` reads."""
        context: Tensor = self.context_norm(self.fc(features))
        return context

    def context_kv(self, context: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[..., kv_heads * head_dim]` of context tokens in one layer.

        Keys are neither normed nor rotated: each head is normed by the layer's `k_norm`, rotated to the token's
        position, then kept.
        """
        of: DecoderLayer = self.layers[layer]  # type: ignore[assignment]
        return of.k(context), of.v(context)

    def run(self, embedded: Tensor, execution: Execution) -> Tensor:
        """Map the embeddings of a block `[..., H]` to hidden states `[..., H]` after the final norm.

        `execution` rotates to the block's positions. Its `attend` is given the block's queries, keys and values, and
        attends over the layer's kept context, all of it, and over the block: all of it, or with `config.causal` the
        slots up to the query's.
        """
        return run_layers(self.layers, embedded, execution, self.norm)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores `[..., draft_vocab]` of the draft vocabulary for hidden states of `run`, without the bias.

        Raises `ValueError` where the head has no output weights of its own.
        """
        if self.lm_head is None:
            raise ValueError("this head scores with the target's output weights")
        scores: Tensor = self.lm_head(hidden)
        return scores

    def markov_bias(self, state: Tensor | None, previous_token: Tensor, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the next state and the bias `[..., draft_vocab]` that is added to the logits of a slot.

        `previous_token` int64 `[...]` is the token before the predicted one, as the target numbers tokens: the tip for
        the first drafted token, then the drafted token before. `hidden` `[..., H]` is the slot's, of `run`. `state`
        `[..., rank]` is the one that the slot before returned, None for a block's first; kinds other than `rnn` keep
        none. Raises `ValueError` where the head has no bias. Source: DeepSpec, `markov_head`.
        """
        if self.markov is None:
            raise ValueError("this head has no Markov bias")
        biased: tuple[Tensor | None, Tensor] = self.markov(state, previous_token, hidden)
        return biased

    def confidence(self, hidden: Tensor, previous_token: Tensor) -> Tensor:
        """Return the logit `[...]` of the chance that the target accepts the slot's token if it accepts those before.

        Arguments are as for `markov_bias`; `previous_token` is read by heads whose confidence sees it. Raises
        `ValueError` where the head predicts none.
        """
        if self.confidence_head is None:
            raise ValueError("this head predicts no confidence")
        if self.markov is not None and self.config.confidence is Confidence.HIDDEN_AND_MARKOV:
            hidden = torch.cat((hidden, self.markov.latent(previous_token)), dim=-1)
        logit: Tensor = self.confidence_head(hidden)
        return logit.squeeze(-1)
