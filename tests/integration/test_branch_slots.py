"""Which slots each query of a run of branches sees, against the definition in plain Python.

The oracle keeps what every slot holds by following the moves alone: what passes append, gather, copy and compact.
It never looks at the slot tables. A query must then see exactly the prefix, what its branch has said before,
its own chain or path of drafted nodes, and itself: each once, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import Runtime
from outrider.plans import names
from outrider.runtime.execution.step import NOBODY
from outrider.runtime.kv.memory import KvMemory
from outrider.runtime.step_loop import StepLoop
from tests.integration.test_branches import BRANCH

LAYOUTS = {"in-one-sequence": ("in-one-sequence", False), "batching": ("batching", False), "padded": ("batching", True)}


class Oracle:
    """What each slot of the target's KV cache holds: (whose, place in the sequence), where anything that stays."""

    def __init__(self, engine: StepLoop) -> None:
        self.engine, self.passes, self.compactions = engine, 0, 0
        self.met: list[Any] = []  # branches: no two have one identity
        self.slots: list[list[Any]] = [[] for _ in engine.cache.tables]
        step, buffers = engine.target_step, engine.buffers
        self.bias = buffers.array(names.TARGET, names.ATTN_BIAS).reshape(-1)
        self.kept = buffers.array(names.TARGET, names.KEPT_INDICES)
        self.kept_count = buffers.array(names.TARGET, names.KEPT_COUNT)
        self.move_to = buffers.array(names.TARGET, names.MOVE_TO)
        self.step = step
        self.wrap(engine.programs[names.PREFILL], self.prefilled)
        for name, program in engine.programs.items():
            if name in (names.DECODE, names.VERIFY) or name.startswith("speculate."):
                self.wrap(program, lambda gathers=name != names.DECODE: self.verified(gathers=gathers))
        self.wrap(engine.programs[names.compact(names.TARGET)], self.compacted)
        for row, kv in enumerate(engine.cache._kv[1:], 1):
            kv.copy = partial(self.copied, row, kv.copy)

    def wrap(self, program: Any, then: Callable[[], None]) -> None:
        run = program.run

        def both() -> None:
            run()
            then()

        program.run = both

    def put(self, row: int, slot: int, what: Any) -> None:
        line = self.slots[row]
        line.extend([None] * (slot + 1 - len(line)))
        line[slot] = what

    def place(self, index: int) -> tuple[int, int]:
        """Row and slot that the pass appends a token of the step to."""
        rows = self.step.sizes[names.SYMBOLS.index(names.ROWS)]
        row = int(np.searchsorted(self.step.row_splits[1 : rows + 1], index, side="right"))
        return row, int(self.step.past_length[row] + index - self.step.row_splits[row])

    def prefilled(self) -> None:
        if self.engine.sequences:  # parts of prompts
            self.verified(gathers=False)
            return
        for index in range(self.step.new_tokens):
            row, slot = self.place(index)
            assert row == 0
            self.put(row, slot, ("prefix", int(self.step.positions[index])))

    def verified(self, *, gathers: bool) -> None:
        self.passes += 1
        step = self.step
        n, prefix = step.new_tokens, len(self.engine.prefix)
        owner = {each.number: each for each in self.engine.sequences}
        self.met += owner.values()
        for index in range(n):  # all rows are there before anybody looks
            self.put(*self.place(index), ("new", index))
        rows, _, places, view = (
            step.sizes[names.SYMBOLS.index(s)] for s in (names.ROWS, names.NEW, names.PLACES, names.VIEW)
        )
        bias = self.bias[: rows * places * view].reshape(rows, places, view)
        for index in range(n):
            row, slot = self.place(index)
            number = int(step.branch[index])
            seen = np.flatnonzero(bias[row, slot - step.past_length[row]] == 0).tolist()
            holds = [self.slots[row][s] for s in seen]
            assert len(set(holds)) == len(holds)
            if number == NOBODY:
                assert ("new", index) in holds
                continue
            line, at = [], index
            while at >= 0:
                line.append(("new", at))
                at = int(step.parent[at])
            branch = owner[number]
            own = [(id(branch), place) for place in range(branch.computed - prefix)]
            assert set(holds) == {("prefix", p) for p in range(prefix)} | set(own) | set(line)
        kept = self.kept[: int(self.kept_count[0])].tolist() if gathers else list(range(n))
        following = {row: int(step.past_length[row]) for row in range(rows)}
        taken: dict[int, int] = {}
        for index in kept:
            row, _ = self.place(index)
            number = int(step.branch[index])
            what: Any = None
            if number != NOBODY:
                branch = owner[number]
                place = branch.computed - prefix + taken.get(number, 0)
                assert int(step.positions[index]) == prefix + place
                taken[number] = taken.get(number, 0) + 1
                what = (id(branch), place)
            self.slots[row][following[row]] = what
            following[row] += 1

    def compacted(self) -> None:
        self.compactions += 1
        rows = self.step.sizes[names.SYMBOLS.index(names.ROWS)]
        row = rows - 1
        start, to = int(self.step.past_length[row]), int(self.move_to[row])
        for offset, source in enumerate(self.kept[: int(self.kept_count[0])].tolist()):
            self.slots[row][to + offset] = self.slots[row][start + source]

    def copied(self, row: int, copy: Any, to: int, source: KvMemory, first: int, count: int) -> None:
        """The prefix, which lies in row 0."""
        assert (to, first, source) == (0, 0, self.engine.cache._kv[0])
        copy(to, source, first, count)
        for slot in range(count):
            self.put(row, slot, self.slots[0][slot])


@pytest.fixture
def watched(branch_plan):
    """A runtime for each layout, and the oracle that watches its runs."""
    found = {}
    for name, (_, padded) in LAYOUTS.items():
        oracles: list[Oracle] = []

        class Watched(StepLoop):
            def __init__(
                self, *arguments: Any, padded: bool = padded, oracles: list[Oracle] = oracles, **options: Any
            ) -> None:
                super().__init__(*arguments, padded=padded, **options)
                oracles.append(Oracle(self))

        found[name] = Runtime.load(branch_plan, threads=1), Watched, oracles
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.lists(st.integers(1, 299), min_size=1, max_size=40),
    branches=st.lists(BRANCH, min_size=1, max_size=10),
    parallel=st.integers(1, 8),
)
def test_a_query_sees_what_the_definition_says(layout, watched, monkeypatch, prefix, branches, parallel) -> None:
    runtime, runner, oracles = watched[layout]
    with monkeypatch.context() as patch:
        patch.setattr("outrider.runtime.step_loop_pool.StepLoop", runner)
        runtime.engines.idle.clear()
        mode, _ = LAYOUTS[layout]
        found = runtime.generate_branches(prefix, branches, mode=mode, max_parallel=parallel, ignore_eos=True)
    assert len(found) == len(branches)
    assert oracles[-1].passes > 0


@pytest.mark.parametrize("layout", ["in-one-sequence", "padded"])
def test_and_still_does_when_rows_are_moved(layout, watched, monkeypatch) -> None:
    runtime, runner, oracles = watched[layout]
    options = {"drafter": "bushy", "predicted_tokens": 1}  # they begin in this order, each when another is half through
    branches = [{"prompt": [7 + i] * 5, "max_new_tokens": 100 if i else 50, **options} for i in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr("outrider.runtime.step_loop_pool.StepLoop", runner)
        runtime.engines.idle.clear()
        runtime.generate_branches([5] * 20, branches, mode=LAYOUTS[layout][0], max_parallel=2, ignore_eos=True)
    assert oracles[-1].compactions
