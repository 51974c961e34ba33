"""TreeAccept: the kernel is the reference, and a tree commits what plain decoding would."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.reference import sample, tree_accept
from tests.plugins.accept_step import AcceptStep, depth_of, equal_slots, forest
from tests.plugins.drawn_pairs import DRAFTERS, DRAWS, FILTERS, TABLE, chi_squares, decode_two, one_in_a_thousand
from tests.plugins.test_race_noise import noise_inputs, noise_outputs
from tests.properties import cheap


def tree_step(logits, logit_indices, positions, branch, slots, token_ids, parent, *, trees=8):
    tensors = {"logits": logits, "logit_indices": logit_indices, "positions": positions, "branch": branch}
    tensors |= {"token_ids": token_ids, "parent": parent}
    return AcceptStep("TreeAccept", tree_accept, slots, tensors, trees=trees)


@settings(cheap, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), deep=st.booleans(), vocabulary=st.sampled_from([1, 2, 3, 70]))
def test_kernel_equals_reference(data, deep, vocabulary, slots, logits_rows):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(0, 4))
    token_ids, parent, branch, logit_indices = forest(rng, trees, 4, 30, vocabulary, 0.95 if deep else 0.0)
    logits = data.draw(logits_rows(len(logit_indices), vocabulary))
    positions = 100 + depth_of(parent)
    settings_ = data.draw(slots(max(trees, 1)))
    tree_step(logits, logit_indices, positions, branch, settings_, token_ids, parent).run().assert_equals_reference()


@cheap
@given(seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.0, 0.7, 1.5]), top_p=st.sampled_from([0.8, 1.0]))
def test_a_tree_commits_what_plain_decoding_commits(seed, temperature, top_p):
    """The target is a fixed table of logits by last token; decoding it one token at a time is the oracle."""
    rng = np.random.default_rng(seed)
    vocabulary, tip, tip_position = 4, 1, 50
    table = rng.normal(size=(vocabulary, vocabulary)).astype(np.float32)
    slots = equal_slots(temperature=temperature, top_p=top_p)

    token_ids, parent = [tip], [-1]
    for _ in range(40):  # a random tree whose siblings are distinct
        node, token = int(rng.integers(len(parent))), int(rng.integers(vocabulary))
        if not any(p == node and t == token for p, t in zip(parent, token_ids, strict=True)):
            parent.append(node)
            token_ids.append(token)
    tokens, parents = np.array(token_ids), np.array(parent)
    rows, branch = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
    step = tree_step(table[tokens], rows, tip_position + depth_of(parents), branch, slots, tokens, parents).run()

    plain, last = [], tip
    for j in range(int(step.accepted_count[0])):
        at = np.array([tip_position + j])
        last = int(sample(table[[last]], np.array([0]), at, np.array([0]), slots)[0])
        plain.append(last)
    assert step.committed[: len(plain)].tolist() == plain
    # It stopped where the tree ends: the path of all but the last token is in the tree, with the last it is not.
    path = step.kept_indices[: step.kept_count[0]]
    assert tokens[path[1:]].tolist() == plain[:-1]
    assert not ((parents == path[-1]) & (tokens == plain[-1])).any()


NODES = 7
PARENT = np.array([-1, 0, 0, 1, 1, 2, 2])  # of node n, the children are 2n + 1 and 2n + 2
DEPTH = depth_of(PARENT)


def coupled_trees(drafter, tips, slots, position):
    """Tokens `[trees, NODES]`: first the drafter's own choice in the target's race, then its likeliest other one."""
    found = noise_outputs(len(tips), 3, drafter.shape[1])
    native.create("RaceNoise", noise_inputs(np.full(len(tips), position), slots) | found)()
    likeliest = np.argsort(-drafter, axis=1)
    tokens = np.zeros((len(tips), NODES), np.int64)
    tokens[:, 0] = tips
    for node in range(3):
        last = tokens[:, node]
        own = (np.exp(drafter)[last] / found["noise"][:, DEPTH[node]]).argmax(1)
        tokens[:, 2 * node + 1] = own
        tokens[:, 2 * node + 2] = np.where(likeliest[last, 0] == own, likeliest[last, 1], likeliest[last, 0])
    return tokens


def grown_by(drafter, depth=DEPTH):
    """Steps of coupled trees, whose nodes are at these depths."""

    def step(tips, slots, position):
        tokens, first = coupled_trees(drafter, tips, slots, position), NODES * np.arange(len(tips))[:, None]
        rows = np.arange(tokens.size)
        parent = np.where(PARENT < 0, -1, first + PARENT).ravel()
        positions, branch = position + np.tile(depth, len(tips)), rows // NODES
        arrays = (TABLE[tokens.ravel()], rows, positions, branch, slots, tokens.ravel(), parent)
        done = tree_step(*arrays, trees=len(tips)).run()
        return done.committed.reshape(tokens.shape), done.accepted_count

    return step


def always_accepting(drafter):
    """Steps that commit the first child, and its, whatever the target's choice."""

    def step(tips, slots, position):
        return coupled_trees(drafter, tips, slots, position)[:, [1, 3]], np.full(len(tips), 2)

    return step


def seeded(filters):
    """A seed of its own for every tree."""
    return replace(equal_slots(DRAWS, **filters), seed=np.arange(DRAWS, dtype=np.uint64), stream=np.zeros(DRAWS, int))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_of_coupled_trees_have_the_distribution_of_the_target(drafter, filters):
    slots = seeded(filters)
    pairs, accepted = decode_two(grown_by(DRAFTERS[drafter]), slots)
    assert accepted > 0.05
    for statistic, freedom in chi_squares(pairs, slots):
        assert statistic < one_in_a_thousand(freedom)


@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_of_wrong_rules_have_not(filters):
    """Drafts that are always accepted; one draw for a whole path, which is right for the first token alone."""
    slots = seeded(filters)
    for statistic, freedom in chi_squares(decode_two(always_accepting(DRAFTERS["near"]), slots)[0], slots):
        assert statistic > 5 * one_in_a_thousand(freedom)
    _, (statistic, freedom) = chi_squares(decode_two(grown_by(DRAFTERS["near"], 0 * DEPTH), slots)[0], slots)
    assert statistic > 5 * one_in_a_thousand(freedom)


def chain(tokens, predicted):
    """A drafted chain whose greedy choice at place i is predicted[i]."""
    logits = np.zeros((len(tokens), 50), np.float32)
    logits[np.arange(len(tokens)), predicted] = 1
    rows = np.arange(len(tokens))
    zeros = np.zeros_like(rows)
    return tree_step(logits, rows, rows, zeros, equal_slots(), np.array(tokens), rows - 1)


def test_a_chain_deeper_than_64_is_accepted_whole():
    tokens = np.arange(200) % 50
    step = chain(tokens, (tokens + 1) % 50).run()
    assert step.accepted_count[0] == 200
    assert step.kept_indices.tolist() == list(range(200))


def test_a_wrong_draft_commits_only_the_correction():
    step = chain([3, 9, 9], [7, 1, 2]).run()
    assert step.committed.tolist() == [7, -1, -1]
    assert (step.accepted_count[0], step.kept_count[0]) == (1, 1)


def test_pending_tokens_are_kept_and_choose_nothing():
    logits = np.eye(4, dtype=np.float32)[[2, 3]]
    zeros = np.zeros(4, np.int64)
    token_ids, parent = np.array([0, 0, 1, 2]), np.array([-1, 0, 1, 2])
    step = tree_step(logits, np.array([2, 3]), np.arange(4), zeros, equal_slots(), token_ids, parent).run()
    assert step.committed.tolist() == [2, 3]
    assert step.kept_indices.tolist() == [0, 1, 2, 3]


def test_without_logits_every_row_is_pending():
    step = chain([1, 2, 3], [0, 0, 0])
    step.op(3, 0)
    assert step.kept_indices.tolist() == [0, 1, 2]
    assert (step.kept_count[0], step.accepted_count[0]) == (3, 0)


def test_unvisited_nodes_are_not_looked_at():
    step = chain([3, 9, 9], [7, 1, 2])
    step.tensors["logits"][1:] = np.nan
    assert step.run().committed[0] == 7


def test_of_equal_siblings_the_lowest_row_wins():
    logits = np.eye(6, dtype=np.float32)[[5, 1, 2]]
    rows, zeros = np.arange(3), np.zeros(3, np.int64)
    step = tree_step(logits, rows, rows, zeros, equal_slots(), np.array([0, 5, 5]), np.array([-1, 0, 0])).run()
    assert step.kept_indices[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("logit_indices", "parent", "sentence"),
    [
        ([0, 0, 2], [-1, 0, 1], r"logit_indices must ascend; logit_indices\[1\] is 0 after 0"),
        ([0, 2, 1], [-1, 0, 1], r"logit_indices must ascend; logit_indices\[2\] is 1 after 2"),
        ([0, 1, 3], [-1, 0, 1], r"logit_indices\[2\] is 3; it must be in 0\.\.2"),
        ([0, 1, 2], [-1, 1, 1], r"parent\[1\] is 1; it must be in -1\.\.0"),
        ([0, 1, 2], [-2, 0, 1], r"parent\[0\] is -2"),
        ([0, 1, 2], [-1, -1, 0], r"the parent of new token 2 stands before the root of another tree, new token 1"),
        ([0, 1, 2], [-1, -1, -1], r"the step holds 3 trees, but accepted_count has room for 2"),
    ],
)
def test_malformed_trees_are_refused_and_nothing_is_written(logit_indices, parent, sentence):
    zeros = np.zeros(3, np.int64)
    logits, rows = np.zeros((3, 4), np.float32), np.array(logit_indices)
    step = tree_step(logits, rows, np.arange(3), zeros, equal_slots(), zeros, np.array(parent), trees=2)
    with pytest.raises(ValueError, match=f"TreeAccept: .*{sentence}"):
        step.run()
    step.assert_untouched()
