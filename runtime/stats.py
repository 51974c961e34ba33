"""Counts and times of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Protocol


@dataclass
class Stats:
    """Counts and wall-clock times of one generation, or of a run of several sequences, all together.

    A round is one target pass that commits tokens, of all sequences of a run; a prefill pass is one that only fills the
    cache. What only a run counts is 0 for one generation.
    """

    prompt_tokens: int = 0
    resumed_tokens: int = 0  # that the request had given before, and continued after
    queued_ms: float = 0.0  # from the submission of a request to the first work on it
    reused_tokens: int = 0  # of the sequence so far, not computed again
    cached_tokens: int = 0  # of those, copied from the prefix cache
    new_tokens: int = 0
    prefill_passes: int = 0
    rounds: int = 0
    plain_rounds: int = 0  # of those, rounds decoded plainly because drafting did not pay
    drafted: int = 0  # tokens proposed and evaluated by the target
    left_out: int = 0  # tokens proposed, and not evaluated: not worth what verifying them costs
    accepted: int = 0
    partial_mode: str = "off"  # how steps after a long context were verified: off, lossless, lossy
    partial_rounds: int = 0  # passes over the partial KV cache
    partial_ms: float = 0.0  # of those passes, and the drafts for them
    refreshes: int = 0  # times that it was filled from the full one
    retrieved: int = 0  # blocks that were fetched for each key head, the last time
    tentative: int = 0  # tokens of those passes that had to be confirmed
    agreed: int = 0  # of those, confirmed
    retracted: int = 0  # of those, taken back as they or one before differed; the others were never looked at
    parted: int = 0  # times that some were
    rounds_by_accepted: list[int] = field(default_factory=list)  # rounds with a draft, by how much of it was accepted
    first_span: int = 0  # tokens committed by the first round
    ttft_ms: float = 0.0  # from the first work on the encoded prompt to the first committed token
    total_ms: float = 0.0  # to the last one, the caller's time between spans left out (a device may work on)
    engine_ms: float = 0.0  # inside engine calls, all passes
    stage_ms: dict[str, float] = field(default_factory=dict)
    # Of a run of several sequences.
    sequences: int = 1
    most_alive: int = 0  # at once
    state_ms: float = 0.0  # laying out steps and the bookkeeping of slots, all models
    kv_bytes: int = 0  # of committed slots, the most at once of each model
    bytes_copied: int = 0  # of slots
    kv_operations: dict[str, int] = field(default_factory=dict)
    """Slots of all models' own KV caches by what was done to them: `prefix`, copied to another row; `accepted`, nodes
    moved together; `compacted`, moved over dead ones; `cut_off`, dropped from a sequence's end. Debug logs say each."""
    compactions: int = 0  # times that live slots were moved over dead ones

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens / drafted tokens evaluated; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def note_accepted(self, count: int) -> None:
        """A round with a draft accepted `count` of its tokens."""
        by = self.rounds_by_accepted
        if count >= len(by):
            by += [0] * (count + 1 - len(by))
        by[count] += 1

    @property
    def acceptance_by_depth(self) -> list[float]:
        """At index d, the share of rounds with a draft that accepted more than d of its tokens."""
        by = self.rounds_by_accepted
        return [sum(by[depth:]) / sum(by) for depth in range(1, len(by))]

    @property
    def agreement(self) -> float | None:
        """Share of tokens that passes over the partial cache gave as those over the full one, where all before them
        agreed; lossless mode knows it."""
        return self.agreed / (self.agreed + self.parted) if self.agreed + self.parted else None

    @property
    def tokens_per_verify(self) -> float:
        """Committed tokens / target passes that commit, the extra token included."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first span, by wall clock from its commit; 0 where there are none."""
        seconds = (self.total_ms - self.ttft_ms) / 1000
        return (
            (self.new_tokens - self.first_span) / seconds if seconds > 0 and self.new_tokens > self.first_span else 0.0
        )

    @property
    def tokens_per_second(self) -> float:
        """New tokens, of all sequences, by wall clock from the first pass to the last."""
        return 1000 * self.new_tokens / self.total_ms if self.total_ms else 0.0

    def to_json(self) -> dict[str, object]:
        """All fields and rates, with stable keys."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_depth": self.acceptance_by_depth,
            "agreement": self.agreement,
            "tokens_per_verify": self.tokens_per_verify,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


class Stopwatch:
    """Adds up the milliseconds of `with` blocks."""

    def __init__(self) -> None:
        self.ms = self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ms += 1000 * (perf_counter() - self._began)


class StageTimes(Protocol):
    """Statistics that a clock can fill."""

    engine_ms: float
    stage_ms: dict[str, float]


class Stages(Protocol):
    """An object with stages whose times add up: a program, or a drafter on the host."""

    @property
    def stage_names(self) -> tuple[str, ...]: ...

    @property
    def is_engine(self) -> tuple[bool, ...]: ...

    nanoseconds: list[int]


class StageClock:
    """Stage times of some programs since the clock was made."""

    def __init__(self, programs: Sequence[Stages]) -> None:
        self._start = [(program, list(program.nanoseconds)) for program in programs]

    def fill(self, stats: StageTimes) -> None:
        """Write milliseconds by stage name, and those of engines, into `stats`."""
        for program, before in self._start:
            for name, engine, then, now in zip(
                program.stage_names, program.is_engine, before, program.nanoseconds, strict=True
            ):
                spent = (now - then) / 1e6
                stats.stage_ms[name] = stats.stage_ms.get(name, 0.0) + spent
                stats.engine_ms += spent if engine else 0.0
