"""What to draft at a temperature: `python -m tools.proposals [--models DIR] [--temperature 0.7]`.

A coupled drafter knows the target's draw u. Along the target's own continuations of held-out prompts, how often is the
token that it chooses at u the drafter's first proposal, and how often among the first three? Compared are

    likeliest   the drafter's likeliest tokens: argmax chains and trees
    cdf         its own inverse CDF at u first, then its likeliest
    window      by the score of TreeExpand: which tokens a CDF that may be off by `spread` meets at u, with `doubt`

of which the last is what plans use (`compiler/export/draft_graph.py` holds its two constants).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from commands.arguments import Parser, at_least_1, number
from commands.console import guarded, print_json, stdout
from compiler.checkpoint import load_decoder
from compiler.eagle3_checkpoint import load_eagle3
from compiler.export.draft_graph import DOUBT, SPREAD
from tools.reference.acceptance import Drafts, continue_prompts, read_prompts
from tools.reference.draft_model import model_drafts
from tools.reference.eagle3 import head_drafts
from tools.reference.teacher import Teacher

SPREADS, DOUBTS = (0.05, 0.1, 0.15, 0.25), (0.1, 0.3, 0.5)
CHILDREN = (1, 3)


@dataclass(frozen=True)
class Places:
    """Distributions at the temperature behind the same tokens, f64 `[places, vocab]`, and a draw for each."""

    target: Tensor
    drafter: Tensor
    draw: Tensor

    @property
    def overlap(self) -> float:
        return float(torch.minimum(self.target, self.drafter).sum(-1).mean())

    def hits(self, score: Tensor) -> list[float]:
        """The share of places where the target's token is among the best 1 and 3 by `score` `[places, vocab]`."""
        token = chosen(self.target, self.draw)
        best = score.topk(max(CHILDREN), dim=-1).indices
        return [float((best[:, :k] == token[:, None]).any(-1).double().mean()) for k in CHILDREN]

    def likeliest(self) -> Tensor:
        return self.drafter

    def cdf(self) -> Tensor:
        return self.drafter.scatter(1, chosen(self.drafter, self.draw)[:, None], 2.0)

    def window(self, spread: float, doubt: float) -> Tensor:
        edges = self.drafter.cumsum(-1) - self.draw[:, None]
        before = edges - self.drafter
        near = (edges.clamp(-spread, spread) - before.clamp(-spread, spread)) / (2 * spread)
        return (1 - doubt) * near + doubt * self.drafter


def chosen(p: Tensor, draw: Tensor) -> Tensor:
    """The inverse CDF of `p` `[places, vocab]` at `draw` `[places]`, in id order."""
    return torch.searchsorted(p.cumsum(-1), draw[:, None] * p.sum(-1, keepdim=True), right=True)[:, 0].clamp(
        max=p.shape[1] - 1
    )


@torch.no_grad()
def places(
    teacher: Teacher, drafts: Drafts, taps: tuple[int, ...], prompts: Sequence[str], temperature: float
) -> Places:
    """One place for every token that the target writes behind the prompts, at temperature 1."""
    rng = torch.Generator().manual_seed(0)
    target, drafter = [], []
    for c in continue_prompts(teacher, prompts):
        if c.temperature:
            reading = teacher.read(c.ids[None], taps, exact=True)
            q = drafts(c.ids, reading, 1)[0, c.prompt - 1 :].double()
            p = reading.logits[0, 1 : len(c.ids) - 1][c.prompt - 1 :].double()
            target.append((p / temperature).softmax(-1))
            drafter.append((q / temperature).softmax(-1))
    joined = torch.cat(target)
    return Places(joined, torch.cat(drafter), torch.rand(len(joined), generator=rng, dtype=torch.float64))


def rows(found: Places) -> Iterator[tuple[str, list[float]]]:
    """Every way to propose, and its hits."""
    ways: dict[str, Callable[[], Tensor]] = {"likeliest": found.likeliest, "cdf": found.cdf}
    for name, score in ways.items():
        yield name, found.hits(score())
    for spread, doubt in product(SPREADS, DOUBTS):
        mark = ", as built" if (spread, doubt) == (SPREAD, DOUBT) else ""
        yield f"window {spread} {doubt}{mark}", found.hits(found.window(spread, doubt))


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: measure(_parser().parse_args(given)))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.proposals",
        description=__doc__,
        epilog="example: %(prog)s --models plans/reference --prompts 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=Path, default=Path("plans/reference"), help="folder of target, eagle3, model")
    parser.add_argument("--temperature", type=number(most=100, above=0), default=0.7)
    parser.add_argument("--prompts", type=at_least_1, default=24, help="held-out prompts to continue (default 24)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def measure(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.models
    teacher = Teacher.load(folder / "target", "cpu")
    head = load_eagle3(folder / "eagle3", teacher.model.config)
    drafters: dict[str, tuple[Drafts, tuple[int, ...]]] = {
        "eagle3": (head_drafts(head, teacher.model.embedding), head.config.aux_layers),
        "model": (model_drafts(load_decoder(folder / "model")), ()),
    }
    prompts = read_prompts(folder / "held_out.jsonl")[: arguments.prompts]
    report: dict[str, object] = {}
    for name, (drafts, taps) in drafters.items():
        found = places(teacher, drafts, taps, prompts, arguments.temperature)
        ways = dict(rows(found))
        report[name] = {"places": len(found.draw), "overlap": found.overlap, "ways": ways}
        if arguments.json:
            continue
        table = Table(f"{name}: proposals", *(f"among {k}" for k in CHILDREN), box=None, pad_edge=False)
        for way, hits in ways.items():
            table.add_row(way, *(f"{share:.3f}" for share in hits))
        stdout.print(
            f"{name} at temperature {arguments.temperature}: {len(found.draw)} places, sum of min(p, q) "
            f"{found.overlap:.3f}"
        )
        stdout.print(table)
    if arguments.json:
        print_json(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
