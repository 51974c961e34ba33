"""How a request wants its tokens chosen, and how probable the model found them.

The choice itself is an op (`plugins`, `Sample` and `TreeAccept`); these are the settings it reads.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.sampling import Sampling
from outrider.plugins import native

FilterOrder = Literal["temperature_first", "temperature_last"]


@dataclass(frozen=True)
class SamplingParams:
    """Checked sampling settings of one branch.

    Every draw is a function of (seed, stream_id, position, purpose): `stream_id` numbers the branch within its request,
    so that a branch can be replayed alone.
    """

    row: Sampling = Sampling()  # noqa: RUF009 (a tuple)
    seed: int = 0
    stream_id: int = 0
    skip_sample_adjustment: bool = False

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Take the settings from checked values of all options; without a seed, draw one."""
        last = values["filter_order"] == "temperature_last"
        row = Sampling(**{name: values[name] for name in Sampling._fields} | {"filter_order": last})
        seed = new_seed() if values["seed"] is None else values["seed"]
        return cls(row, seed, values["stream_id"], values["skip_sample_adjustment"])

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.row.temperature

    def slots(self) -> dict[str, Sampling | int]:
        """The settings as ops read them, by the names of their buffers."""
        return {
            names.SAMPLING: self.row,
            names.SEED: self.seed,
            names.STREAM: self.stream_id,
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
