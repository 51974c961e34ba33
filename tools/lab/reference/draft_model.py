"""Training of the draft model: a decoder of a layer or two, distilled from the target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import CausalExecution
from outrider.tools.lab.reference.acceptance import Drafts, measure
from outrider.tools.lab.reference.drafter import MUON_LR, Lessons, principal_axes, teach
from outrider.tools.lab.reference.export import write_card, write_decoder
from outrider.tools.lab.reference.loop import Run, Training
from outrider.tools.lab.reference.target import initialise, matrices
from outrider.tools.lab.reference.teacher import Reading

NEXT_TOKEN = 0.1
"""Weight of the loss against the text's own next token; the rest is against the target's distribution."""


@dataclass(frozen=True)
class ModelGeometry:
    """A draft model's sizes; all else is the target's."""

    layers: int = 1
    hidden: int = 192
    intermediate: int = 512
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64

    def config(self, target: DecoderConfig) -> DecoderConfig:
        return replace(
            target,
            family="qwen3",
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm="head",
            tie_embeddings=True,
        )


def train_model(run: Run, lessons: Lessons, geometry: ModelGeometry, name: str) -> None:
    """Distil a draft model, write it to `run.out/name`, and measure what was written."""
    teacher, folder = lessons.teacher, run.out / name
    config = geometry.config(teacher.model.config)
    torch.manual_seed(0)
    model = Decoder(config)
    initialise(model)
    axes = principal_axes(teacher.model.embedding.cpu(), config.hidden_size)
    if axes is not None:
        model.embedding.data.copy_(teacher.model.embedding.cpu() @ axes)
    model.to(run.device)
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    identity = {"target": teacher.sha256, "geometry": repr(config)}
    training = Training(model, matrices(model), run.work / f"{name}.pt", identity, MUON_LR)

    def loss(ids: Tensor) -> Tensor:
        wanted = teacher.read(ids[:, :-1]).logits
        with torch.autocast(teacher.device.type, torch.bfloat16):
            return distillation_loss(model, ids, wanted)

    teach(run, lessons, training, loss, model_drafts(model), ())
    write_decoder(model, folder)  # its tokenizer is the target's
    acceptance = measure(teacher, lessons.continuations, model_drafts(load_decoder(folder).to(run.device)))
    report = training.report(run.device_name)
    write_card(folder, "The reference draft model", _about(model, teacher.sha256), report, acceptance)
    print(f"{folder}: {acceptance}", flush=True)


def distillation_loss(model: Decoder, ids: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy against the distribution of `wanted` `[batch, length, vocab]`, and a little against the text.

    `ids` `[batch, length + 1]`: the inputs are all but the last, the text's next tokens all but the first.
    """
    batch, length = ids.shape[0], ids.shape[1] - 1
    execution = CausalExecution(model.config, batch, length, ids.device)
    log_q = model(ids[:, :-1].reshape(-1), execution).float().log_softmax(dim=-1)
    probabilities = wanted.float().softmax(dim=-1).view(log_q.shape)
    taught: Tensor = -(probabilities * log_q).sum(dim=-1).mean()
    return (1 - NEXT_TOKEN) * taught + NEXT_TOKEN * F.nll_loss(log_q, ids[:, 1:].reshape(-1))


def model_drafts(model: Decoder) -> Drafts:
    """A decoder's drafts, for which a token's depth in a chain makes no difference."""

    def drafts(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        chains = len(ids) - 1 - depths
        logits = model(ids, CausalExecution(model.config, 1, len(ids), ids.device)).float()
        return torch.stack([logits[1 + d : 1 + d + chains] for d in range(depths)])

    return drafts


def _about(model: Decoder, sha256: str) -> str:
    c = model.config
    size = sum(p.numel() for p in model.parameters()) / 1e6
    return f"""A Qwen3-architecture draft model of {size:.2f}M parameters for `../target` (weights {sha256[:12]}), bf16,
of the same tokens: {c.num_layers} layer{"s" * (c.num_layers > 1)}, hidden {c.hidden_size},
intermediate {c.intermediate_size}, {c.num_heads} query and {c.num_kv_heads} key/value heads of {c.head_dim},
tied embedding.
Distilled from the target. Written by `python -m outrider.tools.lab.train_reference model`."""
