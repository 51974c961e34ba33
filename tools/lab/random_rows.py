"""Rows of random numbers in place of a prompt's own: for times at lengths that nobody wants to wait for."""

from __future__ import annotations

import numpy as np

from outrider.plans import names
from outrider.runtime.kv.memory import HostKv, KvMemory
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.prefix_cache.cache import PrefixCache


class RandomRows(TokenKv):
    """Rows of any sequence: what comes out behind them means nothing, but costs what it would."""

    def __init__(self) -> None:
        self._numbers = np.random.default_rng(0)

    def get(self, start: int, count: int, to: KvMemory, at: int) -> None:
        """Fill `count` slots of `to` from `at` on."""
        there = to.array(at, count)
        numbers = self._numbers.standard_normal(there.shape, np.float32).astype(there.dtype)
        to.copy(at, HostKv(numbers), 0, count)

    def insert(self, cache: PrefixCache, tokens: list[int]) -> None:
        """Let the target have such rows of `tokens`, as if they had been computed."""
        cache.insert(tokens, {names.TARGET: (len(tokens), self)})
