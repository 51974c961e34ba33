"""The end token of an engine that must have one, though no generation is to end early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


def choose_end_token(generated: Iterable[Sequence[int]], vocab_size: int) -> int:
    """The last id of the vocabulary that is in none of the `generated` tokens.

    onnxruntime-genai refuses ids outside of the vocabulary and ends wherever its end token comes; `min_length` forbids
    that token, and so changes what is generated. An id that greedy decoding does not choose behind these prompts ends
    none of its generations, as far as its tokens are the same. Where all ids were chosen, the rarest of them.
    """
    chosen = Counter(chain.from_iterable(generated))
    return min(reversed(range(vocab_size)), key=lambda token: chosen[token])
