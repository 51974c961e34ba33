"""Uniform numbers by counter: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11)."""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = _ROUNDS
) -> tuple[int, int, int, int]:
    """Return four 32-bit words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def position_words(seed: int, stream: int, position: int, purpose: int) -> tuple[int, int, int, int]:
    """Return four random 32-bit words of a position.

    `seed` is a uint64, `stream` an int64, `position` counts modulo 2**32, `purpose` is a `plugins.schema.Purpose`.
    """
    key = (seed & _WORD, (seed >> 32) & _WORD)
    return philox4x32((position & _WORD, stream & _WORD, (stream >> 32) & _WORD, purpose), key)


def uniform(seed: int, stream: int, position: int, purpose: int) -> int:
    """Return the integer u in [0, 2**53) that stands for u / 2**53; arguments as of
    `position_words`."""
    x0, x1, _, _ = position_words(seed, stream, position, purpose)
    return (x0 >> 5) << 26 | x1 >> 6
