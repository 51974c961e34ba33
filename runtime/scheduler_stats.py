"""Statistics of all requests of a scheduler."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made, and the requests that wait and run now."""

    submitted: int = 0
    refused: int = 0  # because too many were waiting
    finished: int = 0  # whatever the reason
    failed: int = 0  # by an error
    waiting: int = 0
    running: int = 0
    rounds: int = 0
    prompt_tokens: int = 0  # of all requests that began
    reused_tokens: int = 0  # of prompts of requests that are over, not computed again
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    busy_ms: float = 0.0  # of passes and what belongs to them
    longest_round_ms: float = 0.0
    queued_ms: float = 0.0  # summed over requests that began
    ttft_ms: float = 0.0  # summed over requests that have tokens, from their submission

    @property
    def tokens_per_verify(self) -> float:
        """New tokens / passes: of all requests that a pass served."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    def to_json(self) -> dict[str, object]:
        """All counts, with stable keys."""
        return asdict(self) | {"tokens_per_verify": self.tokens_per_verify}
