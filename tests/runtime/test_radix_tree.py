"""The radix tree against a plain dictionary of all sequences that were inserted."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.runtime.prefix_cache.radix_tree import Node, RadixTree, common_length
from tests.properties import cheap

OWNERS = st.sampled_from(["", "a"])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Copied:
    """A value that says which tokens it covers, from the sequence's first on."""

    def __init__(self, tokens: list[int], start: int) -> None:
        self.tokens, self.start = tokens, start

    def __len__(self) -> int:
        return len(self.tokens) - self.start

    def split(self, at: int) -> Copied:
        upper = Copied(self.tokens[: self.start + at], self.start)
        self.start += at
        return upper


def insert(tree: RadixTree[Copied], tokens: list[int], owner: str = "") -> Node[Copied]:
    match = tree.find(tokens, owner)
    return tree.insert(match, tokens, Copied(tokens, match.length) if match.length < len(tokens) else None)


def known(values: list[list[int]], tokens: list[int]) -> int:
    return max((common_length(each, tokens) for each in values), default=0)


class AgainstADictionary(RuleBasedStateMachine):
    """Inserts, looks up, holds, removes and evicts; `lines` has what is on the edges, `inserted` what was inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[Copied] = RadixTree()
        self.inserted: dict[tuple[str, *tuple[int, ...]], int] = {}  # and when each was last used
        self.held: list[tuple[Node[Copied], list[Any]]] = []
        self.clock = 0

    @rule(tokens=TOKENS, owner=OWNERS)
    def insert(self, tokens: list[int], owner: str) -> None:
        before = self.tree.tokens
        new = len(tokens) - self.tree.find(tokens, owner).length
        node = insert(self.tree, tokens, owner)
        assert self.spelled(node) == [owner, *tokens]
        assert self.tree.tokens == before + new
        self.inserted[owner, *tokens] = self.clock
        self.tree.touch(self.tree.find(tokens, owner))

    @rule(tokens=TOKENS, owner=OWNERS)
    def look_up(self, tokens: list[int], owner: str) -> None:
        match = self.tree.find(tokens, owner)
        lines = [tokens for whose, *tokens in map(self.spelled, self.tree.walk()) if whose == owner]
        assert match.length == known(lines, tokens)
        assert match.length >= known([tokens for whose, *tokens in self.inserted if whose == owner], tokens)
        covered: list[int] = []
        for node in match.nodes:
            assert node.value is not None
            covered += node.value.tokens[node.value.start :]
        assert covered[: match.length] == tokens[: match.length]

    @rule(tokens=TOKENS, owner=OWNERS)
    def hold(self, tokens: list[int], owner: str) -> None:
        match = self.tree.find(tokens, owner)
        if match.node is not None:
            self.tree.hold(match.node)
            self.held.append((match.node, [owner, *tokens[: match.length]]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        node, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.release(node)
        assert self.held or all(node.references == 0 for node in self.tree.walk())

    @rule(tokens=TOKENS, owner=OWNERS)
    def remove(self, tokens: list[int], owner: str) -> None:
        before = self.tree.tokens
        gone = self.tree.remove(tokens, owner)
        assert (gone is not None) == ((owner, *tokens) in self.inserted)
        assert self.tree.tokens == before - sum(map(len, gone or []))
        self.inserted.pop((owner, *tokens), None)

    @rule(most=st.integers(0, 20))
    def evict(self, most: int) -> None:
        before, dropped = self.tree.tokens, list[int]()
        gone = self.tree.evict(lambda: self.tree.tokens <= most, lambda value: dropped.append(len(value)))
        assert gone == sum(dropped) == before - self.tree.tokens
        if self.tree.tokens > most:  # all that is left is used, or leads to what is
            assert all(node.references for node in self.tree.walk())
        lines = {tuple(self.spelled(node)) for node in self.tree.walk() if node.terminal}
        self.inserted = {tokens: used for tokens, used in self.inserted.items() if tokens in lines}

    def spelled(self, node: Node[Copied]) -> list[Any]:
        """The owner, and all tokens up to the node."""
        tokens, each = list[int](), node
        while each.parent is not None:
            tokens = each.tokens + tokens
            each = each.parent
        return [next(owner for owner, root in self.tree.roots.items() if root is each), *tokens]

    @invariant()
    def holds_together(self) -> None:
        self.tree.check()
        assert {tuple(self.spelled(node)) for node in self.tree.walk() if node.terminal} == set(self.inserted)
        for node, tokens in self.held:
            assert node.references > 0
            assert self.spelled(node)[: len(tokens)] == tokens
            assert self.tree.find(tokens[1:], tokens[0]).length == len(tokens) - 1


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(cheap, stateful_step_count=60)


def test_the_worked_example_of_splits() -> None:
    """Seed 002, section 2: three sequences, an edge split twice."""
    tree: RadixTree[Copied] = RadixTree()
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8, 9, 10]):
        insert(tree, tokens)
    edges = [node.tokens for node in tree.walk()]
    assert sorted(edges) == [[1, 2], [3], [4, 5], [6, 7], [8, 9, 10]]
    assert [tree.find(tokens).length for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [1, 2, 8, 9, 10, 100])] == [
        5,
        3,
        5,
    ]
    stats = tree.stats
    assert (stats.nodes, stats.terminals, stats.tokens, stats.depth) == (5, 3, 10, 3)
    tree.touch(tree.find([1, 2, 3, 6, 7]))
    tree.evict(lambda: tree.tokens <= 5, lambda _: None)  # the least recently used goes first
    assert [node.tokens for node in tree.walk() if node.terminal] == [[6, 7]]
