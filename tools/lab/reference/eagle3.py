"""Training of the EAGLE3 head: several steps on its own hidden states, towards the target's distributions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.compiler.eagle3_checkpoint import open_eagle3
from outrider.compiler.eagle3_taps import default_taps
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Execution, HeadNorms
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import Eagle3Config
from outrider.compiler.models.rope import RopeScaling, rope_tables
from outrider.tools.lab.reference.acceptance import Drafts, measure
from outrider.tools.lab.reference.compressed import USUAL, described
from outrider.tools.lab.reference.drafter import MUON_LR, Lessons, principal_axes, teach
from outrider.tools.lab.reference.drafter_text import frequent_tokens
from outrider.tools.lab.reference.export import write_card, write_eagle3
from outrider.tools.lab.reference.loop import Run, Training
from outrider.tools.lab.reference.teacher import Reading

UNROLLED = 5
"""Steps on its own hidden states, by default."""
STEP_WEIGHT = 0.8
"""The loss of step j counts STEP_WEIGHT ** j."""
RIDGE = 1.0
"""Of the regression for tokens that a head could not draft: little beside hundreds of rows of length 2."""


@dataclass(frozen=True)
class HeadGeometry:
    """A head's sizes. It has an embedding of its own where `hidden` is not the target's."""

    hidden: int = 192
    intermediate: int = 512
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    draft_vocab: int = 1536
    fc_norm: bool = True
    norm_output: bool = False

    def config(self, target: DecoderConfig) -> Eagle3Config:
        return Eagle3Config(
            hidden_size=self.hidden,
            target_hidden_size=target.hidden_size,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            draft_vocab_size=min(self.draft_vocab, target.vocab_size),
            vocab_size=target.vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=RopeScaling(),
            own_embedding=self.hidden != target.hidden_size,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            taps=default_taps(target.num_layers),
        )


def train_eagle3(
    run: Run,
    lessons: Lessons,
    geometry: HeadGeometry,
    name: str,
    steps: int,
    start: Path | None = None,
    bits: int = USUAL,
) -> None:
    """Train a head in `steps` unrolled steps, write it to `run.out/name`, and measure what was written.

    Its projections are rounded to `bits` bits as it is written.
    `start` is the folder of a trained head of the same sizes to continue from; its draft vocabulary may be another.
    """
    teacher, folder = lessons.teacher, run.out / name
    target = teacher.model.config
    config = geometry.config(target)
    torch.manual_seed(0)
    head = Eagle3Head(config)
    vocabulary = frequent_tokens(lessons.streams, config.draft_vocab_size, config.vocab_size)
    if start is None:
        initialise(head, vocabulary, teacher.model.embedding.cpu())
    else:
        go_on(head, vocabulary, open_eagle3(start, target).load(), teacher.model.embedding.cpu())
    head.to(run.device)
    print(f"{name}: {sum(p.numel() for p in head.parameters()) / 1e6:.2f}M parameters", flush=True)
    identity = {"target": teacher.sha256, "geometry": repr(config)} | ({} if start is None else {"start": str(start)})
    training = Training(head, matrices(head), run.work / f"{name}.pt", identity, MUON_LR)

    def loss(ids: Tensor) -> Tensor:
        reading = teacher.read(ids[:, :-1], config.aux_layers)
        with torch.autocast(teacher.device.type, torch.bfloat16):
            return unrolled_loss(head, teacher.model.embedding, ids, reading, steps)

    teach(run, lessons, training, loss, head_drafts(head, teacher.model.embedding), config.aux_layers)
    write_eagle3(head, target.max_positions, folder, bits)
    written = open_eagle3(folder, target).load().to(run.device)
    drafts = head_drafts(written, teacher.model.embedding)
    acceptance = measure(teacher, lessons.continuations, drafts, config.aux_layers)
    report = training.report(run.device_name) | {
        "unrolled steps": str(steps),
        "target's tokens that it can draft": f"{_coverage(head, lessons):.1%}",
    }
    write_card(folder, "The reference EAGLE3 head", _about(head, teacher.sha256, start, bits), report, acceptance)
    print(f"{folder}: {acceptance}", flush=True)


def initialise(head: Eagle3Head, vocabulary: Tensor, target_embedding: Tensor) -> None:
    """The layer starts as the identity, and between embeddings turned onto the target's principal axes."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, parameter.shape[0] ** -0.5)
            if name in ("o.weight", "down.weight"):
                parameter.data.zero_()
    head.target_ids.copy_(vocabulary)
    axes = principal_axes(target_embedding, head.config.hidden_size)
    if axes is None:
        return
    turned = target_embedding @ axes
    if head.embedding is not None:
        head.embedding.data.copy_(turned)
    else:
        turned, axes = target_embedding, torch.eye(len(axes))
    head.lm_head.weight.data.copy_(turned[vocabulary].T)
    head.fc.weight.data[-len(axes) :] = axes  # the highest tap is the closest to the target's output


def go_on(head: Eagle3Head, vocabulary: Tensor, trained: Eagle3Head, target_embedding: Tensor) -> None:
    """Begin where `trained` ended. Its outputs for tokens that it cannot draft are read off the target's embedding, by
    the ridge regression that fits those for tokens that it can."""
    size, known = head.config.vocab_size, trained.target_ids
    columns = trained.lm_head.weight.detach().float()  # [H, draft_vocab]
    rows = torch.cat((target_embedding.detach().float(), torch.ones(size, 1)), dim=1)
    fitted = torch.linalg.solve(
        rows[known].T @ rows[known] + RIDGE * torch.eye(rows.shape[1]), rows[known].T @ columns.T
    )
    full = (rows @ fitted).T
    full[:, known] = columns
    head.load_state_dict(
        {**trained.state_dict(), "lm_head.weight": full[:, vocabulary].contiguous(), "target_ids": vocabulary}
    )


def matrices(head: Eagle3Head) -> list[nn.Parameter]:
    return [m.weight for m in (head.fc, head.q, head.k, head.v, head.o, head.gate, head.up, head.down)]


def unrolled_loss(head: Eagle3Head, target_embedding: Tensor, ids: Tensor, reading: Reading, steps: int) -> Tensor:
    """Cross-entropy against the target's distribution, averaged over the steps with STEP_WEIGHT.

    `ids` `[batch, length + 1]`, of which `reading` covers all but the last. Only the draft vocabulary's part of the
    distribution counts, with the mass that it has, so that what cannot be drafted pulls nowhere. A chain counts
    while the tokens that it was fed can be drafted.
    """
    pairs = ids.shape[1] - 1 - steps
    probabilities = reading.logits.float().softmax(dim=-1).index_select(-1, head.target_ids)
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=ids.device)
    known = known.index_fill(0, head.target_ids, True)[ids]
    embedding = target_embedding if head.embedding is None else head.embedding
    states = unroll(head, embedding, reading.features[:, :pairs], ids[:, 1:], steps)
    reached, total, weights = torch.ones_like(known[:, :pairs]), ids.new_zeros((), dtype=torch.float32), 0.0
    for step, h in enumerate(states):
        if step:
            reached = reached & known[:, step + 1 : step + 1 + pairs]  # the token that step - 1 had to draft
        wanted = probabilities[:, step + 1 : step + 1 + pairs]
        losses = -(wanted * head.logits(h).float().log_softmax(dim=-1)).sum(dim=-1)
        weight = STEP_WEIGHT**step
        total, weights = total + weight * (losses * reached).sum() / reached.sum().clamp(min=1), weights + weight
    return total / weights


def head_drafts(head: Eagle3Head, target_embedding: Tensor) -> Drafts:
    embedding = target_embedding if head.embedding is None else head.embedding

    def drafts(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        pairs = len(ids) - 1 - depths
        states = unroll(head, embedding, reading.features[:, :pairs], ids[None, 1:], depths)
        logits = head.logits(torch.cat(states)).float()
        full = logits.new_full((depths, pairs, head.config.vocab_size), float("-inf"))
        return full.index_copy(-1, head.target_ids, logits)

    return drafts


def _coverage(head: Eagle3Head, lessons: Lessons) -> float:
    """Share of the tokens of the held-out continuations that are in the draft vocabulary."""
    written = torch.cat([c.ids[c.prompt :] for c in lessons.continuations])
    return float(torch.isin(written, head.target_ids).float().mean())


def _about(head: Eagle3Head, sha256: str, start: Path | None, bits: int) -> str:
    c = head.config
    size = sum(p.numel() for p in head.parameters()) / 1e6
    begun = "" if start is None else f",\nwhich continued from the head in `{start}`"
    return f"""An EAGLE3 draft head of {size:.2f}M parameters for `../target` (weights {sha256[:12]}) in
SpecForge's layout, {described(bits)}:
hidden {c.hidden_size}, intermediate {c.intermediate_size}, {c.num_heads} query and
{c.num_kv_heads} key/value heads of {c.head_dim}, {c.draft_vocab_size} of {c.vocab_size} tokens, fed with the streams
that enter layers {", ".join(map(str, c.aux_layers))}.
Written by `python -m outrider.tools.lab.train_reference eagle3`{begun}."""


RECOMPUTED = 512
"""Pairs from which a step's attention weights are computed again in the backward pass rather than kept."""


class UnrolledExecution(Execution):
    """All chains of `batch` sequences at once: `pairs` chains each, the step being the layer's index."""

    def __init__(self, config: Eagle3Config, batch: int, pairs: int, steps: int, device: torch.device) -> None:
        c = self._config = config
        cos, sin = rope_tables(c.rope_theta, c.head_dim, pairs + steps, c.rope_scaling)
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
        self._batch, self._pairs = batch, pairs
        group = c.num_heads // c.num_kv_heads
        hidden = torch.ones(pairs, pairs, dtype=torch.bool, device=device).triu(1)
        self._bias = torch.zeros(pairs, pairs, device=device).masked_fill(hidden, float("-inf")).repeat(group, 1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def _rotate(self, x: Tensor, heads: int) -> Tensor:
        step = len(self._keys)
        first, second = x.view(self._batch, self._pairs, heads, -1).chunk(2, dim=-1)
        cos, sin = (t[step : step + self._pairs, None].to(x.dtype) for t in (self._cos, self._sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        assert norms == (None, None), "heads have none"
        assert sinks is None, "heads have none"
        c = self._config
        q, k = self._rotate(q, c.num_heads), self._rotate(k, c.num_kv_heads)
        self._keys.append(self._heads(k, c.num_kv_heads))
        self._values.append(self._heads(v, c.num_kv_heads))
        queries = self._heads(q, c.num_heads)
        if layer == 0:
            out = F.scaled_dot_product_attention(
                queries, self._keys[0], self._values[0], is_causal=True, enable_gqa=True
            )
        elif self._pairs > RECOMPUTED and q.requires_grad:
            out = checkpoint(self._attend_chains, queries, *self._keys, *self._values, use_reentrant=False)
        else:
            out = self._attend_chains(queries, *self._keys, *self._values)
        return out.transpose(1, 2).reshape(q.shape)

    def _attend_chains(self, queries: Tensor, *cached: Tensor) -> Tensor:
        """`queries` `[batch, heads, pairs, head_dim]` over step 0's keys up to their own pair's, and their chain's."""
        c, keys, values = self._config, cached[: len(cached) // 2], cached[len(cached) // 2 :]
        rows = self._batch * c.num_kv_heads
        scale = c.head_dim**-0.5
        flat = queries.reshape(rows, -1, c.head_dim)  # the query heads of a group, one after another
        shared = torch.baddbmm(self._bias, flat, keys[0].reshape(rows, -1, c.head_dim).mT, alpha=scale)
        grouped = flat.view(self._batch, c.num_kv_heads, -1, self._pairs, c.head_dim)
        own = [(grouped * key.unsqueeze(2)).sum(-1).reshape(rows, -1, 1) * scale for key in keys[1:]]
        weights = torch.cat((shared, *(x.to(shared.dtype) for x in own)), dim=-1).softmax(dim=-1).to(queries.dtype)
        out = torch.bmm(weights[..., : self._pairs], values[0].reshape(rows, -1, c.head_dim)).view(grouped.shape)
        for step, value in enumerate(values[1:]):
            weight = weights[..., self._pairs + step].view(*grouped.shape[:-1], 1)
            out = out + weight * value.unsqueeze(2)
        return out.reshape(queries.shape)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(self._batch, self._pairs, count, self._config.head_dim).transpose(1, 2)


def unroll(head: Eagle3Head, embedding: Tensor, features: Tensor, token_ids: Tensor, steps: int) -> list[Tensor]:
    """The head's hidden states of every step, `[batch, pairs, H]`, as `Eagle3Head.logits` reads them.

    `features` `[batch, pairs, 3 * Ht]`; `token_ids` int64 `[batch, >= pairs + steps - 1]`, whose column i + j is the
    token of pair i at step j; `embedding` `[vocab, H]` is the head's own, or the target's.
    """
    batch, pairs = features.shape[:2]
    execution = UnrolledExecution(head.config, batch, pairs, steps, features.device)
    h = head.fuse(features.reshape(batch * pairs, -1)).to(features.dtype)  # the residual stream stays in f32
    states = []
    for step in range(steps):
        embedded = F.embedding(token_ids[:, step : step + pairs].reshape(-1), embedding)
        h = head.layer(h, embedded, execution, step)
        states.append(h.view(batch, pairs, -1))
    return states
