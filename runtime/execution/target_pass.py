"""Passes of a session's target over one of its arenas: what is pending, a draft behind it, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from plans import names
from runtime.drafters import Drafter
from runtime.execution.program import Program
from runtime.execution.step import TargetStep
from runtime.kv.slots import BRANCH, SlotTable

TREE = 0  # of a session's step, which has one


class TargetArena:
    """The rows of a sequence, in order: all of them. `known` counts the tokens that have some, `room` those to come."""

    def __init__(self, slots: SlotTable, most: int) -> None:
        self.slots, self._most_rows = slots, most

    @property
    def known(self) -> int:
        return self.slots.length

    @property
    def room(self) -> int:
        return self._most_rows - self.slots.length

    def program(self, name: str) -> str:
        """The program `name` over this arena."""
        return name


@dataclass(frozen=True)
class Passed:
    """A pass that has run: `pending` tokens from `start` on were fed, the last one the tip.

    `chosen` are the target's choices behind it, as many as there was room for of the `count` that it made. `ms` is what
    drafting and the pass took.
    """

    start: int
    pending: int
    program: Program
    chosen: list[int]
    count: int
    ms: float

    def rows(self, tokens: int) -> int:
        """Rows that stay where so many of the chosen tokens do: the last of them has none."""
        return self.pending + tokens - 1


class TargetPasses:
    """Runs the target's programs on the step, and counts: each pass overwrites what the one before left there."""

    def __init__(self, step: TargetStep, programs: Mapping[str, Program]) -> None:
        self.step, self._programs = step, programs
        self.count = 0
        self.committed = 0  # tokens that the last `decode` has chosen, whether there was room for them or not

    def run(self, name: str) -> Program:
        """Run a program of the target on the step as it is laid out."""
        self.count += 1
        program = self._programs[name]
        program.run()
        return program

    def time_round(self, arena: TargetArena, tip: int, chain: Sequence[int], name: str) -> float:
        """Milliseconds of a program over the tip and a `chain` of drafted tokens behind it; nothing is committed."""
        step, slots = self.step, arena.slots
        step.begin_target(slots.length, slots.next_position(), [tip], BRANCH, logits=True)
        step.token_ids[1 : 1 + len(chain)] = chain
        step.parent[1 : 1 + len(chain)] = range(len(chain))
        step.append_nodes(len(chain))
        began = perf_counter()
        self.run(arena.program(name))
        return 1000 * (perf_counter() - began)

    def decode(self, arena: TargetArena, tokens: list[int], drafter: Drafter | None, room: int) -> Passed:
        """Feed what lacks rows, with a draft behind it, where at most `room` tokens may come.

        Rows are not committed, and a `drafter` has not followed. One that does not draft has absorbed the last pass.
        """
        began, step, slots, start = perf_counter(), self.step, arena.slots, arena.known
        pending = tokens[start:]
        step.begin_target(slots.length, slots.next_position(), pending, BRANCH, logits=True)
        name = names.DECODE
        if drafter is not None:
            limit = min(step.max_nodes, room - 1)
            speculate = drafter.begin(tokens, step, limit) if limit > 0 else None
            if speculate is None:
                drafter.absorb(tokens)
            else:
                name = speculate
        program = self.run(arena.program(name))
        assert program.tokens is not None
        count = 1 if program.counts is None else int(program.counts[TREE])
        self.committed = count
        chosen: list[int] = program.tokens[: min(count, room)].tolist()
        return Passed(start, len(pending), program, chosen, count, 1000 * (perf_counter() - began))
