"""Held-out text: the files of a standard library that the model did not learn from, one after another."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer

from outrider.plans.errors import RequestError
from outrider.tools.lab.reference.corpus import SourceFile, listed_hashes, read_standard_library


def held_out_files(checkpoint: Path, library: Path | None) -> list[SourceFile]:
    """The held-out side of the split, in an order that never changes.

    Files whose very text is on the training side of the `corpus.txt.gz` beside the checkpoint are left out. Raises
    `RequestError` where none is left.
    """
    listed = checkpoint.parent / "corpus.txt.gz"
    learned = listed_hashes(listed, held_out=False) if listed.is_file() else set()
    files = [file for file in read_standard_library(library) if file.held_out and file.sha256 not in learned]
    if not files:
        where = library or "this Python's standard library"
        raise RequestError(f"{where} has no held-out file; name another standard library with --library.")
    random.Random(0).shuffle(files)
    return files


def documents(
    tokenizer: Tokenizer, files: Sequence[SourceFile], end: Sequence[int], count: int, length: int
) -> list[list[int]]:
    """`count` documents of `length` tokens: whole files, each closed by `end`, from evenly spaced places on.

    What is after the last file is the first one, so documents overlap where there is less text than they ask for.
    Raises `RequestError` where one document would repeat itself.
    """
    stream = [token for e in tokenizer.encode_batch([f.text for f in files]) for token in (*e.ids, *end)]
    if length > len(stream):
        raise RequestError(
            f"--lengths has {length}; the held-out files have {len(stream)} tokens in all; pass shorter ones."
        )
    starts = [place * len(stream) // count for place in range(count)]
    return [(stream[start:] + stream[:start])[:length] for start in starts]


class Lines:
    """The lines of all files, one file after another, and how many tokens lie before each."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[SourceFile]) -> None:
        self._lines = [line for file in files for line in file.text.rstrip("\n").split("\n")]
        text = "\n".join(self._lines)
        ends = [end for _, end in tokenizer.encode(text).offsets]
        starts = accumulate((len(line) + 1 for line in self._lines), initial=0)
        self._before = [bisect_right(ends, start) for start in starts]

    def stretch(self, tokens: int, rng: random.Random) -> tuple[list[str], list[int]]:
        """Some lines of at least `tokens` tokens, from a random one on, and how many tokens lie before each of them.

        Raises `RequestError` where there are not so many.
        """
        last = bisect_right(self._before, self._before[-1] - tokens) - 1
        if last < 0:
            raise RequestError(
                f"--lengths asks for {tokens} tokens; the held-out files have {self._before[-1]} in all."
            )
        first = rng.randrange(last + 1)
        until = bisect_left(self._before, self._before[first] + tokens)
        return self._lines[first:until], [before - self._before[first] for before in self._before[first:until]]
