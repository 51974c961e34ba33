"""TreeAccept and ChainAccept: the kernels are the references; a tree commits the tokens of plain decoding, and a chain
tokens of the target's distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.ops.chain_accept import accepts, chain_accept, draft_probability, residual, target_probability
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.ops.sample import sample
from outrider.plugins.ops.tree_accept import tree_accept
from outrider.plugins.reference.choice import filtered_weights, sampling_of
from tests.plugins.accept_step import (
    DRAFTERS,
    DRAWS,
    FILTERS,
    KINDS,
    TABLE,
    TIP,
    AcceptStep,
    chi_squares,
    decode_two,
    depth_of,
    distribution,
    drafted_probs,
    draw_step,
    equal_slots,
    forest,
    one_in_a_thousand,
)
from tests.plugins.test_races import noise_inputs, noise_outputs
from tests.properties import cheap

CHAIN_INPUTS = ("logits", "logit_indices", "positions", "branch", "token_ids", "parent", "draft_probs")


def tree_step(logits, logit_indices, positions, branch, slots, token_ids, parent, *, trees=8):
    tensors = {"logits": logits, "logit_indices": logit_indices, "positions": positions, "branch": branch}
    tensors |= {"token_ids": token_ids, "parent": parent}
    return AcceptStep("TreeAccept", tree_accept, slots, tensors, trees=trees)


def chain_step(slots, *arrays, skip=None, by_rejection=None, trees=8):
    """By default, all chains are accepted by rejection."""
    tensors = dict(zip(CHAIN_INPUTS, arrays, strict=True))
    tensors["skip_sample_adjustment"] = np.zeros(len(slots.seed), np.int64) if skip is None else np.array(skip)
    tensors["by_rejection"] = np.ones(len(slots.seed), np.int64) if by_rejection is None else np.array(by_rejection)
    return AcceptStep("ChainAccept", chain_accept, slots, tensors, trees=trees)


def chains_of(token_ids, logits, draft_probs, slots, *, position=100, skip=0):
    """One chain of tokens `[chains, 1 + gamma]` per branch; its first column are the tips."""
    chains, length = token_ids.shape
    rows = np.arange(chains * length)
    parent = np.where(rows % length == 0, -1, rows - 1)
    flat = (logits.reshape(len(rows), -1), rows, position + rows % length, rows // length, token_ids.ravel(), parent)
    q = draft_probs.astype(np.float32).reshape(len(rows), -1)
    return chain_step(slots, *flat, q, skip=np.full(chains, skip), trees=chains).run()


@settings(cheap, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), nodes=st.sampled_from([1, 9, 30]))
@pytest.mark.parametrize(("op", "reference"), [("TreeAccept", tree_accept), ("ChainAccept", chain_accept)])
def test_kernels_equal_references(op, reference, data, nodes, slots, logits_rows):
    """Of ChainAccept, branches without rejection have trees among the chains of the others."""
    tensors, _, _ = draw_step(data, op, slots, logits_rows, least_trees=0, nodes=nodes)
    settings_ = SamplingSlots(*(tensors.pop(name) for name in ("sampling", "seed", "stream")))
    AcceptStep(op, reference, settings_, tensors).run().assert_equals_reference()


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
    """Steps that commit the first child, and its, without asking the target."""

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
    return tree_step(logits, rows, rows, np.zeros_like(rows), equal_slots(), np.array(tokens), rows - 1)


def test_a_chain_deeper_than_64_is_accepted_whole_and_pending_without_logits():
    tokens = np.arange(200) % 50
    step = chain(tokens, (tokens + 1) % 50).run()
    assert step.accepted_count[0] == 200
    step.op(200, 0)
    assert step.kept_indices.tolist() == list(range(200))
    assert (step.kept_count[0], step.accepted_count[0]) == (200, 0)


def test_unvisited_nodes_are_not_read():
    step = chain([3, 9, 9], [7, 1, 2])
    step.tensors["logits"][1:] = np.nan
    assert step.run().committed[0] == 7


@settings(cheap, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 63, 64, 65, 1000]), kind=st.sampled_from(KINDS))
def test_kernel_residuals_equal_reference_bit_for_bit(data, vocabulary, kind, slots, logits_rows):
    """Tokens alone would hide a difference of some 2**-50."""
    settings_ = data.draw(slots(1))
    logits = data.draw(logits_rows(1, vocabulary))[0]
    weights, p = filtered_weights(logits, sampling_of(settings_.sampling, 0)), distribution(logits, settings_)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q = drafted_probs(rng, kind, p, rng.integers(vocabulary)).astype(np.float32)
    out = np.full(vocabulary, 7, np.uint64)
    native.residual(weights, q, out)
    expected = residual(target_probability(weights), draft_probability(q))
    np.testing.assert_array_equal(out, expected)
    assert np.abs(expected / 2.0**50 - np.maximum(p - np.minimum(q, 1.0), 0)).max() < 2.0**-49


def test_kernel_residuals_equal_reference_over_the_whole_range():
    """A million weights, of which some would show a difference in the last bits of a product."""
    weights = filtered_weights(np.linspace(-20, 0, 1_000_000, dtype=np.float32), Sampling(temperature=1.0))
    share = np.random.default_rng(3).random(len(weights)) * np.logspace(-9, 0.1, len(weights))
    q = (weights / weights.sum() * share).astype(np.float32)
    out = np.zeros(len(weights), np.uint64)
    native.residual(weights, q, out)
    np.testing.assert_array_equal(out, residual(target_probability(weights), draft_probability(q)))


@example(r=2**52, q=2**50, p=2**49, off=0)
@cheap
@given(r=st.integers(0, 2**53 - 1), q=st.integers(0, 2**50), p=st.integers(0, 2**50), off=st.integers(-1, 1))
def test_acceptance_is_decided_exactly(r, q, p, off):
    for bound in (p, max(0, (r * q >> 53) + off)):
        assert native.accepts(r, bound, q) == accepts(r, bound, q) == (bound > 0 and r * q <= bound * 2**53)


@cheap
@given(seed=st.integers(0, 2**32 - 1), straight=st.floats(0, 1))
def test_greedy_chains_commit_what_tree_accept_commits(seed, straight):
    """p is one-hot: the argmax is accepted and all else is corrected to it, for any q."""
    rng = np.random.default_rng(seed)
    token_ids, parent, branch, logit_indices = forest(rng, 3, 2, 8, 5, [1.0] * 3)
    logits = rng.integers(0, 4, (len(logit_indices), 5)).astype(np.float32)
    right = rng.random(len(logit_indices)) < straight
    following = np.where(right, logits.argmax(1), token_ids[logit_indices])
    token_ids[logit_indices[1:]] = following[:-1]
    q = rng.dirichlet(np.ones(5), len(logit_indices)).astype(np.float32)
    q[rng.random(len(q)) < 0.3] = np.eye(5)[rng.integers(5)]
    arrays = (logits, logit_indices, 7 + depth_of(parent), branch)
    step = chain_step(equal_slots(3), *arrays, token_ids, parent, q).run()
    step.assert_equals(tree_accept(step.tensors | vars(step.slots)))


def drawn_from(drafter, gamma, skip=0):
    """Steps whose chains are drawn from a drafter."""
    rng = np.random.default_rng(13)
    q_after = np.exp(drafter) / np.exp(drafter).sum(1, keepdims=True)

    def step(tips, slots, position):
        tokens, q = [tips], [np.full((len(tips), 6), np.nan)]
        for _ in range(gamma):
            q.append(q_after[tokens[-1]])
            tokens.append((rng.random((len(tips), 1)) >= np.cumsum(q[-1], axis=1)[:, :-1]).sum(1))
        chains = np.stack(tokens, 1)
        done = chains_of(chains, TABLE[chains], np.stack(q, 1), slots, position=position, skip=skip)
        return done.committed.reshape(chains.shape), done.accepted_count

    return step


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_of_chains_have_the_distribution_of_the_target(drafter, filters, gamma):
    slots = equal_slots(DRAWS, **filters)
    pairs, accepted = decode_two(drawn_from(DRAFTERS[drafter], gamma), slots)
    for statistic, freedom in chi_squares(pairs, slots):
        assert statistic < one_in_a_thousand(freedom)
    q = np.exp(DRAFTERS[drafter][TIP]) / np.exp(DRAFTERS[drafter][TIP]).sum()
    overlap = np.minimum(distribution(TABLE[TIP], slots), q).sum()
    assert accepted == pytest.approx(overlap, abs=4 * np.sqrt(0.25 / DRAWS))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafter", ["near", "flat", "opposite"])
def test_without_the_adjustment_they_have_not(drafter, filters):
    slots = equal_slots(DRAWS, **filters)
    pairs, _ = decode_two(drawn_from(DRAFTERS[drafter], gamma=2, skip=1), slots)
    for statistic, freedom in chi_squares(pairs, slots):
        assert statistic > 5 * one_in_a_thousand(freedom)


def small_step(
    op="ChainAccept",
    *,
    logit_indices=(0, 1, 2),
    parent=(-1, 0, 1),
    tokens=(0, 1, 1),
    q=0.25,
    skip=0,
    rule=1,
    slots=None,
):
    logits, zeros, slots = np.zeros((3, 4), np.float32), np.zeros(3, np.int64), slots or equal_slots(temperature=1.0)
    arrays = (logits, np.array(logit_indices), np.arange(3), zeros)
    if op == "TreeAccept":
        return tree_step(*arrays, slots, np.array(tokens), np.array(parent), trees=2)
    probs = np.full((3, 4), 0.25, np.float32)
    probs[2, 3] = q
    return chain_step(
        slots, *arrays, np.array(tokens), np.array(parent), probs, skip=[skip], by_rejection=[rule], trees=2
    )


MALFORMED = [
    ({"logit_indices": (0, 2, 1)}, r"logit_indices must ascend; logit_indices\[2\] is 1 after 2"),
    ({"logit_indices": (0, 1, 3)}, r"logit_indices\[2\] is 3; it must be in 0\.\.2"),
    ({"parent": (-1, 1, 1)}, r"parent\[1\] is 1; it must be in -1\.\.0"),
    ({"parent": (-1, -1, 0)}, r"the parent of new token 2 stands before the root of another tree, new token 1"),
    ({"parent": (-1, -1, -1)}, r"the step holds 3 trees, but accepted_count has room for 2"),
    ({"slots": equal_slots(temperature=-1.0)}, r"settings of branch 0 cannot be used: temperature"),
]
OF_CHAINS = [
    ({"parent": (-1, 0, 0)}, r"the parent of new token 2 is new token 0, but in a chain it is .* logit_indices, 1;"),
    ({"tokens": (0, 1, 4)}, r"token_ids\[2\] is 4; it must be in 0\.\.3"),
    ({"tokens": (0, -1, 1)}, r"token_ids\[1\] is -1"),
    *(({"q": q}, r"draft_probs\[2, 3\] is .*; a probability is") for q in (-1e-30, np.nan, -np.nan, np.inf, -np.inf)),
    ({"skip": 2}, r"skip_sample_adjustment\[0\] is 2; it must be in 0\.\.1"),
    ({"rule": 2}, r"by_rejection\[0\] is 2; it must be in 0\.\.1"),
]


@pytest.mark.parametrize(
    ("op", "wrong", "sentence"),
    [(op, *case) for op in ("TreeAccept", "ChainAccept") for case in MALFORMED]
    + [("ChainAccept", *case) for case in OF_CHAINS],
)
def test_malformed_steps_are_refused_and_nothing_is_written(op, wrong, sentence):
    step = small_step(op, **wrong)
    with pytest.raises(ValueError, match=f"{op}: .*{sentence}"):
        step.run()
    step.assert_untouched()


def test_logits_without_a_choice_are_refused_where_the_walk_meets_them():
    step = small_step(q=0.0)
    step.tensors["logits"][0] = np.nan
    with pytest.raises(ValueError, match=r"ChainAccept: row 0 of logits .* contains NaN"):
        step.run()
    for unread in (step.tensors["token_ids"], step.tensors["draft_probs"]):
        unread[0] = -5  # a root's
    step.tensors["logits"][:] = [[0, -np.inf, 0, 0], [np.nan] * 4, [np.nan] * 4]  # the first draft is rejected
    assert step.run().accepted_count[0] == 1


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("top_k", [0, 150])
def test_a_token_that_the_nucleus_leaves_out_is_never_accepted(order, top_k):
    """Of blocks of 64 tokens of which none is left, the kernel never clears the weights."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(400, 2, 256)).astype(np.float32)
    logits[:, :, :30] += 6.0  # the nucleus lies in the first block
    slots = equal_slots(400, temperature=1.3, top_k=top_k, top_p=0.5, filter_order=order)
    token_ids = np.zeros((400, 2), np.int64)
    token_ids[:, 1] = rng.integers(64, 256, 400)
    q = np.zeros_like(logits)
    q[np.arange(400), 1, token_ids[:, 1]] = 1e-3
    done = chains_of(token_ids, logits, q, slots)
    done.assert_equals_reference()
    assert (done.accepted_count == 1).all()
    assert (done.committed.reshape(400, 2)[:, 0] < 30).all()
