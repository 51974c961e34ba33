"""A batch in one process: blocks one after another, the next begun while the last requests of one still run."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from outrider.runtime.batch.answering import Answering, BatchAnswer
from outrider.runtime.batch.folder import BatchFolder
from outrider.runtime.batch.requests import BatchRequest


@dataclass(frozen=True)
class FinishedRequests:
    """Finished requests, their new tokens, and when work on them began (`time.time()`)."""

    requests: int
    new_tokens: int
    began: float


def run_blocks(
    answering: Answering, folder: BatchFolder, blocks: Mapping[int, Sequence[BatchRequest]]
) -> Generator[BatchAnswer, None, None]:
    """Answer blocks by their numbers, and write each to the folder once it is whole; yields answers as they come.

    Raises OSError where the folder cannot be written, and what `Answering.answer` raises.
    """
    requests = list(chain.from_iterable(blocks.values()))
    block_of = [number for number, block in blocks.items() for _ in block]
    first = {number: start for start, number in reversed(list(enumerate(block_of)))}
    lines = dict[int, bytes]()
    left = {number: len(block) for number, block in blocks.items()}
    for answered in answering.answer(requests):
        block = block_of[answered.number]
        lines[answered.number] = answered.line
        left[block] -= 1
        if not left[block]:
            start = first[block]
            folder.write(block, [lines.pop(place) for place in range(start, start + len(blocks[block]))])
        yield answered
