"""Statistics of all requests of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made, and the requests that wait and run now."""

    submitted: int = 0
    refused: int = 0  # because too many were waiting
    finished: int = 0  # for any reason
    failed: int = 0  # by an error
    waiting: int = 0
    running: int = 0
    rounds: int = 0
    prompt_tokens: int = 0  # of all requests that began
    reused_tokens: int = 0  # of prompts of requests that are over, not computed again
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_rounds: int = 0  # rounds of requests that are over in which the target verified a draft
    accepted_by_depth: tuple[int, ...] = ()  # at index d, how many of those accepted more than d tokens
    kv_slots: int = 0  # of the target's KV cache, all rows
    kv_used: int = 0  # of those, that running requests have
    kv_reserved: int = 0  # of those, that running requests may come to have: what a newcomer must fit beside
    busy_ms: float = 0.0  # of passes and what belongs to them
    longest_round_ms: float = 0.0
    queued_ms: float = 0.0  # summed over requests that began
    ttft_ms: float = 0.0  # summed over requests that have tokens, from their submission

    @property
    def tokens_per_verify(self) -> float:
        """New tokens / passes: of all requests that a pass served."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def kv_usage(self) -> float:
        """Used / all slots of the target's KV cache."""
        return self.kv_used / self.kv_slots if self.kv_slots else 0.0

    @property
    def kv_reservation(self) -> float:
        """Reserved / all slots of the target's KV cache."""
        return self.kv_reserved / self.kv_slots if self.kv_slots else 0.0

    def note_drafts(self, rounds_by_accepted: Sequence[int]) -> None:
        """Count the rounds of a request that had a draft, given by how much of it was accepted."""
        self.draft_rounds += sum(rounds_by_accepted)
        deeper = [sum(rounds_by_accepted[depth:]) for depth in range(1, len(rounds_by_accepted))]
        pairs = zip_longest(self.accepted_by_depth, deeper, fillvalue=0)
        self.accepted_by_depth = tuple(before + more for before, more in pairs)

    def to_json(self) -> dict[str, object]:
        """All counts, with stable keys."""
        return asdict(self) | {"tokens_per_verify": self.tokens_per_verify}
