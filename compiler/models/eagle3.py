"""The EAGLE3 draft head: one decoder layer over the target's features and the embedding of the token that follows.

At position i the head sees the pair (feature i, token i+1). `fuse` makes h of the target's three residual streams,
`layer` maps h and an embedding to the next h, and `logits` scores the draft vocabulary for it, normed. The next level
of a draft feeds h back. Like the decoder, the head computes on flat tokens `[N, hidden]` (`[1, N, hidden]` in graphs)
and leaves rotation and attention to an `Execution`. Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.compiler.models.decoder import Execution, Linear, RmsNorm, add_and_norm
from outrider.compiler.models.eagle3_config import TAPS, Eagle3Config
from outrider.compiler.models.ops import silu_unit


class Eagle3Head(nn.Module):
    """Features and tokens to draft logits.

    `embedding` `[vocab, H]` is None where the checkpoint has none; the caller then embeds with the target's, which has
    the same width. `target_ids` int64 `[draft_vocab]`, ascending, holds the target token of every draft token.
    """

    target_ids: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, c = config.hidden_size, config
        self.config = config
        self.embedding = nn.Parameter(torch.empty(c.vocab_size, hidden)) if c.own_embedding else None
        norms = [RmsNorm(c.target_hidden_size, c.rms_norm_eps) for _ in range(TAPS if c.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.fc = Linear(c.feature_size, hidden, bias=False)
        self.embedding_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.hidden_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.q = Linear(2 * hidden, c.query_size, bias=False)
        self.k = Linear(2 * hidden, c.kv_size, bias=False)
        self.v = Linear(2 * hidden, c.kv_size, bias=False)
        self.o = Linear(c.query_size, hidden, bias=False)
        self.mlp_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.gate = Linear(hidden, c.intermediate_size, bias=False)
        self.up = Linear(hidden, c.intermediate_size, bias=False)
        self.down = Linear(c.intermediate_size, hidden, bias=False)
        self.norm = RmsNorm(hidden, c.rms_norm_eps)
        self.lm_head = Linear(hidden, c.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", torch.empty(c.draft_vocab_size, dtype=torch.int64))

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., 3 * Ht]` to h `[..., H]`; an input of width H is h and passes unchanged.

        Where 3 * Ht equals H, the input counts as features.
        """
        if features.shape[-1] == self.config.hidden_size != self.config.feature_size:
            return features
        if self.config.fc_norm:
            streams = features.chunk(TAPS, dim=-1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)], dim=-1)
        h: Tensor = self.fc(features)
        return h

    def layer(self, h: Tensor, embedded: Tensor, execution: Execution, index: int = 0) -> tuple[Tensor, Tensor]:
        """Return what `logits` reads, normed, and the h that the next level feeds back, both `[..., H]`.

        `embedded` `[..., H]` are the embeddings of the tokens paired with `h`; `index` is the layer number passed to
        the execution, which differs between the levels of one graph.
        """
        x = torch.cat((self.embedding_norm(embedded), self.hidden_norm(h)), dim=-1)
        attended = execution.attend(index, self.q(x), self.k(x), self.v(x))
        x, h = add_and_norm(h, self.o(attended), self.mlp_norm)
        normed, h = add_and_norm(h, self.down(silu_unit(self.gate(x), self.up(x))), self.norm)
        return normed, normed if self.config.norm_output else h

    def logits(self, normed: Tensor) -> Tensor:
        """Return scores `[..., draft_vocab]` of the draft vocabulary for what `layer` returns first."""
        scores: Tensor = self.lm_head(normed)
        return scores
