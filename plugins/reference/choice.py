"""The choice of a token from its logits: argmax, or who wins an exponential race among the tokens that filters keep.

Weights are integers, so that no sum depends on its order; Python's integers give exact sums and products.
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

from outrider.plans.sampling import Sampling
from outrider.plugins.reference.race import RaceKey, race
from outrider.plugins.schema import FilterOrder

_WEIGHT_ONE = 2.0**40
_NO_WEIGHT_BELOW = -28.0  # exp(-28) * 2**40 is 0.76
_SHARE_BITS = 53  # top_p and min_p are integers in units of 2**-53

_LOG2E = float.fromhex("0x1.71547652b82fep+0")
# ln2 in two parts (fdlibm, e_exp.c): the high part ends in 20 zero bits, so k * high is exact.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_TO_INTEGER = 1.5 * 2.0**52
_DEGREE = 12


def sampling_of(rows: NDArray[np.floating], index: int) -> Sampling:
    """Return a row of `sampling` or `draft_sampling` `[B, SETTINGS]`."""
    return Sampling(*rows[index].tolist())


def shared_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(x) for -700 <= x <= 0 from plain float64 `+` and `*`, with the same bits as `csrc/exp.h`."""
    k = (x * _LOG2E + _TO_INTEGER) - _TO_INTEGER
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(x, 1.0 / factorial(_DEGREE))
    for n in reversed(range(_DEGREE)):
        p = p * r + 1.0 / factorial(n)
    return p * np.ldexp(1.0, k.astype(np.int64))


def fixed_weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.uint64]:
    """Return weights `[V]` in units of 2**-40 of the largest: floor(exp((l - max) / temperature) * 2**40).

    Logits equal to the largest weigh exactly 2**40, even when it is +inf; -inf weighs 0.
    """
    top = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.where(logits == top, 0.0, logits.astype(np.float64) - np.float64(top)) / temperature
    weighs = x >= _NO_WEIGHT_BELOW
    return np.where(weighs, np.floor(shared_exp(np.where(weighs, x, 0.0)) * _WEIGHT_ONE), 0.0).astype(np.uint64)


def top_k_cut(logits: NDArray[np.float32], top_k: int) -> np.float32:
    """Return the k-th largest logit; logits at least as large stay, ties included."""
    return np.float32(np.sort(logits)[-top_k])


def top_p_cut(weights: NDArray[np.uint64], top_p: float) -> int:
    """Return the largest weight c such that weights of at least c sum to at least the share `top_p` of the total."""
    share = int(top_p * 2.0**_SHARE_BITS)
    need = share * int(weights.sum())
    values, counts = np.unique(weights, return_counts=True)
    total = 0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        total += value * count
        if total << _SHARE_BITS >= need:
            return int(value)
    raise AssertionError("the whole sum reaches any share of itself")


def min_p_cut(min_p: float) -> int:
    """Return the least weight that is at least the share `min_p` of the largest, which weighs 2**40."""
    return -(-int(min_p * 2.0**_SHARE_BITS) * int(_WEIGHT_ONE) >> _SHARE_BITS)


def sigma_cut(logits: NDArray[np.float32], top_n_sigma: float, temperature: float) -> int:
    """Return the least weight, at the temperature, of a logit at most `top_n_sigma` standard deviations of its row
    below the largest. Distances are whole units of 2**-8, at most 2**20: their sums are exact (arXiv 2411.07641)."""
    top = logits.max()
    finite = logits[~np.isneginf(logits)].astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.where(finite == top, 0.0, np.minimum(np.float64(top) - finite, 2.0**12))
    distances = [int(gap * 2.0**8) for gap in gaps.tolist()]
    if not sum(distances):
        return 0
    count = float(len(distances))
    mean = float(sum(distances)) / count
    variance = float(sum(each * each for each in distances)) / count - mean * mean
    sigma = np.sqrt(variance) / 2.0**8 if variance > 0.0 else 0.0
    with np.errstate(over="ignore"):
        x = -(top_n_sigma * sigma) / temperature
    return int(shared_exp(np.array(x)) * _WEIGHT_ONE) if x >= _NO_WEIGHT_BELOW else 0


def filtered_weights(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.uint64]:
    """Return weights `[V]` after top-k, top-p and min-p; filtered tokens weigh 0. Greedy keeps only the largest logit.

    Raises ValueError when the logits hold NaN or only -inf.
    """
    if np.isnan(logits).any():
        raise ValueError("the logits contain NaN")
    if np.isneginf(logits).all():
        raise ValueError("every logit is -inf")
    if sampling.temperature == 0.0:
        lowest = np.argmax(logits)  # the lowest id wins a tie
        return np.where(np.arange(len(logits)) == lowest, np.uint64(_WEIGHT_ONE), np.uint64(0))
    kept = np.ones(len(logits), dtype=bool)
    if 0 < sampling.top_k < len(logits):
        kept &= logits >= top_k_cut(logits, int(sampling.top_k))
    last = sampling.filter_order == FilterOrder.TEMPERATURE_LAST
    weights = np.where(kept, fixed_weights(logits, 1.0 if last else sampling.temperature), 0)
    if sampling.top_p < 1.0:
        kept &= weights >= np.uint64(top_p_cut(weights, sampling.top_p))
    if sampling.min_p > 0.0:
        kept &= weights >= np.uint64(min_p_cut(sampling.min_p))
    if sampling.top_n_sigma > 0.0:
        kept &= weights >= np.uint64(sigma_cut(logits, sampling.top_n_sigma, 1.0 if last else sampling.temperature))
    return np.where(kept, fixed_weights(logits, sampling.temperature), np.uint64(0))


def choice(logits: NDArray[np.float32], sampling: Sampling, key: RaceKey) -> int:
    """Choose an id from logits `[V]` by the noise of `key`, which does not matter when greedy.

    Raises ValueError when the logits hold NaN or only -inf.
    """
    return race(filtered_weights(logits, sampling), key)
