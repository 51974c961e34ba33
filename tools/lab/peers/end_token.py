"""The end token of an engine that must have one, though no generation is to end early."""

from __future__ import annotations

from collections.abc import Mapping


def choose_end_token(generated: Mapping[int, int], vocab_size: int) -> int:
    """The last id of the vocabulary that was not `generated`: how often each was. Where all were, the rarest of them.

    onnxruntime-genai refuses ids outside of the vocabulary and ends wherever its end token comes; `min_length` forbids
    that token, and so changes what is generated. An id that is not generated changes nothing.
    """
    return min(reversed(range(vocab_size)), key=lambda token: generated.get(token, 0))
