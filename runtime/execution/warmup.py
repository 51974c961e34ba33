"""Record every size of round that decoding needs, largest first, before the first prompt.

Prompts are not warmed up: their passes are long, and few are of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from outrider.plans import names
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import Step, TargetStep

_BY = [names.SYMBOLS.index(symbol) for symbol in (names.NEW, names.VIEW)]  # what makes a round large


Rounds = Callable[[int, TargetStep], Iterator[tuple[str, tuple[str, ...]]]]
"""Lays out, one after another, the rounds with a draft that a sequence of `length` tokens may need. Of each: the name
of its program, and the models whose sizes it runs with."""


def warm_up(context: int, steps: Mapping[str, Step], rounds: Rounds, programs: Mapping[str, Program]) -> int:
    """Run every round once, for an empty sequence that may come to `context` tokens; return the number of rounds.

    `steps` are those of all models. Slots get garbage, none of which is committed.
    """
    target = steps[names.TARGET]
    assert isinstance(target, TargetStep)
    found: dict[tuple[object, ...], tuple[list[int], int, int]] = {}
    for length in _lengths(context, list(steps.values())):
        for place, (program, models) in enumerate(_rounds(length, target, rounds)):
            sizes = [tuple(steps[model].sizes) for model in models]
            work = [sum(size[i] for size in sizes) for i in _BY]
            found.setdefault((program, *sizes), (work, length, place))
    for _, length, place in sorted(found.values(), reverse=True):
        program, _ = next(islice(_rounds(length, target, rounds), place, None))
        programs[program].run()
    return len(found)


def _rounds(length: int, step: TargetStep, rounds: Rounds) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lay out every round of a sequence of `length` tokens; yield its program, and the models whose sizes it has."""
    yield from rounds(length, step)
    step.begin_warmup(length)
    yield names.DECODE, (names.TARGET,)
    assert step.buckets is not None
    for size in reversed(step.buckets.batch):
        if length - 1 + size <= step.largest_view:
            step.begin_warmup_batch(length, size, rows=False)
            yield names.DECODE, (names.TARGET,)
        if size <= step.most_rows:
            step.begin_warmup_batch(length, size, rows=True)
            yield names.DECODE, (names.TARGET,)


def _lengths(context: int, steps: Sequence[Step]) -> list[int]:
    """Return lengths, descending, that cover each combination of views: those about the ends of buckets."""
    lengths = {context}
    for step in steps:
        assert step.buckets is not None, "what is recorded has buckets"
        added = max(step.buckets.new[-1], *step.buckets.batch, 0) + step.reach + 1
        for view in step.buckets.view:
            lengths.update(range(max(view - added, 1), min(view + 2, context + 1)))
    return sorted(lengths, reverse=True)
