"""The recipe's section on partial KV, for contexts that are long."""

from __future__ import annotations

from pydantic import Field

from outrider.compiler.recipe_section import Section
from outrider.plans.buffers import LARGEST_SIZE
from outrider.plans.partial_kv import PartialBudget, PartialKv, PartialMode, Reduce


class PartialKvSection(Section):
    """A partial KV cache of a few blocks of a long context, in which most steps are verified."""

    enabled: bool = Field(False, description="whether the plan has one")
    block_size: int = Field(
        16, ge=1, le=256, description="tokens of a block: keys are summarised and fetched by blocks"
    )
    n_sink_blocks: int = Field(2, ge=0, le=LARGEST_SIZE, description="blocks of the very beginning, always kept")
    n_retrieval_blocks: int = Field(
        256,
        ge=1,
        le=LARGEST_SIZE,
        description="most blocks fetched from the middle, for each key head; layers with a sliding window keep the "
        "last ones instead, which must hold their window together with n_window_blocks",
    )
    n_window_blocks: int = Field(8, ge=1, le=LARGEST_SIZE, description="last blocks, always kept")
    n_spec_tokens_buf: int = Field(
        128,
        ge=2,
        le=255,
        description="tokens after the window: those of steps since the KV cache was filled, and drafts; one pass over "
        "the full KV cache takes them all, with logits",
    )
    partial_threshold: int = Field(
        4096, ge=0, le=LARGEST_SIZE, description="tokens of context up to which the full KV cache is used"
    )
    full_refresh_interval: int = Field(
        32, ge=1, le=LARGEST_SIZE, description="most steps between two passes over the full KV cache"
    )
    reduction: Reduce = Field("max", description="how scores of a block by several queries become one: max, mean, last")
    most_queries: int = Field(
        8, ge=1, le=256, description="accepted tokens, the last ones, whose queries choose blocks"
    )
    n_draft_window_tokens: int = Field(
        1024,
        ge=1,
        le=LARGEST_SIZE,
        description="tokens of a drafter's window, in plans of one branch: its KV cache keeps the sink and these",
    )
    budget: PartialBudget | None = Field(
        None,
        description="blocks fetched for requests that do not say how many: a number, auto, or as many as there is room "
        "for",
    )
    mode: PartialMode = Field(
        "lossless",
        description="of requests that do not say theirs: lossless, where tokens are confirmed over the full KV cache "
        "before they count; lossy, where they are not; off",
    )

    def settings(self) -> PartialKv | None:
        """Return the settings that a plan keeps; None where partial KV is not enabled."""
        return PartialKv(**self.model_dump(exclude={"enabled", "n_draft_window_tokens"})) if self.enabled else None

    def drafters_keep(self, context: int, branches: int) -> tuple[int, int]:
        """Return how many tokens of the beginning and of the end drafters' KV caches keep; 0 and 0 (all tokens) where
        partial KV is off, where the caches have room for the context, and in plans of several branches."""
        sink, window = self.n_sink_blocks * self.block_size, self.n_draft_window_tokens
        return (sink, window) if self.enabled and branches == 1 and sink + 2 * window < context else (0, 0)
