"""Acceptance by depth: how often a drafter says what the target says next, on the target's own continuations.

Depth d counts the chains that got to it: of those whose d-1 drafted tokens were the target's, the share whose d-th
is. Along a continuation that the target wrote, such a chain reads the continuation's own tokens, so one pass over
it measures the chains at all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.tools.lab.reference.prompts import read_completions
from outrider.tools.lab.reference.teacher import Reading, Teacher, generate
from outrider.tools.markdown import markdown_table

DEPTHS, CHILDREN, NEW_TOKENS = 6, 4, 128
GREEDY, SAMPLED = 0.0, 1.0

Drafts = Callable[[Tensor, Reading, int], Tensor]
"""A sequence's ids `[length]`, the target's reading of it, and a number of depths, to the drafter's logits.

`[depths, length - 1 - depths, vocab]` over the target's vocabulary, -inf for what is never drafted: row i is the
chain whose tip is token i+1, and depth d (from 0) chooses token i+2+d after the chain's tokens before it.
"""


@dataclass(frozen=True)
class Continuation:
    """A held-out prompt of `prompt` tokens and how the target continues at `temperature`: int64 `[length]`."""

    ids: Tensor
    prompt: int
    temperature: float

    @property
    def first_chain(self) -> int:
        """The first chain, as `Drafts` numbers them, whose tokens the target wrote."""
        return max(0, self.prompt - 1)


@dataclass(frozen=True)
class Counts:
    """What was seen of each chain, `[chains, depths]`, whether or not the chain got that far.

    `first`: the likeliest drafted token is the target's; `among`: the target's is one of the CHILDREN likeliest;
    `overlap`: sum of min(p, q) over the vocabulary; `kept`: min(1, q / p) of the target's token.
    """

    first: NDArray[np.bool_]
    among: NDArray[np.bool_]
    overlap: NDArray[np.float64]
    kept: NDArray[np.float64]


@dataclass(frozen=True)
class Acceptance:
    """Shares by depth, the first depth first."""

    greedy: list[float]
    greedy_children: list[float]
    overlap: list[float]
    sampled_children: list[float]

    def tokens_per_verify(self, drafted: int) -> float:
        """Committed tokens of a target pass over a greedy chain of `drafted` tokens, its own token included."""
        return 1 + float(np.cumprod(self.greedy[:drafted]).sum())

    def table(self) -> str:
        """Markdown: a row for each share, a column for each depth."""
        rows = {
            "greedy": self.greedy,
            f"greedy, among {CHILDREN} children": self.greedy_children,
            "temperature 1, sum of min(p, q)": self.overlap,
            f"temperature 1, among {CHILDREN} children": self.sampled_children,
        }
        return table("accepted at depth", rows)

    def __str__(self) -> str:
        return f"greedy {shares(self.greedy)}, temperature 1 {shares(self.overlap)}"


def read_prompts(path: Path) -> list[str]:
    """Of the held-out prompts that the target's training wrote, those of the task completion."""
    return [str(row["prompt"]) for row in read_completions(path)]


def continue_prompts(teacher: Teacher, prompts: Sequence[str], new: int = NEW_TOKENS) -> list[Continuation]:
    """Each prompt's greedy continuation and one at temperature 1, of `new` tokens."""
    temperatures = torch.tensor([GREEDY, SAMPLED], device=teacher.device)
    rng = torch.Generator(teacher.device).manual_seed(0)
    found = []
    for encoded in teacher.tokenizer.encode_batch(list(prompts)):
        ids = torch.tensor(encoded.ids, device=teacher.device).expand(2, -1)
        written = generate(teacher.model, ids, temperatures, new, rng)
        found += [Continuation(row, len(encoded.ids), float(t)) for row, t in zip(written, temperatures, strict=True)]
    return found


@torch.no_grad()
def measure(
    teacher: Teacher,
    continuations: Sequence[Continuation],
    drafts: Drafts,
    taps: tuple[int, ...] = (),
    depths: int = DEPTHS,
) -> Acceptance:
    """Acceptance over all chains whose tip, and all of whose tokens, the target wrote."""
    counts = {
        temperature: joined(
            [counts_of(teacher, c, drafts, taps, depths) for c in continuations if c.temperature == temperature]
        )
        for temperature in (GREEDY, SAMPLED)
    }
    return Acceptance(
        greedy=by_depth(counts[GREEDY].first),
        greedy_children=by_depth(counts[GREEDY].among),
        overlap=mean_by_depth(counts[SAMPLED].overlap, counts[SAMPLED].kept),
        sampled_children=by_depth(counts[SAMPLED].among),
    )


def by_depth(hits: NDArray[np.bool_]) -> list[float]:
    """Of the chains `[chains, depths]` that hit at all depths before, the share that hits at each depth."""
    survived = np.cumprod(hits, axis=1).sum(axis=0).astype(float)
    reached = np.concatenate(([float(len(hits))], survived[:-1]))
    return [float(s / r) if r else 0.0 for s, r in zip(survived, reached, strict=True)]


def mean_by_depth(values: NDArray[np.float64], kept: NDArray[np.float64]) -> list[float]:
    """The mean of `values` at each depth over the chains that got there, `[chains, depths]` each.

    `kept` is the chance of each token's chain to continue after it. The chains are those that p drew: one that q drew
    and p accepted has min(p, q) / p of their weight at each token before. So of the overlaps, the mean is the share
    of tokens drawn from q that p accepts.
    """
    before = np.concatenate((np.ones((len(kept), 1)), np.cumprod(kept, axis=1)[:, :-1]), axis=1)
    weight = before.sum(axis=0)
    return [float(s / w) if w else 0.0 for s, w in zip((before * values).sum(axis=0), weight, strict=True)]


def counts_of(teacher: Teacher, c: Continuation, drafts: Drafts, taps: tuple[int, ...], depths: int) -> Counts:
    """What is seen of all chains of one continuation."""
    ids, chains, first = c.ids, len(c.ids) - 1 - depths, c.first_chain
    reading = teacher.read(ids[None], taps, exact=True)
    q_logits = drafts(ids, reading, depths)[:, first:]
    p = torch.stack([reading.logits[0, 1 + d : 1 + d + chains] for d in range(depths)])[:, first:].softmax(dim=-1)
    chosen = torch.stack([ids[2 + d : 2 + d + chains] for d in range(depths)])[:, first:, None]
    best = q_logits.topk(min(CHILDREN, q_logits.shape[-1]), dim=-1).indices
    q = q_logits.softmax(dim=-1)
    kept = (q.gather(-1, chosen) / p.gather(-1, chosen)).clamp(max=1)[..., 0]
    return Counts(
        (best[..., :1] == chosen)[..., 0].T.cpu().numpy(),
        (best == chosen).any(dim=-1).T.cpu().numpy(),
        torch.minimum(p, q).sum(dim=-1).T.double().cpu().numpy(),
        kept.T.double().cpu().numpy(),
    )


def joined(counts: Sequence[Counts]) -> Counts:
    return Counts(*(np.concatenate([getattr(c, name) for c in counts]) for name in Counts.__annotations__))


def table(head: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Markdown: a row for each name, a column for each depth."""
    depths = max(map(len, rows.values()))
    cells = ([name, *(f"{share:.3f}" for share in of_depths)] for name, of_depths in rows.items())
    return "\n".join(markdown_table([head, *map(str, range(1, 1 + depths))], cells))


def shares(of_depths: Sequence[float]) -> str:
    return " ".join(f"{share:.3f}" for share in of_depths)


Confidences = Callable[[Tensor, Reading, int], Tensor]
"""As `Drafts`, to the chances `[depths, length - 1 - depths]` that the target accepts the token at each depth."""


@dataclass(frozen=True)
class Calibration:
    """Means by depth over the chains that got there: predicted chances, and the error of one at temperature 1."""

    greedy: list[float]
    sampled: list[float]
    error: list[float]

    def text(self, acceptance: Acceptance) -> str:
        """The part of a model card: predicted beside observed, where `acceptance` counts the same chains."""
        rows = {
            "temperature 1, predicted": self.sampled,
            "temperature 1, observed": acceptance.overlap,
            "temperature 1, mean distance of the two": self.error,
            "greedy, predicted": self.greedy,
            "greedy, observed": acceptance.greedy,
        }
        return f"""The confidence, which predicts the sum of min(p, q) at temperature 1, over the same chains:

{table("confidence at depth", rows)}"""

    def __str__(self) -> str:
        return f"greedy {shares(self.greedy)}, temperature 1 {shares(self.sampled)}, error {shares(self.error)}"


@torch.no_grad()
def calibrate(
    teacher: Teacher,
    continuations: Sequence[Continuation],
    drafts: Drafts,
    confidences: Confidences,
    taps: tuple[int, ...],
    depths: int,
) -> Calibration:
    """Compare the confidence with what `measure` counts, over the same chains."""
    greedy, sampled = ([c for c in continuations if c.temperature == t] for t in (GREEDY, SAMPLED))
    of_greedy, of_sampled = (
        joined([counts_of(teacher, c, drafts, taps, depths) for c in each]) for each in (greedy, sampled)
    )
    predicted = {
        name: np.concatenate([_predicted(teacher, c, confidences, taps, depths) for c in each])
        for name, each in (("greedy", greedy), ("sampled", sampled))
    }
    return Calibration(
        greedy=mean_by_depth(predicted["greedy"], of_greedy.first.astype(float)),
        sampled=mean_by_depth(predicted["sampled"], of_sampled.kept),
        error=mean_by_depth(abs(predicted["sampled"] - of_sampled.overlap), of_sampled.kept),
    )


def _predicted(
    teacher: Teacher, c: Continuation, confidences: Confidences, taps: tuple[int, ...], depths: int
) -> NDArray[np.float64]:
    """`[chains, depths]` of the chains that `counts_of` counts."""
    found = confidences(c.ids, teacher.read(c.ids[None], taps, exact=True), depths)[:, c.first_chain :]
    return found.T.double().cpu().numpy()
