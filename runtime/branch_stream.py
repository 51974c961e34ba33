"""What a run of branches gives back: spans of all of them as they are committed, the whole at the end, and its cost."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter

from plans.errors import RequestError
from runtime.generation import Generation, Span


@dataclass(frozen=True)
class BranchSpan:
    """What one pass has committed of one branch, by its place among those asked for.

    With the last comes the `result`, or the `error` that this branch could not go on for, which a stream raises.
    """

    branch: int
    span: Span
    result: Generation | None = None
    error: RequestError | None = None


@dataclass
class BranchStats:
    """Counts and wall-clock times of one run. A round is one pass over all live branches; prefills fill the prefix."""

    branches: int = 0
    reused_tokens: int = 0  # of the prefix, whose rows an earlier run had left, or the prefix cache had
    cached_tokens: int = 0  # of those, copied from the prefix cache
    prefill_passes: int = 0
    rounds: int = 0
    new_tokens: int = 0
    most_alive: int = 0  # branches at once
    total_ms: float = 0.0  # the caller's time between spans left out
    engine_ms: float = 0.0  # inside engine calls, all passes of all models
    stage_ms: dict[str, float] = field(default_factory=dict)
    state_ms: float = 0.0  # laying out steps and the bookkeeping of slots, all models
    kv_bytes: int = 0  # of committed rows, the most at once of each model
    bytes_copied: int = 0  # of rows: prefixes, accepted nodes that were moved together, live rows over dead ones
    compactions: int = 0  # times that live rows were moved over dead ones

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all branches, by wall clock from the first pass to the last."""
        return 1000 * self.new_tokens / self.total_ms if self.total_ms else 0.0

    def to_json(self) -> dict[str, object]:
        """All fields and rates, with stable keys."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


class BranchStream:
    """Iterate for spans of all branches; `results` has the whole generations once iteration has ended.

    Closing it, or leaving it unfinished, ends the run.
    """

    def __init__(self, run: Generator[BranchSpan, None, None], stats: BranchStats) -> None:
        self._run, self.stats = run, stats
        self._found: dict[int, Generation] = {}
        self._ended = False
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[BranchSpan]:
        return self

    def __next__(self) -> BranchSpan:
        started = perf_counter()
        try:
            span = next(self._run)
        except StopIteration:
            self._ended = self._ended or len(self._found) == self.stats.branches
            raise
        except Exception as error:
            self._error = error
            raise
        finally:
            self.stats.total_ms += (perf_counter() - started) * 1000
        if span.result is not None:
            self._found[span.branch] = span.result
        return span

    def close(self) -> None:
        self._run.close()

    @property
    def results(self) -> list[Generation]:
        """The generations in the order asked for; runs them to their ends first, if need be."""
        for _ in self:
            pass
        if not self._ended:
            how = "failed" if self._error is not None else "was closed"
            raise RuntimeError(f"The stream {how} before all branches had ended; it has no results.") from self._error
        return [self._found[place] for place in sorted(self._found)]
