"""Random passes over texts, as a step loop lays them out for states that recur: chunks, drafts, cuts, company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Integers = NDArray[np.int64]


@dataclass
class Pass:
    """A pass: rows of its tokens `[N, ...]`, and what ops of states read. `true` maps the tokens that belong to a text
    to its number and their place in it; the others are drafts that are rejected."""

    rows: NDArray[Any]
    parent: _Integers
    branch: _Integers
    replay: _Integers
    replays: _Integers
    fold: _Integers
    true: dict[int, tuple[int, int]]

    @property
    def path(self) -> tuple[_Integers, _Integers]:
        return self.parent, self.branch

    @property
    def kept(self) -> tuple[_Integers, _Integers, _Integers]:
        return self.replay, self.replays, self.fold


def passes(rng: np.random.Generator, texts: Sequence[NDArray[Any]], log: int) -> Iterator[Pass]:
    """Yield passes until all `texts` were fed, text b as branch b: each feeds some texts a chunk, then a random tree,
    whose true path is the text's next tokens. Of those that were accepted, some are cut off and fed again. A branch
    logs up to `log` records."""
    fed = [0] * len(texts)  # tokens that are in a branch's state or among its accepted records
    accepted: list[list[int]] = [[] for _ in texts]  # records of the last pass
    while any(have < len(text) for have, text in zip(fed, texts, strict=True)):
        rows, parent, branch, true = list[NDArray[Any]](), list[int](), list[int](), dict[int, tuple[int, int]]()
        replay, (replays, fold) = np.zeros((len(texts), log), np.int64), np.zeros((2, len(texts)), np.int64)
        for number, text in enumerate(texts):
            if fed[number] == len(text) or rng.random() < 0.3:
                continue
            cut = int(rng.integers(0, len(accepted[number]) + 1)) if rng.random() < 0.3 else 0
            fed[number] -= cut
            accepted[number] = accepted[number][: len(accepted[number]) - cut]
            replay[number, : len(accepted[number])], replays[number] = accepted[number], len(accepted[number])
            start, first = fed[number], len(rows)
            chunk = int(rng.integers(1, min(12, len(text) - start) + 1))
            fold[number] = chunk - 1
            for place in range(start, start + chunk):
                parent.append(len(rows) - 1 if place > start else -1)
                true[len(rows)] = number, place
                rows.append(text[place])
            tip = last_true = len(rows) - 1
            for _ in range(int(rng.integers(0, log))):
                place = true[last_true][1] + 1
                hit = place < len(text) and rng.random() < 0.5
                parent.append(last_true if hit else int(rng.integers(tip, len(rows))))
                if hit:
                    last_true = len(rows)
                    true[last_true] = number, place
                rows.append(text[place] if hit else rng.standard_normal(text[0].shape).astype(text.dtype))
            branch += [number] * (len(rows) - first)
            mine = [token for token in range(tip, len(rows)) if token in true]
            accepted[number] = [token - tip for token in mine]
            fed[number] = start + chunk - 1 + len(mine)
        if rows:
            yield Pass(np.array(rows), np.array(parent), np.array(branch), replay, replays, fold, true)
