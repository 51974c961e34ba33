"""The contract of every engine under comparison: requests and answers."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

OURS, TRANSFORMERS, GENAI, OPENVINO, LLAMA_CPP = ENGINES = (
    "outrider", "transformers", "onnxruntime-genai", "openvino-genai", "llama-cpp-python"
)  # fmt: skip


PLAIN = "plain"
"""What every peer calls decoding without speculation."""


@dataclass(frozen=True)
class Settings:
    """Folders, absolute, and the number of threads. `context`: tokens of the longest prompt and what is generated.

    `converted` and `converted_draft` are in the engine's own format; `draft_fault` says why a draft model is not.
    """

    checkpoint: str
    plan: str
    draft: str | None
    threads: int
    context: int
    converted: str | None = None
    converted_draft: str | None = None
    draft_fault: str = ""


@dataclass(frozen=True)
class Generated:
    """Greedy token ids; how many of them came first, when, and when all had come, from the start of the prompt's work.

    Times are milliseconds of wall clock.
    """

    ids: list[int]
    first: int
    ttft_ms: float
    total_ms: float


class Engine(Protocol):
    """One way to run the checkpoint. `missing` says of each mode that it cannot run the reason."""

    version: str
    modes: tuple[str, ...]
    missing: dict[str, str]

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        """Exactly `new` greedy tokens after the prompt `ids`, end tokens among them; nothing is kept from before."""


class Clock:
    """Times one generation, from when it is made."""

    def __init__(self) -> None:
        self._first, self._ttft_ms, self._started = 0, 0.0, perf_counter()

    def count(self, tokens: int) -> None:
        """So many tokens have come now."""
        if not self._first:
            self._first, self._ttft_ms = tokens, 1000 * (perf_counter() - self._started)

    def done(self) -> float:
        """Milliseconds since the start."""
        return 1000 * (perf_counter() - self._started)

    def generated(self, ids: list[int], total_ms: float) -> Generated:
        return Generated(ids, self._first, self._ttft_ms, total_ms)
