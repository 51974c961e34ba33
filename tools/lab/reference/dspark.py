"""Training of the DSpark head: blocks at many anchors of a window, towards the target's distributions.

Slot k of the block at anchor a predicts the token at a+k+1 from the context before a, the anchor's token, and the
Markov bias by the token at a+k (of kind `rnn`: by all tokens from the anchor on), which is the text's own here. At run
time it is the token drafted before, and that is the text's for as long as the drafted tokens are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.compiler.block_checkpoint import open_block
from outrider.compiler.eagle3_taps import default_taps
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig, Confidence, Markov, MarkovKind
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Execution, HeadNorms, norm_heads
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.models.eagle3_config import Taps
from outrider.compiler.models.rope import RopeScaling, rope_tables
from outrider.plans.errors import CheckpointError, UsageError
from outrider.tools.lab.reference.acceptance import Confidences, Drafts, calibrate, measure
from outrider.tools.lab.reference.compressed import USUAL, described
from outrider.tools.lab.reference.drafter import MUON_LR, WINDOWS, Lessons, teach
from outrider.tools.lab.reference.export import write_block, write_card
from outrider.tools.lab.reference.loop import Run, Training
from outrider.tools.lab.reference.teacher import Reading, Teacher

STRIDE = 4
"""Tokens between two anchors, from a random one on: blocks of 7 predict 1.75 tokens for each one of the text."""
DECAY = 4.0
"""The loss of slot k counts exp(-k / DECAY) (DeepSpec)."""
CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 1.0, 0.5, 0.3
"""Weights of the losses. DeepSpec's are 0.1, 1.8 (0.9 of an L1 distance, which is twice the variation) and 1, and its
cross-entropy is against the text. After 110 steps a greedy block was accepted for 0.39 tokens with DeepSpec's weights,
0.46 with these and 0.50 with cross-entropy alone; one drawn at temperature 1 for 0.36, 0.36 and 0.35."""
MASK = "ÿ"
"""The byte 0xFF in the byte-level alphabet: no UTF-8 text has it, so that no text begins a block with a mask."""


@dataclass(frozen=True)
class BlockGeometry:
    """A head's sizes; it is as wide as its target. `taps` are the layers whose incoming streams it reads, () EAGLE3's
    default."""

    layers: int = 2
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    markov: MarkovKind = "vanilla"
    markov_rank: int = 32
    block_size: int = 7
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises `UsageError` for sizes that do not go together."""
        if self.heads % self.kv_heads:
            raise UsageError(
                f"--heads is {self.heads}, and {self.kv_heads} key/value heads cannot share them alike; choose a "
                "multiple of --kv-heads"
            )
        if self.head_dim % 2:
            raise UsageError(f"--head-dim is {self.head_dim}; rotation needs an even number")
        most = WINDOWS[0][1] // 2
        if self.block_size > most:
            raise UsageError(f"--block-size is {self.block_size}; choose at most {most}, half a training window")

    def config(self, target: DecoderConfig, mask_token_id: int) -> BlockConfig:
        """Raises `UsageError` where the target has no such taps."""
        return BlockConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=RopeScaling(),
            attention_bias=False,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            block_size=self.block_size,
            sample_from_anchor=True,
            causal=False,
            mask_token_id=mask_token_id,
            markov=Markov(self.markov, self.markov_rank),
            confidence=Confidence.HIDDEN_AND_MARKOV,
            own_embedding=False,
            own_lm_head=False,
            taps=self._taps(target.num_layers),
        )

    def _taps(self, layers: int) -> Taps:
        if not self.taps:
            return default_taps(layers)
        if list(self.taps) != sorted(set(self.taps)) or not 0 <= self.taps[0] <= self.taps[-1] < layers:
            raise UsageError(
                f"--taps is {' '.join(map(str, self.taps))}; give layers of the target from 0 to {layers - 1}, each "
                "once, ascending"
            )
        return Taps(self.taps, "--taps")


def train_dspark(
    run: Run, lessons: Lessons, geometry: BlockGeometry, name: str, start: Path | None = None, bits: int = USUAL
) -> None:
    """Train a head, write it to `run.out/name`, and measure what was written.

    Its projections are rounded to `bits` bits as it is written.
    `start` is the folder of a trained head of the same geometry to continue from.
    """
    teacher, folder = lessons.teacher, run.out / name
    target = teacher.model.config
    config = geometry.config(target, mask_token(teacher))
    torch.manual_seed(0)
    head = BlockHead(config)
    initialise(head, teacher.model.norm.weight.cpu())
    if start is not None:
        go_on(head, start, target)
    head.to(run.device)
    draft = BlockDraft(head, teacher.model)
    print(f"{name}: {sum(p.numel() for p in head.parameters()) / 1e6:.2f}M parameters", flush=True)
    identity = {"target": teacher.sha256, "geometry": repr(config)} | ({} if start is None else {"start": str(start)})
    training = Training(head, matrices(head), run.work / f"{name}.pt", identity, MUON_LR)

    def loss(ids: Tensor) -> Tensor:
        reading = teacher.read(ids[:, :-1], config.aux_layers)
        anchors = random_anchors(ids.shape[1] - 1, config.block_size).to(ids.device)
        with torch.autocast(teacher.device.type, torch.bfloat16):
            return block_loss(draft, ids, reading, anchors)

    teach(run, lessons, training, loss, block_drafts(draft), config.aux_layers, config.drafted)
    write_block(head, target, folder, bits)
    written = BlockDraft(open_block(folder, target).load().to(run.device), teacher.model)
    measured = (teacher, lessons.continuations)
    acceptance = measure(*measured, block_drafts(written), config.aux_layers, config.drafted)
    calibration = calibrate(
        *measured, block_drafts(written), block_confidences(written), config.aux_layers, config.drafted
    )
    report = training.report(run.device_name) | {"anchors": f"one in {STRIDE} tokens"}
    about = _about(head, teacher.sha256, start, bits)
    write_card(folder, "The reference DSpark head", about, report, acceptance, calibration.text(acceptance))
    print(f"{folder}: {acceptance}, confidence {calibration}", flush=True)


def mask_token(teacher: Teacher) -> int:
    """The id of MASK. Raises `CheckpointError` where the target's tokenizer has none."""
    token = teacher.tokenizer.token_to_id(MASK)
    if token is None:
        raise CheckpointError(f"{teacher.folder}: the tokenizer has no token {MASK!r} (byte 0xFF) to serve as the mask")
    return int(token)


def initialise(head: BlockHead, target_norm: Tensor) -> None:
    """The layers start as the identity, the bias and the confidence as zero, and the context as the highest tap.

    The final norm starts as the target's, whose output weights score what it returns.
    """
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, parameter.shape[0] ** -0.5)
            if name.endswith(("o.weight", "down.weight")) or name in ("markov.output.weight", "confidence_head.weight"):
                parameter.data.zero_()
    if head.markov is not None:
        nn.init.normal_(head.markov.embedding, 0.0, head.config.markov_rank**-0.5)
    head.fc.weight.data[-len(target_norm) :] = torch.eye(len(target_norm))
    head.norm.weight.data.copy_(target_norm)
    head.target_ids.copy_(torch.arange(head.config.draft_vocab_size))


def go_on(head: BlockHead, start: Path, target: DecoderConfig) -> None:
    """Begin where the head in `start` ended. Raises `CheckpointError` where it has another geometry."""
    trained = open_block(start, target).load()
    found, wanted = replace(trained.config, taps=head.config.taps), head.config
    other = [key for key, value in vars(wanted).items() if getattr(found, key) != value]
    if trained.config.aux_layers != wanted.aux_layers:
        other.append("taps")
    if other:
        raise CheckpointError(f"{start}: the head has another geometry ({', '.join(other)}); give the options it had")
    head.load_state_dict(trained.state_dict())


def matrices(head: BlockHead) -> list[nn.Parameter]:
    return [head.fc.weight, *(p for p in head.layers.parameters() if p.ndim == 2)]


def random_anchors(length: int, slots: int) -> Tensor:
    """Return anchors int64 `[blocks]`, one in STRIDE tokens from a random one on.

    All have context, and the target's distribution for all `slots` is among those of `length` tokens.
    """
    first = 1 + int(torch.randint(STRIDE, ()))
    return torch.arange(first, length - slots + 1, STRIDE)


def block_loss(draft: BlockDraft, ids: Tensor, reading: Reading, anchors: Tensor) -> Tensor:
    """The losses of all slots of the blocks at `anchors` int64 `[blocks]`, slot k with exp(-k / DECAY).

    `ids` `[batch, length + 1]`, of which `reading` covers all but the last. Against the target's distribution: cross
    entropy, and total variation. The confidence learns 1 - total variation, the chance at temperature 1 that the
    target accepts what the slot draws. Source: DeepSpec, `compute_dspark_loss`.
    """
    at = slot_positions(anchors, draft.head.config.block_size)
    hidden, previous = run_blocks(draft, ids, reading.features, anchors), ids[:, at]
    log_q = slot_logits(draft, hidden, previous).float().log_softmax(dim=-1)
    p = reading.logits.float().softmax(dim=-1)[:, at]
    cross_entropy = -(p * log_q).sum(dim=-1)
    variation = 0.5 * (log_q.exp() - p).abs().sum(dim=-1)
    confidence = draft.head.confidence(hidden, previous).float()
    unsure = F.binary_cross_entropy_with_logits(confidence, (1 - variation.detach()).clamp(0, 1), reduction="none")
    weights = (-torch.arange(at.shape[1], device=ids.device) / DECAY).exp().expand(variation.shape)
    losses = CROSS_ENTROPY * cross_entropy + TOTAL_VARIATION * variation + CONFIDENCE * unsure
    return (losses * weights).sum() / weights.sum()


def slot_logits(draft: BlockDraft, hidden: Tensor, previous: Tensor) -> Tensor:
    """Return the biased scores `[..., slots, vocab]` of blocks' slots `[..., slots, H]` after the tokens `previous`
    int64 `[..., slots]`."""
    head = draft.head
    if head.markov is None or head.markov.joint is None:  # a slot's bias needs no state of the slot before
        return draft.logits(hidden) + head.markov_bias(None, previous, hidden)[1]
    state, biases = None, []
    for slot in range(previous.shape[-1]):
        state, bias = head.markov_bias(state, previous[..., slot], hidden[..., slot, :])
        biases.append(bias)
    return draft.logits(hidden) + torch.stack(biases, dim=-2)


def block_drafts(draft: BlockDraft) -> Drafts:
    """The drafts of a block at each tip: depth d is slot d, biased by the chain's own token before."""

    def drafts(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        return slot_logits(draft, *_chains(draft, ids, reading, depths)).float().transpose(0, 1)

    return drafts


def block_confidences(draft: BlockDraft) -> Confidences:
    def confidences(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        return draft.head.confidence(*_chains(draft, ids, reading, depths)).float().sigmoid().T

    return confidences


def _chains(draft: BlockDraft, ids: Tensor, reading: Reading, depths: int) -> tuple[Tensor, Tensor]:
    """Hidden states `[chains, depths, H]` of the chains whose tips are tokens 1, 2 ..., and the token before each."""
    anchors = torch.arange(1, len(ids) - depths, device=ids.device)
    hidden = run_blocks(draft, ids[None], reading.features, anchors)[0, :, :depths]
    return hidden, ids[slot_positions(anchors, depths)]


def _about(head: BlockHead, sha256: str, start: Path | None, bits: int) -> str:
    c = head.config
    kind = "" if c.markov is None else c.markov.kind
    size = sum(p.numel() for p in head.parameters()) / 1e6
    begun = "" if start is None else f",\nwhich continued from the head in `{start}`"
    return f"""A DSpark draft head of {size:.2f}M parameters for `../target` (weights {sha256[:12]}) in
DeepSpec's layout without its copies of the target's embedding and output weights, which serve it;
{described(bits)}:
{c.num_layers} layers, intermediate {c.intermediate_size}, {c.num_heads} query and
{c.num_kv_heads} key/value heads of {c.head_dim}, blocks of {c.block_size},
a Markov bias ({kind}) of rank {c.markov_rank}, fed with the streams that
enter layers {", ".join(map(str, c.aux_layers))}. The mask is token {c.mask_token_id}, the byte 0xFF, which no UTF-8
text has. Written by `python -m outrider.tools.lab.train_reference dspark`{begun}."""


class BlocksExecution(Execution):
    """The blocks at `anchors` int64 `[blocks]` in each of `batch` sequences with features `[batch, length, taps * Ht]`.

    The head's rows are `[batch * blocks * slots, ...]`.
    """

    def __init__(self, head: BlockHead, features: Tensor, anchors: Tensor) -> None:
        c = self._config = head.config
        device, (batch, length) = features.device, features.shape[:2]
        self._batch, self._blocks, self._length = batch, len(anchors), length
        tables = rope_tables(c.rope_theta, c.head_dim, length + c.block_size, c.rope_scaling)
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in tables)
        self._positions = slot_positions(anchors, c.block_size).flatten()
        hidden = torch.arange(length, device=device) >= anchors[:, None, None]
        bias = torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf"))
        self._bias = bias.expand(-1, c.num_heads // c.num_kv_heads * c.block_size, -1).reshape(-1, length)
        context = head.fuse(features)
        self._context = [self._keep(head, context, layer) for layer in range(c.num_layers)]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "heads have none"
        c, (keys, values) = self._config, self._context[layer]
        q = self._rotate(norm_heads(q, norms[0]), c.num_heads, self._positions)
        k = self._rotate(norm_heads(k, norms[1]), c.num_kv_heads, self._positions)
        group, rows, scale = c.num_heads // c.num_kv_heads, self._batch * c.num_kv_heads, c.head_dim**-0.5
        queries, own_keys, own_values = self._per_block(q, group), self._per_block(k, 1), self._per_block(v, 1)
        shared = torch.baddbmm(self._bias, queries.reshape(rows, -1, c.head_dim), keys.mT, alpha=scale)
        own = torch.bmm(queries, own_keys.mT).view(rows, -1, c.block_size) * scale
        weights = torch.cat((shared, own.to(shared.dtype)), dim=-1).softmax(dim=-1).to(v.dtype)
        of_context, of_block = weights[..., : self._length], weights[..., self._length :]
        out = torch.bmm(of_context, values).view(queries.shape)
        out = out + torch.bmm(of_block.reshape(len(queries), -1, c.block_size), own_values)
        apart = out.view(self._batch, c.num_kv_heads, self._blocks, group, c.block_size, c.head_dim)
        return apart.permute(0, 2, 4, 1, 3, 5).reshape(q.shape)

    def _per_block(self, x: Tensor, group: int) -> Tensor:
        """Return heads `[..., kv_heads * group * d]` as `[batch * kv_heads * blocks, group * slots, d]`."""
        c = self._config
        apart = x.view(self._batch, self._blocks, c.block_size, c.num_kv_heads, group, c.head_dim)
        return apart.permute(0, 3, 1, 4, 2, 5).reshape(-1, group * c.block_size, c.head_dim)

    def _keep(self, head: BlockHead, context: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys, normed and rotated, and values as `[batch * kv_heads, length, head_dim]`."""
        c, (keys, values) = self._config, head.context_kv(context, layer)
        keys = norm_heads(keys, head.layers[layer].k_norm)  # type: ignore[arg-type]
        keys = self._rotate(keys, c.num_kv_heads, torch.arange(self._length, device=keys.device))
        per_head = (x.view(self._batch, self._length, c.num_kv_heads, c.head_dim) for x in (keys, values))
        kept_keys, kept_values = (x.transpose(1, 2).reshape(-1, self._length, c.head_dim) for x in per_head)
        return kept_keys, kept_values

    def _rotate(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        first, second = x.view(self._batch, len(positions), heads, -1).chunk(2, dim=-1)
        cos, sin = (table[positions, None].to(x.dtype) for table in (self._cos, self._sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)


def slot_positions(anchors: Tensor, slots: int) -> Tensor:
    """Return the positions int64 `[blocks, slots]` of the first `slots` slots of the blocks at `anchors` `[blocks]`."""
    return anchors[:, None] + torch.arange(slots, device=anchors.device)


def run_blocks(draft: BlockDraft, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden states `[batch, blocks, slots, H]` of the blocks at `anchors` int64 `[blocks]`.

    `ids` int64 `[batch, >= length]` and `features` `[batch, length, taps * Ht]` are of the same sequences.
    """
    c = draft.head.config
    tokens = ids.new_full((len(ids), len(anchors), c.block_size), c.mask_token_id)
    tokens[..., 0] = ids[:, anchors]
    execution = BlocksExecution(draft.head, features, anchors)
    embedded = draft.embed(tokens.flatten()).to(features.dtype)  # the residual stream stays in f32
    return draft.head.run(embedded, execution).view(*tokens.shape, -1)
