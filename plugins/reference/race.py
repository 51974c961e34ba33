"""An exponential race: the id with the least noise over weight, of noise that every id has by itself.

With noise that is exponentially distributed, an id wins as often as its share of the weights says. Float32 throughout,
each operation rounded by itself, so that every machine has the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.philox import philox4x32, position_words

_RACERS = 4  # ids of a block of random words
_ROUNDS = 7  # "Crush-resistant" in Philox's paper
_LN2, _SQRT_HALF = np.float32(float.fromhex("0x1.62e430p-1")), np.float32(float.fromhex("0x1.6a09e6p-1"))

Float32 = NDArray[np.float32]


def exponential(words: NDArray[np.uint32]) -> Float32:
    """Return -log of (word + 1/2) / 2**32, exponentially distributed where words are uniform.

    Words from 2**31 on take the logarithm of 1 - y, which keeps the digits of small results.
    """
    one, two = np.float32(1), np.float32(2)
    small = words >= 1 << 31
    from_end = np.where(small, ~words, words).astype(np.int32)
    y = (from_end.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    bits = y.view(np.int32)
    k = (bits - _SQRT_HALF.view(np.int32)) >> 23
    m = (bits - (k << 23)).astype(np.int32).view(np.float32)
    s: Float32 = (np.where(small, y, one - m) / np.where(small, two - y, one + m)).astype(np.float32)
    z = s * s
    p: Float32 = np.full(z.shape, one / np.float32(15), np.float32)
    for n in (13, 11, 9, 7, 5, 3, 1):
        p = (p * z + one / np.float32(n)).astype(np.float32)
    found: Float32 = two * s * p - np.where(small, np.float32(0), k.astype(np.float32) * _LN2)
    return found


class RaceKey(NamedTuple):
    """Which race it is; see `philox.uniform`."""

    seed: int
    stream: int
    position: int
    purpose: int


def noise_words(ids: NDArray[np.int64], key: RaceKey) -> NDArray[np.uint32]:
    """Return the random word of each id."""
    key0, key1, *counter = position_words(*key)
    words = {
        quad: philox4x32((quad, *counter, 0), (key0, key1), _ROUNDS) for quad in sorted(set((ids // _RACERS).tolist()))
    }
    return np.array([words[i // _RACERS][i % _RACERS] for i in ids.tolist()], np.uint32)


def race_times(weights: NDArray[np.uint64], key: RaceKey) -> tuple[NDArray[np.int64], Float32]:
    """Return the ids of `weights` `[V]` that are more than 0, and when each comes in, f32."""
    ids = np.flatnonzero(weights)
    own: Float32 = weights[ids].astype(np.float32)
    times: Float32 = exponential(noise_words(ids, key)) / own
    return ids, times


def race(weights: NDArray[np.uint64], key: RaceKey) -> int:
    """Return the id that wins among `weights` `[V]`, some of which are more than 0; of equal times the lowest."""
    ids, times = race_times(weights, key)
    return int(ids[times.argmin()])
