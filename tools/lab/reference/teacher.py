"""The frozen target that drafters learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from outrider.compiler.checkpoint import checkpoint_hashes, load_decoder
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder, Execution, HeadNorms, norm_heads
from outrider.compiler.models.eager import CausalExecution
from outrider.compiler.models.rope import rope_tables


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


class CachedExecution(Execution):
    """`batch` sequences that grow in step: a pass appends its tokens to each, `advance` makes them past."""

    def __init__(self, config: DecoderConfig, batch: int, capacity: int, like: Tensor) -> None:
        """Keys and values are kept in the type and on the device of `like`."""
        c = self._config = config
        cos, sin = rope_tables(c.rope_theta, c.head_dim, capacity, c.rope_scaling)
        self._cos, self._sin = torch.from_numpy(cos).to(like), torch.from_numpy(sin).to(like)
        shape = (c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim)
        self._k, self._v = like.new_zeros(shape), like.new_zeros(shape)
        self._batch, self._past = batch, 0

    def advance(self, tokens: int) -> None:
        self._past += tokens

    def _rotate(self, x: Tensor, heads: int) -> Tensor:
        first, second = x.view(self._batch, -1, heads, self._config.head_dim).chunk(2, dim=-1)
        new = slice(self._past, self._past + first.shape[1])
        cos, sin = self._cos[new, None], self._sin[new, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "the reference's models have none"
        c, batch = self._config, self._batch
        q, k = self._rotate(norm_heads(q, norms[0]), c.num_heads), self._rotate(norm_heads(k, norms[1]), c.num_kv_heads)
        new = q.shape[0] // batch
        end = self._past + new
        for cache, x in ((self._k, k), (self._v, v)):
            cache[layer, :, :, self._past : end] = x.view(batch, new, c.num_kv_heads, c.head_dim).transpose(1, 2)
        keys, values = self._k[layer, :, :, :end], self._v[layer, :, :, :end]
        if new == 1:  # the query heads of a group are rows over the same keys
            rows = q.view(batch, c.num_kv_heads, -1, c.head_dim)
            return F.scaled_dot_product_attention(rows, keys, values).reshape(q.shape)
        seen = torch.ones(new, end, dtype=torch.bool, device=q.device).tril(self._past)
        rows = q.view(batch, new, c.num_heads, c.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)


@torch.no_grad()
def generate(model: Decoder, prompts: Tensor, temperatures: Tensor, new: int, rng: torch.Generator) -> Tensor:
    """int64 `[batch, prompt + new]`: the prompts and how the model continues.

    `prompts` int64 `[batch, prompt]`; `temperatures` f32 `[batch]`, 0 for greedy rows. An end token does not end a
    row: what follows it is the opening of another text.
    """
    batch, length = prompts.shape
    execution = CachedExecution(model.config, batch, length + new, model.embedding)
    ids = torch.cat((prompts, prompts.new_zeros(batch, new)), dim=1)
    for position in range(length, length + new):
        fed = ids[:, position - 1 : position] if position > length else prompts
        hidden = model.hidden(fed.reshape(-1), execution)[0].view(batch, fed.shape[1], -1)
        execution.advance(fed.shape[1])
        ids[:, position] = draw(model.logits(hidden[:, -1]).float(), temperatures, rng)
    return ids


def draw(logits: Tensor, temperatures: Tensor, rng: torch.Generator) -> Tensor:
    """One token a row, `[batch]`: the largest logit where the temperature is 0, else sampled (Gumbel's trick)."""
    sampled = (temperatures > 0)[:, None]
    noise = -torch.empty_like(logits).exponential_(generator=rng).clamp_min_(1e-20).log_()
    scaled = logits / torch.where(sampled, temperatures[:, None], 1.0)
    return torch.where(sampled, scaled + noise, logits).argmax(dim=-1)
