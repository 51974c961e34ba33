"""The DSpark head's training: its blocks are those of drafting, its losses as written out, its confidence counted.

Drafting is one block at a time after the context kept so far.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import MarkovKind
from outrider.compiler.models.drafting import BlockDraft
from outrider.plans.errors import UsageError
from outrider.tools.lab.reference.acceptance import Continuation, calibrate, measure
from outrider.tools.lab.reference.dspark import (
    BlockGeometry,
    block_confidences,
    block_drafts,
    block_loss,
    initialise,
    random_anchors,
    run_blocks,
    slot_logits,
)
from outrider.tools.lab.reference.teacher import Reading, Teacher
from tests.compiler.block_heads import KeptContext
from tests.tools.lab.drafter_lessons import tiny_target

VOCAB, BATCH, LENGTH, MASK = 50, 2, 17, 49
SIZES = BlockGeometry(layers=2, intermediate=20, heads=4, kv_heads=2, head_dim=8, markov_rank=5, block_size=3)


def random_draft(geometry: BlockGeometry = SIZES) -> BlockDraft:
    target = tiny_target(VOCAB)
    torch.manual_seed(2)
    head = BlockHead(geometry.config(target.config, MASK))
    initialise(head, target.norm.weight)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return BlockDraft(head.requires_grad_(False), target)


def inputs(draft: BlockDraft) -> tuple[Tensor, Reading]:
    torch.manual_seed(3)
    features = torch.randn(BATCH, LENGTH, draft.head.config.feature_size)
    return torch.randint(VOCAB, (BATCH, LENGTH + 1)), Reading(torch.randn(BATCH, LENGTH, VOCAB), features)


def one_block(draft: BlockDraft, features: Tensor, tip: int) -> Tensor:
    """The hidden states `[slots, H]` of drafting after context with `features` `[context, taps * Ht]`."""
    execution = KeptContext(draft.head)
    execution.keep(features)
    masks = torch.full((draft.head.config.block_size,), MASK)
    masks[0] = tip
    return execution.block(draft.embed(masks))


@pytest.mark.parametrize(
    ("geometry", "anchors"),
    [
        (SIZES, list(range(1, 13))),
        (replace(SIZES, kv_heads=1, layers=3, block_size=5), [1, 5, 9]),
        (replace(SIZES, kv_heads=4, taps=(0, 7)), [12]),
        (replace(SIZES, block_size=1), [1, 5, 9]),
    ],
)
def test_blocks_at_once_equal_drafting_block_by_block(geometry: BlockGeometry, anchors: list[int]) -> None:
    draft = random_draft(geometry)
    ids, reading = inputs(draft)
    found = run_blocks(draft, ids, reading.features, torch.tensor(anchors))
    assert found.shape == (BATCH, len(anchors), geometry.block_size, 16)
    for row in range(BATCH):
        for block, anchor in enumerate(anchors):
            expected = one_block(draft, reading.features[row, :anchor], int(ids[row, anchor]))
            torch.testing.assert_close(found[row, block], expected, rtol=0, atol=1e-5)


def test_the_loss_of_a_slot_is_the_target_s_distribution_after_the_text_so_far() -> None:
    """Written out slot by slot, with Python's own numbers and drafting's hidden states."""
    draft = random_draft()
    head = draft.head
    assert head.markov is not None
    assert head.confidence_head is not None
    ids, reading = inputs(draft)
    anchors = random_anchors(LENGTH, 3)
    total = weights = 0.0
    for row in range(BATCH):
        for anchor in anchors.tolist():
            hidden = one_block(draft, reading.features[row, :anchor], int(ids[row, anchor]))
            for slot in range(3):
                latent = head.markov.embedding[ids[row, anchor + slot]]
                logits = hidden[slot] @ draft.embedding.T + latent @ head.markov.output.weight
                q = [math.exp(x) for x in logits.double().tolist()]
                q = [x / sum(q) for x in q]
                p = [math.exp(x) for x in reading.logits[row, anchor + slot].double().tolist()]
                p = [x / sum(p) for x in p]
                accepted = sum(map(min, p, q))
                confidence = torch.cat((hidden[slot], latent)) @ head.confidence_head.weight[:, 0]
                chance = 1 / (1 + math.exp(-float(confidence + head.confidence_head.bias)))
                loss = -sum(x * math.log(y) for x, y in zip(p, q, strict=True)) + 0.5 * (1 - accepted)
                loss -= 0.3 * (accepted * math.log(chance) + (1 - accepted) * math.log(1 - chance))
                total, weights = total + math.exp(-slot / 4) * loss, weights + math.exp(-slot / 4)
    assert float(block_loss(draft, ids, reading, anchors)) == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.parametrize(("kind", "reaches"), [("vanilla", [0]), ("gated", [0]), ("rnn", [0, 1, 2])])
def test_the_loss_reaches_every_parameter_and_a_token_its_slot_or_all_slots_from_it_on(
    kind: MarkovKind, reaches: list[int]
) -> None:
    draft = random_draft(replace(SIZES, markov=kind))
    hidden = torch.randn(3, 16)
    logits, other = (slot_logits(draft, hidden, torch.tensor([first, 7, 9])) for first in (4, 5))
    assert [slot for slot in range(3) if not torch.equal(logits[slot], other[slot])] == reaches
    draft.head.requires_grad_(True)
    ids, reading = inputs(draft)
    block_loss(draft, ids, reading, random_anchors(LENGTH, 3)).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.head.parameters())
    assert draft.embedding.grad is None


def test_a_chain_s_drafts_are_those_of_its_block() -> None:
    """Row i is the chain whose tip is token i+1: it knows the features up to token i."""
    draft, depths = random_draft(), 2
    ids, reading = inputs(draft)
    reading = Reading(reading.logits[:1], reading.features[:1])
    found = block_drafts(draft)(ids[0, :LENGTH], reading, depths)
    chances = block_confidences(draft)(ids[0, :LENGTH], reading, depths)
    assert found.shape == (depths, LENGTH - 1 - depths, VOCAB)
    assert chances.shape == found.shape[:2]
    for chain in range(found.shape[1]):
        hidden = one_block(draft, reading.features[0, : chain + 1], int(ids[0, chain + 1]))[:depths]
        previous = ids[0, chain + 1 : chain + 1 + depths]
        torch.testing.assert_close(found[:, chain], slot_logits(draft, hidden, previous), rtol=0, atol=1e-4)
        expected = draft.head.confidence(hidden, previous).sigmoid()
        torch.testing.assert_close(chances[:, chain], expected, rtol=0, atol=1e-5)


def test_a_confidence_that_says_the_overlap_is_calibrated() -> None:
    """Of a drafter that always errs at depth two, with a confidence that knows both."""
    model = tiny_target(VOCAB)
    teacher = Teacher(model, Path(), Tokenizer(BPE()), "")
    ids = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    continuations = [Continuation(ids, 4, temperature) for temperature in (0.0, 1.0)]

    def drafts(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        chains = len(ids) - 1 - depths
        return torch.stack([(1 - 1.5 * d) * reading.logits[0, 1 + d : 1 + d + chains] for d in range(depths)])

    def exact(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        chains = len(ids) - 1 - depths
        p = torch.stack([reading.logits[0, 1 + d : 1 + d + chains] for d in range(depths)]).softmax(dim=-1)
        return torch.minimum(p, drafts(ids, reading, depths).softmax(dim=-1)).sum(dim=-1)

    acceptance = measure(teacher, continuations, drafts, depths=2)
    right = calibrate(teacher, continuations, drafts, exact, (), 2)
    assert right.sampled == pytest.approx(acceptance.overlap)
    assert right.error == pytest.approx([0.0, 0.0], abs=1e-6)
    half = calibrate(teacher, continuations, drafts, lambda *a: torch.full_like(exact(*a), 0.5), (), 2)
    assert half.greedy[0] == half.sampled[0] == 0.5
    assert half.error[0] == pytest.approx(0.5)
    assert "| temperature 1, predicted | 0.500 | 0.500 |" in half.text(acceptance)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple of --kv-heads"),
        ({"head_dim": 7}, "--head-dim is 7"),
        ({"block_size": 300}, "--block-size is 300; choose at most 256"),
        ({"taps": (4, 2)}, "--taps is 4 2"),
        ({"taps": (2, 8)}, "from 0 to 7"),
        ({"taps": (2, 2)}, "each once"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        replace(SIZES, **sizes).config(tiny_target(VOCAB).config, MASK)
