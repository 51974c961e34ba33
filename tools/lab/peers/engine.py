"""The contract of every engine under comparison: requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol, get_args

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
        if not self._first:
            self._first, self._ttft_ms = tokens, 1000 * (perf_counter() - self._started)

    def done(self) -> float:
        return 1000 * (perf_counter() - self._started)

    def generated(self, ids: list[int], total_ms: float) -> Generated:
        return Generated(ids, self._first, self._ttft_ms, total_ms)


Precision = Literal["fp32", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def weights_section(precision: Precision) -> dict[str, object]:
    """Return what a recipe's target, or a drafter, has beside its checkpoint."""
    return {} if precision == "fp32" else {"weights": {"type": precision}}


def precision_of(section: Mapping[str, Any]) -> Precision:
    """Return the precision of the section of a target or draft model, in float32 engines, of a resolved recipe."""
    weights = section.get("weights")
    return "fp32" if weights is None else weights["type"]


def choose_end_token(generated: Mapping[int, int], vocab_size: int) -> int:
    """The last id of the vocabulary that was not `generated`: how often each was. Where all were, the rarest of them.

    onnxruntime-genai refuses ids outside of the vocabulary and ends wherever its end token comes; `min_length` forbids
    that token, and so changes what is generated. An id that is not generated changes nothing.
    """
    return min(reversed(range(vocab_size)), key=lambda token: generated.get(token, 0))
