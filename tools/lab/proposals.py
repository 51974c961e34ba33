"""What to draft at a temperature: `python -m outrider.tools.lab.proposals [--models DIR] [--temperature 0.7]`.

A coupled drafter knows the noise of the target's race. Along the target's own continuations of held-out prompts, how
often is the token that wins the target's race the drafter's first proposal, and how often among the first 2, 3 and 8?
Compared are

    likeliest   the drafter's likeliest tokens, without the noise
    race        by the score of TreeExpand: who wins the drafter's race with the same noise, which tells nothing with
                `doubt`

of which plans use the latter (`compiler/export/draft_graph.py` holds its constant).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from outrider.commands.arguments import Parser, at_least_1, number
from outrider.commands.console import guarded, print_json, stdout
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.eagle3_checkpoint import open_eagle3
from outrider.compiler.export.draft_graph import DOUBT
from outrider.tools.lab.reference.acceptance import Drafts, continue_prompts, read_prompts
from outrider.tools.lab.reference.draft_model import model_drafts
from outrider.tools.lab.reference.eagle3 import head_drafts
from outrider.tools.lab.reference.teacher import Teacher

DOUBTS = (0.0, 0.1, 0.3, 0.5, 0.7)
CHILDREN = (1, 2, 3, 8)


@dataclass(frozen=True)
class Places:
    """Distributions at the temperature after the same tokens, and each token's noise, f64 `[places, vocab]`."""

    target: Tensor
    drafter: Tensor
    noise: Tensor

    @property
    def overlap(self) -> float:
        return float(torch.minimum(self.target, self.drafter).sum(-1).mean())

    def hits(self, score: Tensor) -> list[float]:
        """The share of places where the target's token is among the best CHILDREN by `score` `[places, vocab]`."""
        token = (self.target / self.noise).argmax(-1)
        best = score.topk(max(CHILDREN), dim=-1).indices
        return [float((best[:, :k] == token[:, None]).any(-1).double().mean()) for k in CHILDREN]

    def race(self, doubt: float) -> Tensor:
        pace = self.drafter / self.noise
        return (1 - doubt) * pace / pace.sum(-1, keepdim=True) + doubt * self.drafter


@torch.no_grad()
def places(
    teacher: Teacher, drafts: Drafts, taps: tuple[int, ...], prompts: Sequence[str], temperature: float
) -> Places:
    """One place for every token that the target writes after the prompts, at temperature 1."""
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
    return Places(joined, torch.cat(drafter), torch.empty_like(joined).exponential_(generator=rng))


def rows(found: Places) -> Iterator[tuple[str, list[float]]]:
    """Every way to propose, and its hits."""
    yield "likeliest", found.hits(found.drafter)
    for doubt in DOUBTS:
        yield f"race {doubt}{', as built' if doubt == DOUBT else ''}", found.hits(found.race(doubt))


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: measure(_parser().parse_args(given)))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.proposals",
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
    head = open_eagle3(folder / "eagle3", teacher.model.config).load()
    drafters: dict[str, tuple[Drafts, tuple[int, ...]]] = {
        "eagle3": (head_drafts(head, teacher.model.embedding), head.config.aux_layers),
        "model": (model_drafts(load_decoder(folder / "model")), ()),
    }
    prompts = read_prompts(folder / "held_out.jsonl.gz")[: arguments.prompts]
    report: dict[str, object] = {}
    for name, (drafts, taps) in drafters.items():
        found = places(teacher, drafts, taps, prompts, arguments.temperature)
        ways = dict(rows(found))
        report[name] = {"places": len(found.noise), "overlap": found.overlap, "ways": ways}
        if arguments.json:
            continue
        table = Table(f"{name}: proposals", *(f"among {k}" for k in CHILDREN), box=None, pad_edge=False)
        for way, hits in ways.items():
            table.add_row(way, *(f"{share:.3f}" for share in hits))
        stdout.print(
            f"{name} at temperature {arguments.temperature}: {len(found.noise)} places, sum of min(p, q) "
            f"{found.overlap:.3f}"
        )
        stdout.print(table)
    if arguments.json:
        print_json(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
