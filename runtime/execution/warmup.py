"""Record every size of round that decoding needs, largest first, before the first prompt.

Prompts are not warmed up: their passes are long, and few are of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from outrider.plans import names
from outrider.plans.manifest import BatchSize
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import Step, TargetStep

_BY = [names.SYMBOLS.index(symbol) for symbol in (names.NEW, names.VIEW)]  # what makes a round large

Sizes = Iterator[tuple[str, tuple[str, ...]]]
"""Rounds that are laid out one after another: of each, the name of its program, and the models whose sizes it has."""


class DraftedRounds(Protocol):
    """Lays out the rounds that drafters may need."""

    def rounds(self, length: int, step: TargetStep) -> Sizes:
        """Lay out the rounds with a draft of a sequence of `length` tokens that is alone."""

    def batches(self, model: str, size: BatchSize, view: int, *, rows: bool) -> Sizes:
        """Lay out the runs of a drafter for several sequences, with `view` keys in view, in a row each or in one."""


def warm_up(context: int, steps: Mapping[str, Step], drafting: DraftedRounds, programs: Mapping[str, Program]) -> int:
    """Run every round once, for an empty sequence that may come to `context` tokens, and for several; return the number
    of rounds.

    `steps` are those of all models. Slots get garbage, none of which is committed.
    """
    target = steps[names.TARGET]
    assert isinstance(target, TargetStep)
    layouts: list[Callable[[], Sizes]] = [
        partial(_rounds, length, target, drafting) for length in _lengths(context, list(steps.values()))
    ]
    for model, step in steps.items():
        lay_out = partial(_verified, target) if model == names.TARGET else partial(drafting.batches, model)
        layouts += [
            partial(lay_out, *batch, rows=rows) for rows in {False, step.most_rows > 1} for batch in _batches(step)
        ]
    found: dict[tuple[object, ...], tuple[list[int], Callable[[], Sizes], int]] = {}
    for layout in layouts:
        for place, (program, models) in enumerate(layout()):
            sizes = [tuple(steps[model].sizes) for model in models]
            work = [sum(size[i] for size in sizes) for i in _BY]
            found.setdefault((program, *sizes), (work, layout, place))
    for _, layout, place in sorted(found.values(), key=lambda round: round[0], reverse=True):
        program, _ = next(islice(layout(), place, None))
        programs[program].run()
    return len(found)


def _rounds(length: int, step: TargetStep, drafting: DraftedRounds) -> Sizes:
    """Lay out every round of a sequence of `length` tokens that is alone."""
    yield from drafting.rounds(length, step)
    step.begin_warmup(length)
    yield names.DECODE, (names.TARGET,)


def _batches(step: Step) -> Iterator[tuple[BatchSize, int]]:
    """Yield every size of step of several sequences, with each number of keys in view."""
    assert step.buckets is not None, "what is recorded has buckets"
    for size in step.buckets.batch:
        for view in step.buckets.view:
            yield size, view


def _verified(step: TargetStep, size: BatchSize, view: int, *, rows: bool) -> Sizes:
    step.begin_warmup_batch(size, view, rows=rows)
    yield names.DECODE if size.each == 1 else names.VERIFY, (names.TARGET,)


def _lengths(context: int, steps: Sequence[Step]) -> list[int]:
    """Return lengths, descending, that cover each combination of views: those about the ends of buckets."""
    lengths = {context}
    for step in steps:
        assert step.buckets is not None, "what is recorded has buckets"
        added = step.buckets.new[-1] + step.reach + 1
        for view in step.buckets.view:
            lengths.update(range(max(view - added, 1), min(view + 2, context + 1)))
    return sorted(lengths, reverse=True)
