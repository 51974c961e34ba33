"""Token sequences by what they have in common: a radix tree. Pure data, no KV, no lock.

Each owner's sequences have a root of their own: nothing of one owner is found by another. An edge holds tokens and a
value that covers them. Where a sequence leaves an edge half way, the edge is split, and its
value with it. References count along the path from the root, so that nothing on the way to what is used can go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, Self, TypeVar

from outrider.runtime.text.common_length import common_length


class Value(Protocol):
    """Data that covers the tokens of an edge."""

    def __len__(self) -> int: ...

    def split(self, at: int) -> Self:
        """Keep the part after the first `at` tokens, and return the part before."""


V = TypeVar("V", bound=Value)


class Node(Generic[V]):
    """The end of an edge. `references` counts users of this node and of its descendants; `used` is the time of the last
    use.
    """

    __slots__ = ("children", "parent", "references", "terminal", "tokens", "used", "value")

    def __init__(self, tokens: list[int], value: V | None, parent: Node[V] | None, used: int) -> None:
        self.tokens, self.value, self.parent = tokens, value, parent
        self.children: dict[int, Node[V]] = {}
        self.references, self.used, self.terminal = 0, used, False


@dataclass(frozen=True)
class Match(Generic[V]):
    """The path to the known part of a sequence: nodes from the root on, and how much of the last edge is shared."""

    nodes: list[Node[V]]
    inside: int  # tokens of the last node's edge
    length: int  # tokens of all
    owner: str = ""

    @property
    def node(self) -> Node[V] | None:
        return self.nodes[-1] if self.nodes else None


@dataclass(frozen=True)
class TreeStats:
    nodes: int  # without the root
    terminals: int  # of them, where a sequence ends that was inserted
    tokens: int
    depth: int  # edges on the longest path


_NOTHING: Node[Any] = Node([], None, None, 0)  # the root of an owner that has no cached tokens


class RadixTree(Generic[V]):
    """Token sequences, and the values of their edges. Not thread-safe: the owner holds the lock."""

    def __init__(self) -> None:
        self.roots: dict[str, Node[V]] = {}  # by owner
        self.tokens = 0  # on all edges
        self._clock = 0

    def find(self, tokens: Sequence[int], owner: str = "") -> Match[V]:
        """Return the longest beginning of `tokens` that is known of the owner. Changes nothing."""
        node, nodes, length, inside = self.roots.get(owner, _NOTHING), list[Node[V]](), 0, 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            inside = common_length(child.tokens, tokens[length : length + len(child.tokens)])
            nodes.append(child)
            length += inside
            if inside < len(child.tokens):
                break
            node = child
        return Match(nodes, inside, length, owner)

    def touch(self, match: Match[V]) -> None:
        """Mark the path as used now."""
        self._clock += 1
        for node in match.nodes:
            node.used = self._clock

    def hold(self, node: Node[V]) -> None:
        """Add a reference: the node and its ancestors are not evicted or removed until `release`."""
        for each in _upwards(node):
            each.references += 1

    def release(self, node: Node[V]) -> None:
        """Drop a reference. A node that was split since is the lower part, and both parts lose theirs."""
        for each in _upwards(node):
            assert each.references > 0, "a node was let go more often than held"
            each.references -= 1

    def splits(self, match: Match[V]) -> bool:
        """Whether a sequence that leaves the path there, or ends there, splits an edge."""
        return match.node is not None and match.inside < len(match.node.tokens)

    def insert(self, match: Match[V], tokens: Sequence[int], value: V | None) -> Node[V]:
        """Add `tokens`, of which `match` has just been found; `value` covers those after it, None where none are.

        Returns the node where they end.
        """
        node = match.node or self.roots.setdefault(match.owner, Node([], None, None, 0))
        if self.splits(match):
            node = self._split(node, match.inside)
        rest = list(tokens[match.length :])
        assert len(rest) == (0 if value is None else len(value)), "a value covers what is new"
        if rest:
            self._clock += 1
            node.children[rest[0]] = child = Node(rest, value, node, self._clock)
            self.tokens += len(rest)
            node = child
        node.terminal = True
        return node

    def _split(self, node: Node[V], at: int) -> Node[V]:
        """Split the edge of `node` after `at` tokens; return the new node above it. `node` stays the lower part."""
        parent, value = node.parent, node.value
        assert parent is not None
        assert value is not None
        upper: Node[V] = Node(node.tokens[:at], value.split(at), parent, node.used)
        upper.references = node.references
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        parent.children[upper.tokens[0]] = upper
        return upper

    def remove(self, tokens: Sequence[int], owner: str = "") -> list[V] | None:
        """Forget an inserted sequence of the owner; return the values of parts that no other sequence needs, None where
        it is not known.

        Parts in use stay, as do those that lead to other sequences.
        """
        match = self.find(tokens, owner)
        node = match.node
        if node is None or match.length < len(tokens) or self.splits(match) or not node.terminal:
            return None
        node.terminal = False
        gone = []
        while node.parent is not None and not (node.children or node.terminal or node.references):
            gone.append(self._detach(node))
            node = node.parent
        return gone

    def evict(self, enough: Callable[[], bool], drop: Callable[[V], None]) -> int:
        """Evict unused leaves, the least recently used first, until `enough`; return how many tokens were evicted."""
        order = [(node.used, id(node), node) for node in self.walk() if not node.children and not node.references]
        heapify(order)
        evicted = 0
        while order and not enough():
            *_, node = heappop(order)
            parent = node.parent
            assert parent is not None
            evicted += len(node.tokens)
            drop(self._detach(node))
            if parent.parent is not None and not parent.children and not parent.references:
                heappush(order, (parent.used, id(parent), parent))
        self.roots = {owner: root for owner, root in self.roots.items() if root.children}
        return evicted

    def _detach(self, leaf: Node[V]) -> V:
        assert leaf.parent is not None
        assert leaf.value is not None
        del leaf.parent.children[leaf.tokens[0]]
        self.tokens -= len(leaf.tokens)
        return leaf.value

    def walk(self) -> Iterator[Node[V]]:
        """Yield every node but the roots, parents before children."""
        waiting = [node for root in self.roots.values() for node in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    @property
    def stats(self) -> TreeStats:
        nodes = list(self.walk())
        depth = max((sum(1 for _ in _upwards(node)) for node in nodes), default=0)
        return TreeStats(len(nodes), sum(node.terminal for node in nodes), self.tokens, depth)

    def check(self) -> None:
        """Raise AssertionError where an invariant of the tree does not hold."""
        total = 0
        for node in self.walk():
            assert node.tokens, "an edge without tokens"
            assert node.value is not None, "an edge without a value"
            assert len(node.value) == len(node.tokens), "a value of another length than its edge"
            assert node.parent is not None, "a node without a parent"
            assert node.parent.children[node.tokens[0]] is node, "a child under a wrong token"
            held = sum(child.references for child in node.children.values())
            assert node.references >= held, "references that do not count along the path"
            total += len(node.tokens)
        assert total == self.tokens, "tokens that are counted wrongly"


def _upwards(node: Node[V]) -> Iterator[Node[V]]:
    """Yield the node and its ancestors, but for the root."""
    each = node
    while each.parent is not None:
        yield each
        each = each.parent
