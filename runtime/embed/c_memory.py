"""Texts, tokens and log-probabilities in C's memory: what C gives is read, and what it reads is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.runtime.embed.handles import InvalidArgumentError
from outrider.runtime.generation import FinishReason, Generation
from outrider.runtime.sampling import TokenLogprob

FINISHED = {FinishReason.STOP: 0, FinishReason.LENGTH: 1, FinishReason.CANCELLED: 2, FinishReason.DEADLINE: 3}


@dataclass(frozen=True)
class Bytes:
    """A text for C: UTF-8 with a zero after it, and how long it is without."""

    data: Any
    length: int

    def give(self, data: Any, length: Any) -> None:
        """Write where it is, and how long, to C's variables."""
        data[0], length[0] = self.data, self.length


@dataclass(frozen=True)
class Struct:
    """A struct of `outrider.h`, and the memory that it points to."""

    struct: Any
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """The result of a generation."""

    tokens: Any
    count: int
    text: Bytes
    logprobs: Struct
    finish_reason: int
    seed: int
    stats: Bytes


class CMemory:
    """Reads what C gives, and makes what C reads, which lives as long as the object that Python has of it."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi

    def read_text(self, data: Any, length: int, name: str) -> str:
        """Raises InvalidArgumentError, which calls it `name`, for bytes that are not UTF-8."""
        given = bytes(self._ffi.buffer(data, length)) if length else b""
        try:
            return given.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"{name} is not UTF-8: {error.reason} at byte {error.start} of {len(given)}"
            ) from None

    def read_path(self, data: Any, length: int, name: str, repair: str) -> Path:
        path = self.read_text(data, length, name)
        if not path or "\0" in path:
            raise InvalidArgumentError(f"{name} is no path; {repair}")
        return Path(path)

    def read_ids(self, data: Any, count: int) -> list[int]:
        """Numbers of an int64_t array."""
        return list(self._ffi.unpack(data, count)) if count else []

    def ids(self, token_ids: Sequence[int]) -> Any:
        """An int64_t array."""
        return self._ffi.new("int64_t[]", token_ids)

    def text(self, text: str) -> Bytes:
        data = text.encode("utf-8", "replace")
        return Bytes(self._ffi.new("char[]", data), len(data))

    def logprobs(self, given: Sequence[TokenLogprob]) -> Struct:
        """An outrider_logprobs; each token has as many of the likeliest beside it."""
        new, top = self._ffi.new, len(given[0].top) if given else 0
        likeliest = [pair for each in given for pair in each.top]
        chosen = new("double[]", [each.logprob for each in given])
        tokens, beside = new("int64_t[]", [pair[0] for pair in likeliest]), new("double[]", [p[1] for p in likeliest])
        made = new("outrider_logprobs *", [len(given), chosen, top, tokens, beside])
        return Struct(made, (chosen, tokens, beside))

    def span(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprob], over: bool) -> Struct:
        ids, given, likely = self.ids(token_ids), self.text(text), self.logprobs(logprobs)
        fields = [ids, len(token_ids), given.data, given.length, likely.struct, int(over)]
        return Struct(self._ffi.new("outrider_span *", fields), (ids, given, likely))

    def result(self, made: Generation) -> Result:
        return Result(
            tokens=self.ids(made.token_ids),
            count=len(made.token_ids),
            text=self.text(made.text),
            logprobs=self.logprobs(made.logprobs),
            finish_reason=FINISHED[made.finish_reason],
            seed=made.seed,
            stats=self.text(json.dumps(made.stats.to_json())),
        )
