"""A draft model keeps the KV of accepted nodes: it is what feeding the tokens gives, and they are fed no more."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import Runtime, Session
from outrider.plans import names
from outrider.runtime.drafters.engine import EngineDrafter
from outrider.runtime.options.options import Options
from outrider.runtime.trace import Round

PROMPT = [(37 * i) % 299 + 1 for i in range(50)]  # several chunks
SAMPLINGS = (Options(), Options(temperature=1.0, seed=3))
ALWAYS = Options(ignore_eos=True, auto_disable=False)
Fed = tuple[int, int]  # tokens with KV, tokens after them


def drafter_of(session: Session, name: str) -> EngineDrafter:
    return session.loop.drafting.engine_drafters[name]


def kv_of(session: Session, name: str, length: int) -> NDArray[np.float32]:
    kv: NDArray[np.float32] = session.buffers.array(name, names.KV)[:, :, :, :length]
    return kv


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["chain", "bushy"])
def test_kept_indices_are_those_of_feeding_the_tokens(toy: Runtime, name: str, sampling: Options) -> None:
    """But for the last bits, which depend on how many tokens are computed at once."""
    session, fresh = toy.session(), toy.session()
    run = session.generate(PROMPT, drafter=name, max_new_tokens=80, **sampling, **ALWAYS)
    assert run.stats.accepted > 10
    length = drafter_of(session, name).cache.length
    assert length >= len(session.token_ids) - 3  # what the last draft accepted comes with the next
    fresh.generate(session.token_ids[:length], drafter=name, max_new_tokens=3, **ALWAYS)
    assert drafter_of(fresh, name).cache.length >= length
    np.testing.assert_allclose(kv_of(session, name, length), kv_of(fresh, name, length), atol=1e-5)
    np.testing.assert_array_equal(session.buffers.array(name, names.SLOT_POSITIONS)[0, :length], np.arange(length))
    assert (session.buffers.array(name, names.BIM)[0, :length] == 0).all()


def fed_and_lacking(session: Session, name: str, sampling: Options) -> tuple[list[Fed], list[Fed]]:
    """What each round fed the drafter, and what it left it to be fed by the next one."""
    drafter = drafter_of(session, name)
    step, program, last = drafter._step, session.programs[names.speculate(name)], [0, 0]
    run = program.run

    def noted() -> None:
        last[:] = int(step.past_length[0]), step.new_tokens
        run()

    program.run = noted  # type: ignore[method-assign]
    row = np.array([-1, 0, 1, 2, -1]) if name == "chain" else session.buffers.array(name, names.TREE_SLOTS)
    fed: list[Fed] = []
    lacking: list[Fed] = []

    def watch(seen: Round) -> None:
        if seen.nodes:
            path = [index for index, node in enumerate(seen.nodes, start=1) if node.accepted]
            without = sum(row[node] < 0 for node in path)
            fed.append((last[0], last[1]))
            lacking.append((sum(fed[-1]) + len(path) - without, without + 1))

    session.generate(PROMPT, drafter=name, max_new_tokens=80, on_round=watch, **sampling, **ALWAYS)
    program.run = run  # type: ignore[method-assign]
    return fed, lacking


@pytest.mark.parametrize("name", ["chain", "bushy"])
def test_a_draft_model_is_fed_the_tokens_it_lacks_and_no_other(toy: Runtime, name: str) -> None:
    """The tip; before it, the last accepted node where no level had run it."""
    counts: set[int] = set()
    for sampling in SAMPLINGS:
        fed, lacking = fed_and_lacking(toy.session(), name, sampling)
        assert fed[1:] == lacking[:-1]
        counts |= {tokens for _, tokens in fed[1:]}
    assert counts == {1, 2}


@pytest.mark.parametrize(
    ("row", "path", "kept"),
    [
        ([-1, 0, 3, -1], [1, 2, 3], [0, 3]),
        ([-1, 0, 1, 4], [2, 3], [1, 4]),
        ([-1, 2, 5], [1, 2], [2, 5]),
        ([-1, 0, 1, -1], [1], [0]),
        ([-1, 0, 4, -1], [1, 3], [0]),
        ([-1, -1], [1], []),
        ([-1], [], []),
    ],
)
def test_accepted_rows_are_moved_together_and_those_in_place_not_at_all(
    toy: Runtime, row: list[int], path: list[int], kept: list[int]
) -> None:
    session, start = toy.session(), 20
    rows, compact = drafter_of(session, "bushy")._tree_slots, session.programs[names.compact("bushy")]
    assert rows is not None
    session.buffers.array("bushy", names.TREE_SLOTS)[: len(row)] = row
    slots = session.buffers.array("bushy", names.KV)
    slots[:] = np.arange(slots.shape[3]).reshape(-1, 1)  # each slot holds its number
    before = compact.nanoseconds[0]
    assert rows.gather(start, np.array(path, np.int64)) == len(kept)
    expected = [*range(start), *(start + row for row in kept)]
    assert (slots[:, :, :, : len(expected)] == np.array(expected).reshape(-1, 1)).all()
    assert (compact.nanoseconds[0] > before) == (kept != list(range(len(kept))))
