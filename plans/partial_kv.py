"""Partial KV for long contexts: its settings, and how its partial KV cache is laid out."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from outrider.plans.buffers import LARGEST_SIZE, Strict

Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]

PartialBudget = Annotated[int, Field(ge=1, le=LARGEST_SIZE)] | Literal["auto"]
Reduce = Literal["max", "mean", "last"]
PartialMode = Literal["lossless", "lossy", "off"]
PARTIAL_MODES: tuple[PartialMode, ...] = get_args(PartialMode)


class PartialKv(Strict):
    """A partial KV cache, sink | retrieval | window | buffer, read after a long context instead of the full one.

    The buffer has room for `n_spec_tokens_buf` tokens after the window; the KV cache is used where more than
    `partial_threshold` tokens have KV, and filled anew after at most `full_refresh_interval` steps. `mode` and
    `budget`, blocks that are retrieved (None: all that there is room for), are those of requests that do not say
    theirs.
    """

    block_size: Size = 16
    n_sink_blocks: Count = 2
    n_retrieval_blocks: Size = 256
    n_window_blocks: Size = 8
    n_spec_tokens_buf: Size = 128
    partial_threshold: Count = 4096
    full_refresh_interval: Size = 32
    reduction: Reduce = "max"
    most_queries: Size = 8
    budget: PartialBudget | None = None
    mode: PartialMode = "lossless"

    @property
    def sink(self) -> int:
        """Tokens of the sink."""
        return self.n_sink_blocks * self.block_size

    def front(self, budget: int) -> int:
        """Tokens in front of the buffer that retrieves `budget` blocks, the window's beginning on the grid left out."""
        return (self.n_sink_blocks + budget + self.n_window_blocks) * self.block_size

    @property
    def total_budget(self) -> int:
        """Tokens of sink, retrieval, window and buffer."""
        return self.front(self.n_retrieval_blocks) + self.n_spec_tokens_buf

    @property
    def largest(self) -> int:
        """Most slots that may be in use: the window begins on the grid of blocks, and may hold most of one more."""
        return self.total_budget + self.block_size - 1

    def capacity(self, view_bucket: int) -> int:
        """Slots of the KV cache, with a bucket of headroom."""
        return (-(-self.largest // view_bucket) + 1) * view_bucket

    def candidates(self, covered: int) -> int:
        """Blocks between sink and window of `covered` tokens."""
        return max(0, covered // self.block_size - self.n_sink_blocks - self.n_window_blocks)

    def filled(self, covered: int, budget: int) -> int:
        """Slots in front of the buffer, filled from `covered` tokens with `budget` blocks."""
        candidates = self.candidates(covered)
        return covered - max(0, candidates - budget) * self.block_size

    def least_budget(self, window: int) -> int:
        """Fewest blocks to retrieve where layers see the last `window` tokens alone, which must lie in one piece."""
        before = window - 1 - self.n_window_blocks * self.block_size  # without the token that looks
        return max(1, -(-before // self.block_size))

    def summaries(self, capacity: int) -> int:
        """Blocks of a full KV cache that may ever have a summary."""
        return max(1, self.candidates(capacity))

    def pays(self, covered: int, budget: int) -> bool:
        """Whether a sequence of this length is long enough for a partial KV cache."""
        return covered > self.partial_threshold and covered > self.front(budget)
