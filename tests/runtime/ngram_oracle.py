"""What n-grams are to draft, by lists that are scanned, and how tests read a draft."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins.reference import RaceKey, exponential, noise_words
from outrider.plugins.schema import Purpose
from outrider.runtime.drafters import HostDrafter
from outrider.runtime.sampling import SamplingParams

GREEDY = SamplingParams()
SAMPLINGS = st.one_of(
    st.just(GREEDY),
    st.builds(SamplingParams, st.sampled_from([Sampling(0.5), Sampling(1.0)]), st.integers(0, 99), st.integers(0, 3)),
)


class TieError(Exception):
    """A chance so near the limit that the order of sums decides."""


Tree = tuple[list[int], list[int]]
"""Tokens, and their parent nodes: -1 for the sequence."""

GRADES = [*range(9), *[9] * 4, *[10] * 8, *[11] * 16, *[12] * 28]
"""By the length of a context, with which others it learns."""

Seen = tuple[list[int], int, bool]
"""What stood before a token, the token, and whether it came or was likely."""


class OracleMemory:
    """The texts themselves, in two lists: when the newer one would be more than half of what may be kept, it becomes
    the older one, which is forgotten."""

    def __init__(self, tokens: int) -> None:
        self.half = tokens // 2
        self.older: list[tuple[list[int], int]] = []  # texts, and how many tokens of each only lead to what came
        self.newer: list[tuple[list[int], int]] = []

    def add(self, lead: list[int], output: list[int]) -> None:
        if not output:
            return
        text = [*lead, *output]
        cut = max(0, len(text) - self.half)
        if sum(len(other) for other, _ in self.newer) + len(text) - cut > self.half:
            self.older, self.newer = self.newer, []
        self.newer.append((text[cut:], max(0, len(lead) - cut)))

    @property
    def tokens(self) -> int:
        return sum(len(text) for text, _ in self.older + self.newer)

    @property
    def seen(self) -> list[Seen]:
        texts = self.older + self.newer
        return [(text[:at], text[at], True) for text, lead in texts for at in range(lead, len(text))]


class ScanningOracle:
    """Row 16 as its sentence says, with no structure at all: every continuation ever seen, with what stood before."""

    def __init__(
        self,
        max_context: int,
        min_context: int,
        max_draft: int,
        min_confidence: float,
        sampling: SamplingParams = GREEDY,
        memory: OracleMemory | None = None,
    ) -> None:
        self.sampling, self.memory = sampling, memory
        self.lengths = range(max_context, min_context - 1, -1)
        self.max_draft, self.min_confidence = max_draft, min_confidence
        self.tokens: list[int] = []
        self.seen: list[Seen] = []
        self.likely: dict[int, list[int]] = {}
        self.guesses: list[tuple[int, int, bool, int, float]] = []  # token, parent, from memory, length, share
        self.outcomes: list[tuple[bool, int, float, bool]] = []

    def worth(self, recalled: bool, length: int) -> float:
        """What came over what was drafted after contexts of about this length, and eight assumed shares."""
        grade = GRADES[length]
        came, drafted = 8.0 * min(0.85, 1 - 0.5 * 0.75 ** (grade - 1)), 8.0
        for source, of, share, ok in self.outcomes:
            if source == recalled and GRADES[of] == grade:
                came, drafted = came + ok, drafted + share
        return min(came / drafted, 1.0)

    def extend(self, tokens: list[int]) -> None:
        at = -1
        for token in tokens:
            of_node = [(place, *guess) for place, guess in enumerate(self.guesses) if guess[1] == at]
            self.outcomes += [(source, length, share, guess == token) for _, guess, _, source, length, share in of_node]
            at = next((place for place, guess, *_ in of_node if guess == token), len(self.guesses))
            likely = self.likely.pop(len(self.tokens), [])
            self.seen += [(list(self.tokens), other, False) for other in likely] + [(list(self.tokens), token, True)]
            self.tokens.append(token)
        if tokens:
            self.guesses = []

    def observe(self, ahead: int, tokens: list[int]) -> None:
        self.likely[len(self.tokens) + ahead] = tokens

    def draft(self, limit: int) -> Tree:
        self.guesses, self.chances = [], list[float]()
        open_nodes: list[tuple[float, int, list[int], int, int, bool, int, float]] = []
        orders = itertools.count()

        def open_after(path: list[int], chance: float, parent: int) -> None:
            recalled, length, choices = self.choices(self.tokens + path)
            chance *= self.worth(recalled, length) if choices else 0.0
            for token, share in choices:
                if abs(chance * share - self.min_confidence) < 1e-12:
                    raise TieError
                if chance * share < self.min_confidence:
                    break
                guess = token, parent, recalled, length, share
                open_nodes.append((chance * share, -next(orders), [*path, token], *guess))

        open_after([], 1.0, -1)
        while open_nodes and len(self.guesses) < min(limit, self.max_draft):
            best = max(open_nodes, key=lambda node: node[:2])
            if self.sampling.temperature and any(0 < abs(best[0] - node[0]) < 1e-6 * best[0] for node in open_nodes):
                raise TieError
            open_nodes.remove(best)
            chance, _, path, *guess = best
            self.guesses.append(tuple(guess))  # type: ignore[arg-type]
            self.chances.append(chance)
            open_after(path, chance, len(self.guesses) - 1)
        return [guess[0] for guess in self.guesses], [guess[1] for guess in self.guesses]

    def followed(self, text: list[int], seen: Iterable[Seen]) -> tuple[int, list[tuple[int, bool]]]:
        """The length of the longest context of the text that has been continued, and what came or was likely after
        it."""
        for length in self.lengths:
            context = text[-length:]
            following = [
                (token, came)
                for before, token, came in seen
                if len(context) == length and len(before) >= length and before[-length:] == context
            ]
            if any(came for _, came in following):
                return length, following
        return 0, []

    def choices(self, text: list[int]) -> tuple[bool, int, list[tuple[int, float]]]:
        """Whether a longer context of the text has been continued in the memory than in the sequence, the longest
        one's length, and its continuations with their shares, best first."""
        length, following = self.followed(text, self.seen)
        recalled, in_memory = False, (0, list[tuple[int, bool]]())
        if self.memory is not None:
            in_memory = self.followed(text, self.memory.seen)
        if in_memory[0] > length:
            recalled, (length, following) = True, in_memory
        if not length:
            return False, 0, []
        came = Counter(token for token, came in following if came)
        likely = Counter(token for token, came in following if not came)
        latest = {token: place for place, (token, _) in enumerate(following)}
        shares: dict[int, float] = {token: float(came[token]) for token in came}
        whole = float(came.total())
        if self.sampling.temperature:
            weights = {token: came[token] + 0.1 * likely[token] for token in {**came, **likely}}
            shares = dict.fromkeys(weights, 1.0)
            whole = 1.0
            if len(weights) > 1:
                shares = self.races(weights, len(text))
        order = sorted(shares, key=lambda token: (-shares[token], -likely[token], -latest[token]))
        return recalled, length, [(token, shares[token] / whole) for token in order[:8]]

    def races(self, weights: dict[int, float], position: int) -> dict[int, float]:
        """Chances in the target's race at `position`, run by weights: half of a chance is the share of all paces."""
        ids, given = np.array(list(weights)), np.array([*weights.values()])
        weight = (given / given.max()) ** (1 / self.sampling.temperature)
        key = RaceKey(self.sampling.seed, self.sampling.stream_id, position, Purpose.TARGET)
        pace = weight / exponential(noise_words(ids, key))
        chances = 0.5 * pace / pace.sum() + 0.5 * weight / weight.sum()
        if (np.diff(np.sort(chances)) < 1e-6).any():
            raise TieError
        return {int(token): float(chance) for token, chance in zip(ids, chances, strict=True)}


def agree(drafter: HostDrafter, oracle: ScanningOracle, limit: int = 9, root: int = 0) -> bool:
    """Assert that a draft has the oracle's tree and the logarithms of its chances; False where the oracle has a tie."""
    try:
        expected = oracle.draft(limit)
    except TieError:
        return False
    tree, scores = _draft(drafter, limit, root, oracle.sampling)
    assert tree == expected
    np.testing.assert_allclose(np.exp(scores), oracle.chances, rtol=1e-5)
    return True


def drafted_tree(drafter: HostDrafter, limit: int, sampling: SamplingParams = GREEDY) -> Tree:
    return _draft(drafter, limit, 0, sampling)[0]


def _draft(drafter: HostDrafter, limit: int, root: int, sampling: SamplingParams) -> tuple[Tree, np.ndarray]:
    """Draft into arrays with surroundings, and check the surroundings."""
    token_ids = np.full(root + limit + 4, -7, np.int64)
    parent = np.full(root + limit + 4, -7, np.int64)
    score = np.full(root + limit + 4, -7, np.float32)
    count = drafter.draft(limit, token_ids, parent, score, root, sampling)
    assert 0 <= count <= limit
    nodes = slice(root + 1, root + 1 + count)
    for array in (token_ids, parent, score):
        assert (np.delete(array, nodes) == -7).all()
    return (token_ids[nodes].tolist(), (parent[nodes] - root - 1).tolist()), score[nodes]


def drafted(drafter: HostDrafter, limit: int) -> list[int]:
    """The tokens of a draft that is a chain, or the likeliest path of a tree."""
    tokens, parents = drafted_tree(drafter, limit)
    path, at = list[int](), -1
    while at in parents:
        at = parents.index(at)
        path.append(tokens[at])
    return path


SETTINGS = st.tuples(
    st.sampled_from([1, 2, 3, 4, 14]), st.integers(0, 3), st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0])
).map(lambda s: (s[0], max(1, s[0] - s[1]), s[2], s[3]))
