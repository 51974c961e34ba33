"""The target in PyTorch over long texts: what each token costs it, and whether it answers questions after a context.

Attention is causal without a mask, and logits exist for a stretch of tokens at a time, so that memory grows with the
length alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import CausalExecution, attended, rotated
from outrider.tools.lab.context_quality.questions import Context

_ROWS = 2048  # of logits at once


@torch.no_grad()
def token_losses(model: Decoder, config: DecoderConfig, sequences: Tensor) -> Tensor:
    """Nats of every token but the first of each sequence, f32: `[batch, length]` to `[batch, length - 1]`.

    `config` says how positions are rotated; all else of it is the model's.
    """
    batch, length = sequences.shape
    hidden, _ = model.hidden(sequences.reshape(-1), CausalExecution(config, batch, length))
    read = torch.split(hidden.view(batch, length, -1)[:, :-1].flatten(0, 1), _ROWS)
    wanted = torch.split(sequences[:, 1:].flatten(), _ROWS)
    losses = [
        F.cross_entropy(model.logits(h).float(), ids, reduction="none") for h, ids in zip(read, wanted, strict=True)
    ]
    return torch.cat(losses).view(batch, length - 1)


@torch.no_grad()
def short_losses(model: Decoder, config: DecoderConfig, document: Tensor, window: int, batch: int = 8) -> Tensor:
    """Nats of every token but the first of `document` `[length]`, after less than `window` tokens: `[length - 1]`.

    Windows (of even length) begin at every half of one, and each says what the tokens of its second half cost, the
    first one all. So the tokens after the first half window have at least half a window before them.
    """
    half = window // 2
    starts = range(0, max(1, len(document) - half), half)
    windows = [document[start : start + window] for start in starts]
    whole = [w for w in windows if len(w) == window]
    found = [token_losses(model, config, torch.stack(whole[at : at + batch])) for at in range(0, len(whole), batch)]
    rows = [row for losses in found for row in losses]
    rows += [token_losses(model, config, w[None])[0] for w in windows[len(whole) :]]
    return torch.cat([row if not place else row[half - 1 :] for place, row in enumerate(rows)])


@torch.no_grad()
def answers(model: Decoder, config: DecoderConfig, context: Context) -> list[int | None]:
    """After the context, whose answer each question gets: the index of the question that it belongs to, or None.

    An answer is given where each of its tokens is the likeliest one after those before it.
    """
    kept = _KeepingExecution(config, len(context.ids))
    model.hidden(torch.tensor(context.ids), kept)

    def given(asked: list[int], answer: list[int]) -> bool:
        ids = torch.tensor([*asked, *answer])
        hidden, _ = model.hidden(ids, _BehindExecution(config, kept.rows, len(context.ids), len(ids)))
        return torch.equal(model.logits(hidden[len(asked) - 1 : -1]).argmax(-1), ids[len(asked) :])

    return [
        next((place for place, other in enumerate(context.questions) if given(question.asked, other.answer)), None)
        for question in context.questions
    ]


class _KeepingExecution(CausalExecution):
    """One sequence, whose keys and values of all layers are kept."""

    def __init__(self, config: DecoderConfig, length: int) -> None:
        super().__init__(config, 1, length)
        self.rows: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self.rows.append((k, v))
        return super().attend(layer, q, k, v, sinks)


class _BehindExecution:
    """`count` tokens after `length` whose keys and values are kept."""

    def __init__(self, config: DecoderConfig, rows: Sequence[tuple[Tensor, Tensor]], length: int, count: int) -> None:
        self._config, self._rows, self._length, self._count = config, rows, length, count

    def rotate(self, layer: int, x: Tensor, heads: int) -> Tensor:
        if (rope := self._config.kinds[layer].rope) is None:
            return x
        cos, sin = (torch.from_numpy(table)[self._length :, None] for table in rope.tables(self._length + self._count))
        return rotated(x.view(len(x), heads, -1), cos, sin).view(x.shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        c = self._config
        kept_k, kept_v = self._rows[layer]

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(1, len(x), count, c.head_dim).transpose(1, 2)

        keys, values = heads(torch.cat((kept_k, k)), c.num_kv_heads), heads(torch.cat((kept_v, v)), c.num_kv_heads)
        seen = torch.ones(self._count, self._length + self._count, dtype=torch.bool).tril(self._length)
        if (window := c.kinds[layer].window) is not None:
            seen = seen.triu(self._length + 1 - window)
        out = attended(heads(q, c.num_heads), keys, values, c, seen, sinks)
        return out.transpose(1, 2).reshape(q.shape)
