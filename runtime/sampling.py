"""How a request wants its tokens chosen, and how probable the model found them.

The choice itself is an op (`plugins`, `Sample` and `TreeAccept`); these are the settings it reads.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.runtime.numbers import as_real, shown

FilterOrder = Literal["temperature_first", "temperature_last"]

MAX_TEMPERATURE = 100.0
_INT64_MAX = 2**63 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one branch; what is out of its limits raises RequestError.

    - `temperature`: 0 to 100; 0 is greedy, and the filters are then without effect.
    - `top_k`: keep the k most probable tokens, ties at the cut included; 0 is off.
    - `top_p`: above 0, at most 1; keep the most probable tokens up to the one that crosses p; 1 is off.
    - `min_p`: 0 to 1; keep the tokens that are at least this share as probable as the most probable one; 0 is off.
    - `seed`, `stream`: every draw is a function of (seed, stream, position, purpose); 0 to 2**64 - 1 and
      0 to 2**63 - 1. `stream` numbers the branch within its request, so that a branch can be replayed alone.
    - `skip_sample_adjustment`: where a drafter is accepted by rejection, correct from the target's distribution instead
      of the residual: for debugging, the output is not the target's then.
    - `filter_order`: temperature before the filters, or after them (DESIGN section 7).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0
    filter_order: FilterOrder = "temperature_first"
    skip_sample_adjustment: bool = False

    def __post_init__(self) -> None:
        # The frozen dataclass holds exact Python types, whatever numbers the caller has.
        set_field = object.__setattr__
        set_field(self, "temperature", _real(self.temperature, "temperature", "from 0 (greedy) to 100"))
        set_field(self, "top_p", _real(self.top_p, "top_p", "above 0 and at most 1 (off)"))
        set_field(self, "min_p", _real(self.min_p, "min_p", "from 0 (off) to 1"))
        set_field(self, "top_k", _integer(self.top_k, "top_k", _INT64_MAX))
        set_field(self, "seed", _integer(self.seed, "seed", _UINT64_MAX))
        set_field(self, "stream", _integer(self.stream, "stream", _INT64_MAX))
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(f"temperature is {self.temperature}; pass a number from 0 (greedy) to 100.")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; pass a number above 0 and at most 1 (off).")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p is {self.min_p}; pass a number from 0 (off) to 1.")
        if self.filter_order not in get_args(FilterOrder):
            raise RequestError(
                f"filter_order is {self.filter_order!r}; pass 'temperature_first' or 'temperature_last'."
            )

    @property
    def row(self) -> Sampling:
        """How a token is chosen, as ops read it."""
        last = self.filter_order == "temperature_last"
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, last)

    def slots(self) -> dict[str, Sampling | int]:
        """The settings as ops read them, by the names of their buffers."""
        return {
            names.SAMPLING: self.row,
            names.SEED: self.seed,
            names.STREAM: self.stream,
            names.SKIP_SAMPLE_ADJUSTMENT: int(self.skip_sample_adjustment),
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the raw logits, and the most probable tokens beside it.

    `top` holds (token id, logprob), most probable first, lower id first on ties.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: NDArray[np.float32], token_id: int, top: int = 0) -> TokenLogprob:
    """Log-softmax of one row of logits, f32 [V], in f64: the model's own distribution, before any filter.

    Every processor gives the same bits, so that requests may move; NumPy's exp has kernels of its own for each kind.
    `top` tokens are listed, 0 to V. Logits of -inf (masked tokens) have logprob -inf. Raises RequestError for a
    token id or a `top` outside the row, and PlanError for logits that are no distribution (NaN, +inf, all -inf).
    """
    size = len(logits)
    if not 0 <= token_id < size:
        raise RequestError(f"token id {token_id} has no logprob: the model has tokens 0 to {size - 1}.")
    if not 0 <= top <= size:
        raise RequestError(f"{top} top logprobs were asked for; pass a number from 0 to {size}.")
    highest = float(logits.max())
    if not math.isfinite(highest):
        raise PlanError(
            f"The target's logits are no distribution: their maximum is {highest}. "
            "The plan's engine is at fault: run `outrider verify` on the plan."
        )
    row = logits.astype(np.float64) - highest  # first: the rest then keeps its digits, however large the logits are
    row -= native.log_sum_exp(logits)
    ids = likeliest(logits, top)  # ranked by logits: the subtraction may make neighbours equal
    return TokenLogprob(int(token_id), float(row[token_id]), tuple((int(i), float(row[i])) for i in ids))


def likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest values, int64 [count], descending, lower id first on ties (at the cut as well)."""
    ids = np.empty(count, np.int64)
    native.likeliest(row, ids)
    return ids


def new_seed() -> int:
    """A seed of a request that has none: 53 bits, which programs that hold numbers in floats can keep."""
    return secrets.randbits(53)


def _real(value: object, name: str, limits: str) -> float:
    if (number := as_real(value)) is None:
        raise RequestError(f"{name} is {shown(value)}; pass a number {limits}.")
    return number


def _integer(value: object, name: str, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= limit:
        raise RequestError(f"{name} is {shown(value)}; pass a whole number from 0 to {limit}.")
    return int(value)
