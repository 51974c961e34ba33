"""What csrc/cpu has beside the kernels of ops, which `native.create` binds."""

import numpy as np
from numpy.typing import NDArray

_Int = NDArray[np.int64]

SAMPLING_COLUMNS: tuple[str, ...]
"""The columns of `sampling` as kernels read them: `plans.sampling.Sampling`."""

def weights(logits: NDArray[np.float32], temperature: float, out: NDArray[np.uint64]) -> None:
    """Write the weights of logits `[V]` before filters: `reference.fixed_weights`, bit for bit."""

def uniform(seed: int, stream: int, position: int, purpose: int) -> int:
    """Return the integer in [0, 2**53) of a draw: `reference.uniform`."""

def race(weights: NDArray[np.uint64], seed: int, stream: int, position: int, purpose: int) -> int:
    """Return the winner among weights `[V]`: `reference.race`. Raises ValueError where all are 0, one above 2**50."""

def noise(seed: int, stream: int, position: int, purpose: int, id: int) -> float:
    """Return an id's noise in races: `reference.exponential` of its word."""

def exponential(word: int) -> float:
    """Return `reference.exponential` of a word in [0, 2**32)."""

def likeliest(row: NDArray[np.float32], out: NDArray[np.int64]) -> None:
    """Write the ids of the highest values of `row` `[V]` to `out` `[K]`, descending, the lower id first among equals.

    K is at most V, and meant to be small.
    """

def log_sum_exp(row: NDArray[np.float32]) -> float:
    """Return log(sum(exp(row - max(row)))) of `row` `[V]` in float64: the same bits on every processor.

    Raises ValueError where the maximum is not finite, and for NaN.
    """

def residual(weights: NDArray[np.uint64], draft_probs: NDArray[np.float32], out: NDArray[np.uint64]) -> None:
    """Write max(0, p - q) `[V]`, p from filtered weights: the residual that `reference.chain_accept` draws from."""

def accepts(r: int, p: int, q: int) -> bool:
    """Return whether ChainAccept accepts at p and q in units of 2**-50, for the draw r in [0, 2**53)."""

class NgramMemory:
    """Outputs of earlier generations, at most `tokens` of them, for drafts after contexts of up to `longest` tokens.

    See csrc/cpu/ngram_memory.h. Safe to use from several threads. Raises ValueError for sizes, and tokens, that it does
    not take."""

    def __init__(self, tokens: int, longest: int) -> None: ...
    def add(self, lead: list[int], output: list[int]) -> None:
        """Add an output, where need be in place of the oldest ones. The tokens `lead` before it are contexts alone:
        they are never drafted. Other threads run meanwhile."""

    @property
    def tokens(self) -> int:
        """Tokens that it holds, leads included."""

    @property
    def nbytes(self) -> int:
        """Bytes that it has taken, which do not depend on its contents."""

class Ngrams:
    """Counts of the tokens that followed each context of a sequence; see csrc/cpu/ngram_counts.h. Raises ValueError for
    tokens outside 0 to 2**32 - 1, and for a draft without room."""

    def __init__(self, shortest: int, longest: int, least_chance: float) -> None: ...
    def extend(self, token_ids: list[int]) -> None:
        """Append tokens to the sequence, and count each as the continuation of the contexts before it."""

    def extend_one(self, token: int, likely: list[int]) -> None:
        """Append one token likewise; the tokens `likely` count as continuations in its place before it does."""

    def go_ahead(self, token_ids: list[int]) -> None:
        """Suppose that the sequence continues with these tokens: contexts end in them, and nothing is counted."""

    def go_back(self) -> None:
        """Return to the sequence before `go_ahead`; needed before tokens are counted."""

    def recall_from(self, memory: NgramMemory | None) -> None:
        """Draft what followed longer contexts in a memory too, or again without one. Raises ValueError for a memory of
        another `longest`."""

    def foresee(self, limit: int, seed: int = 0, stream: int = 0, position: int = 0, temperature: float = 0.0) -> int:
        """Return how many tokens `draft` would write."""

    def draft(
        self,
        limit: int,
        token_ids: _Int,
        parent: _Int,
        score: NDArray[np.float32],
        root: int,
        seed: int = 0,
        stream: int = 0,
        position: int = 0,
        temperature: float = 0.0,
    ) -> int:
        """Write a chain of at most `limit` tokens after node `root`, and return its length. At a temperature above 0
        the tokens are those likely to win the target's races from `position` on."""
