"""A head's steps in training are those of drafting: pairs and one chain under plain causal attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from outrider.compiler.models.eager import CausalExecution
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.tools.lab.reference.eagle3 import HeadGeometry, initialise, unroll, unrolled_loss
from outrider.tools.lab.reference.teacher import Reading
from tests.tools.lab.drafter_lessons import tiny_target

VOCAB, BATCH, PAIRS, STEPS = 50, 2, 7, 4
SIZES = HeadGeometry(hidden=12, intermediate=20, heads=3, kv_heads=1, head_dim=8, draft_vocab=20)


def random_head(geometry: HeadGeometry = SIZES) -> Eagle3Head:
    target = tiny_target(VOCAB)
    torch.manual_seed(2)
    head = Eagle3Head(geometry.config(target.config))
    initialise(head, torch.randperm(VOCAB)[: geometry.draft_vocab].sort().values, target.embedding)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return head


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(BATCH, PAIRS, 48), torch.randint(VOCAB, (BATCH, PAIRS + STEPS - 1))


def one_chain(head: Eagle3Head, table: Tensor, features: Tensor, tokens: Tensor, pair: int) -> list[Tensor]:
    """What drafting does after `pair`: each step is a row more, and all rows run again under causal attention."""
    rows = head.fuse(features[: pair + 1])
    found = []
    for step in range(STEPS):
        length = pair + 1 + step
        execution = CausalExecution(head.config, 1, length)  # type: ignore[arg-type]
        normed, h = head.layer(rows, embedding(tokens[:length], table), execution)
        found.append(normed[-1])
        rows = torch.cat((rows, h[-1:]))
    return found


@pytest.mark.parametrize(
    "geometry", [replace(SIZES, heads=4, kv_heads=2), replace(SIZES, hidden=16, fc_norm=False, norm_output=True)]
)
def test_the_unrolled_steps_equal_drafting_chain_by_chain(geometry: HeadGeometry) -> None:
    head = random_head(geometry)
    table = tiny_target(VOCAB).embedding if head.embedding is None else head.embedding
    features, tokens = inputs()
    with torch.no_grad():
        states = unroll(head, table, features, tokens, STEPS)
        for sequence in range(BATCH):
            for pair in range(PAIRS):
                chain = one_chain(head, table, features[sequence], tokens[sequence], pair)
                for step, h in enumerate(chain):
                    torch.testing.assert_close(states[step][sequence, pair], h, rtol=0, atol=1e-5)


def test_the_loss_of_a_step_is_the_target_s_distribution_after_the_tokens_fed() -> None:
    """Written out pair by pair, with the draft vocabulary's mask."""
    head = random_head()
    assert head.embedding is not None
    torch.manual_seed(4)
    length, steps = 9, 3
    ids = torch.randint(VOCAB, (1, length + 1))
    reading = Reading(torch.randn(1, length, VOCAB), torch.randn(1, length, 48))
    known = set(head.target_ids.tolist())
    pairs = length - steps
    with torch.no_grad():
        found = unrolled_loss(head, head.embedding, ids, reading, steps)
        states = unroll(head, head.embedding, reading.features[:, :pairs], ids[:, 1:], steps)
        total = weights = 0.0
        for step in range(steps):
            losses = []
            for i in range(pairs):
                fed = ids[0, i + 2 : i + 2 + step].tolist()  # what the steps before had to draft
                if set(fed) <= known:
                    p = reading.logits[0, i + 1 + step].softmax(0)[head.target_ids]
                    losses.append(float(-(p * head.logits(states[step][0, i]).log_softmax(0)).sum()))
            total += 0.8**step * sum(losses) / max(1, len(losses))
            weights += 0.8**step
    assert float(found) == pytest.approx(total / weights, rel=1e-4)
