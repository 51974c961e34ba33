"""What a recorded tree says of smaller ones, against growing those by the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans.manifest import Tree
from outrider.tools.tune.replay import DraftedTree, acceptance_by_depth, acceptance_by_rank, largest, tokens_per_verify
from tests.compiler.test_draft_graph import grow

VOCABULARY = 9
Nodes = list[tuple[int, int, int, float, int]]  # token, parent node, depth, score, row


def log_probs(seed: int, scale: float, path: list[int]) -> NDArray[np.float64]:
    logits = np.random.default_rng([seed, *path]).normal(size=VOCABULARY) * scale
    return logits - np.log(np.exp(logits).sum())


def accepted(nodes: Nodes, chosen: list[int]) -> list[int]:
    """Nodes, 1 for the first after the tip, along what the target chooses."""
    path, at = [], 0
    for token in chosen:
        at = next((i for i, (t, parent, *_) in enumerate(nodes, start=1) if parent == at and t == token), 0)
        if not at:
            break
        path.append(at)
    return path


def recorded(nodes: Nodes, chosen: list[int]) -> DraftedTree:
    path = tuple(node - 1 for node in accepted(nodes, chosen))
    siblings = [[i for i, n in enumerate(nodes) if n[1] == nodes[node][1]] for node in path]
    return DraftedTree(
        score=np.array([score for *_, score, _ in nodes]),
        depth=np.array([depth for _, _, depth, _, _ in nodes]),
        path=path,
        ranks=tuple(found.index(node) for found, node in zip(siblings, path, strict=True)),
    )


@given(
    seed=st.integers(0, 2**31),
    top_k=st.integers(1, 4),
    deepest=st.integers(0, 4),
    scale=st.sampled_from([0.0, 0.5, 2.0]),
    chosen=st.lists(st.integers(0, VOCABULARY - 1), min_size=6, max_size=6),
    follow=st.integers(0, 6),
)
def test_a_whole_tree_replays_every_smaller_one_exactly(seed, top_k, deepest, scale, chosen, follow) -> None:
    def drafter(path: list[int]) -> NDArray[np.float64]:
        return log_probs(seed, scale, path)

    for i in range(follow):  # a target that mostly agrees, so that paths are long
        chosen[i] = int(np.argmax(drafter(chosen[:i])))
    whole = recorded(grow(drafter, Tree(top_k=top_k, depth=deepest, nodes=largest(top_k, deepest, 999))), chosen)
    for depth in range(deepest + 1):
        most = largest(top_k, depth, 24)
        promised = tokens_per_verify([whole], depth, most)
        for nodes in range(2, most + 1):
            small = grow(drafter, Tree(top_k=top_k, depth=depth, nodes=nodes))
            assert promised[nodes] == 1 + len(accepted(small, chosen))


@given(seed=st.integers(0, 2**31))
def test_a_recording_that_kept_few_nodes_promises_no_more_than_a_whole_one(seed: int) -> None:
    chosen = [0, 1, 2, 3]
    for i in range(4):
        chosen[i] = int(np.argsort(-log_probs(seed, 1.0, chosen[:i]))[(seed >> i) % 3])
    grown = (grow(lambda path: log_probs(seed, 1.0, path), Tree(top_k=3, depth=3, nodes=nodes)) for nodes in (31, 16))
    whole, few = (recorded(tree, chosen) for tree in grown)
    for depth in range(4):
        exact, least = (tokens_per_verify([tree], depth, 10) for tree in (whole, few))
        assert (least <= exact).all()
    np.testing.assert_array_equal(tokens_per_verify([few], 3, 16), tokens_per_verify([whole], 3, 16))


def test_acceptance_is_counted_by_depth_and_by_rank() -> None:
    shape = {"score": np.log([0.5, 0.3, 0.4, 0.1]), "depth": np.array([1, 1, 2, 2])}
    trees = [
        DraftedTree(**shape, path=(0, 2), ranks=(0, 0)),
        DraftedTree(**shape, path=(1,), ranks=(1,)),
        DraftedTree(**shape, path=(0, 3), ranks=(0, 1)),
        DraftedTree(**shape, path=(), ranks=()),
    ]
    assert acceptance_by_depth(trees) == [0.75, 0.5]
    assert acceptance_by_rank(trees) == [pytest.approx(0.6), pytest.approx(0.4)]
    assert tokens_per_verify(trees, 1, 5).tolist() == [1, 1, 1.5, 1.75, 2.0, 2.25]
    assert tokens_per_verify(trees, 0, 3).tolist() == [1, 1, 1.5, 1.75]
    assert acceptance_by_depth([]) == acceptance_by_rank([]) == []
