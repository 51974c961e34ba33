"""ChainAccept: the kernel is the reference, and what it commits has the target's distribution."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.reference import RaceKey, chain_accept, race, sample, tree_accept, uniform
from outrider.plugins.reference.chain_accept import accepts, draft_probability, residual, target_probability
from outrider.plugins.reference.choice import filtered_weights, sampling_of
from outrider.plugins.schema import Purpose
from tests.plugins.accept_step import AcceptStep, depth_of, equal_slots, forest, slots_of
from tests.plugins.drawn_pairs import (
    DRAFTERS,
    DRAWS,
    FILTERS,
    TABLE,
    TIP,
    chi_squares,
    decode_two,
    distribution,
    one_in_a_thousand,
)
from tests.properties import cheap

CHAIN_INPUTS = ("logits", "logit_indices", "positions", "branch", "token_ids", "parent", "draft_probs")


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


def drafted_probs(rng, kind, p, token):
    """q `[V]` of each kind, some only nearly distributions; `token` is the one that was drafted."""
    one_hot = np.eye(len(p))[token]
    match kind:
        case "equal":
            return p
        case "nearly equal":
            return p * (1 + rng.normal(size=len(p)) * 1e-7)
        case "faint":
            return p * 2.0 ** -rng.integers(20, 60)
        case "one-hot":
            return one_hot
        case "one-hot elsewhere":
            return np.eye(len(p))[rng.integers(len(p))]
        case "disjoint":
            return np.where(p == 0, 1.0, 0.0) / max((p == 0).sum(), 1)
        case "random":
            return rng.dirichlet(np.full(len(p), 0.3))
        case "more than one":
            return p + one_hot * rng.choice([1e-7, 0.5, 1e30])
        case "tiny":
            return one_hot * rng.choice([2.0**-50, 2.0**-51, 1e-42]) * rng.choice([1, 0])
        case _:
            return np.copysign(np.zeros(len(p)), -1.0)


KINDS = ["equal", "nearly equal", "faint", "one-hot", "one-hot elsewhere", "disjoint", "random", "more than one"]
KINDS += ["tiny", "zero"]


@settings(cheap, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 3, 64, 65, 200]), gamma=st.integers(0, 9))
def test_kernel_equals_reference(data, vocabulary, gamma, slots, logits_rows):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(0, 3))
    token_ids, parent, branch, logit_indices = forest(rng, trees, 3, gamma + 1, vocabulary, straight=1.0)
    logits = data.draw(logits_rows(len(logit_indices), vocabulary))
    settings_ = data.draw(slots(max(trees, 1)))
    q = np.full(logits.shape, np.nan, np.float32)  # a root's is not read
    for place, row in enumerate(logit_indices.tolist()):
        if parent[row] in logit_indices:
            p = distribution(logits[place - 1], settings_, branch[row])
            if rng.random() < 0.6:  # often a token that may be accepted
                token_ids[row] = rng.choice(vocabulary, p=p)
            q[place] = drafted_probs(rng, data.draw(st.sampled_from(KINDS)), p, token_ids[row])
    skip = rng.integers(0, 2, max(trees, 1))
    positions = 2**33 + depth_of(parent)
    step = chain_step(settings_, logits, logit_indices, positions, branch, token_ids, parent, q, skip=skip)
    step.run().assert_equals_reference()


@settings(cheap, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), vocabulary=st.sampled_from([2, 5, 65]))
def test_trees_of_other_branches_are_walked_as_tree_accept_walks_them(data, vocabulary, slots, logits_rows):
    """Chains of branch 0 stand between trees of others, and each has what it has alone, by its own rule."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    settings_, rules = data.draw(slots(4)), np.array([1, 0, 1, 0])
    parts = [forest(rng, 1, 2, 6, vocabulary, straight=1.0 if rule else 0.4) for rule in rules]
    joined, start = {name: [] for name in ("token_ids", "parent", "branch", "logit_indices")}, 0
    for branch, (token_ids, parent, _, logit_indices) in enumerate(parts):
        joined["token_ids"].append(token_ids)
        joined["parent"].append(np.where(parent < 0, -1, parent + start))
        joined["branch"].append(np.full(len(parent), branch))
        joined["logit_indices"].append(logit_indices + start)
        start += len(parent)
    token_ids, parent, branch, logit_indices = (np.concatenate(each) for each in joined.values())
    logits = data.draw(logits_rows(len(logit_indices), vocabulary))
    q = rng.dirichlet(np.ones(vocabulary), len(logit_indices)).astype(np.float32)
    q[rules[branch[logit_indices]] == 0] = np.nan  # is not read
    positions = 5 + depth_of(parent)
    step = chain_step(
        settings_, logits, logit_indices, positions, branch, token_ids, parent, q, by_rejection=rules
    ).run()
    step.assert_equals_reference()
    of_trees = rules[branch[logit_indices]] == 0
    assert np.isnan(step.trials[of_trees]).all()
    walked = tree_accept(logits, logit_indices, positions, branch, settings_, token_ids, parent)
    np.testing.assert_array_equal(step.committed[of_trees], walked.committed[of_trees])
    np.testing.assert_array_equal(step.accepted_count[[1, 3]], walked.accepted_count[[1, 3]])


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999, "top_k": 3000}])
@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_kernel_equals_reference_on_a_big_vocabulary(filters, noise):
    rng = np.random.default_rng(1)
    slots = equal_slots(4, temperature=0.8, **filters)
    logits = (rng.normal(size=(4, 3, 50_257)) * 2).astype(np.float32)
    drafter = logits + (rng.normal(size=logits.shape) * noise).astype(np.float32)
    q = np.zeros_like(logits)
    token_ids = np.zeros((4, 3), np.int64)
    for chain, place in np.ndindex(4, 2):
        q[chain, place + 1] = distribution(drafter[chain, place], slots)
        token_ids[chain, place + 1] = sample(drafter[chain, [place]], *np.zeros((3, 1), np.int64), slots)[0]
    chains_of(token_ids, logits, q, slots).assert_equals_reference()


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
    """So many that a difference in the last bits of a product would show through the rounding down."""
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
    """p is one-hot: the argmax is accepted and all else is corrected to it, whatever q is."""
    rng = np.random.default_rng(seed)
    token_ids, parent, branch, logit_indices = forest(rng, 3, 2, 8, 5, straight=1.0)
    logits = rng.integers(0, 4, (len(logit_indices), 5)).astype(np.float32)
    right = rng.random(len(logit_indices)) < straight
    following = np.where(right, logits.argmax(1), token_ids[logit_indices])
    token_ids[logit_indices[1:]] = following[:-1]
    q = rng.dirichlet(np.ones(5), len(logit_indices)).astype(np.float32)
    q[rng.random(len(q)) < 0.3] = np.eye(5)[rng.integers(5)]
    arrays = (logits, logit_indices, 7 + depth_of(parent), branch)
    step = chain_step(equal_slots(3), *arrays, token_ids, parent, q).run()
    step.assert_equals(tree_accept(*arrays, equal_slots(3), token_ids, parent))


def test_without_a_draft_the_bonus_is_what_sample_draws():
    rng = np.random.default_rng(5)
    logits, slots = rng.normal(size=(50, 30)).astype(np.float32), equal_slots(50, temperature=0.9, top_p=0.8)
    step = chains_of(np.zeros((50, 1), np.int64), logits, np.full_like(logits, np.nan), slots)
    rows = np.arange(50)
    np.testing.assert_array_equal(step.committed, sample(logits, rows, np.full(50, 100), rows, slots))
    assert (step.accepted_count == 1).all()


def test_tokens_drawn_from_the_target_itself_are_all_accepted():
    tokens = np.random.default_rng(6).integers(0, 4, (40, 6))
    flat = np.zeros((40, 6, 4), np.float32)
    step = chains_of(tokens, flat, flat + 0.25, equal_slots(40, temperature=1.0))
    assert (step.accepted_count == 6).all()
    np.testing.assert_array_equal(step.committed.reshape(40, 6)[:, :5], tokens[:, 1:])
    assert step.kept_count[0] == 240


def test_tokens_that_the_target_filters_are_never_accepted_and_cost_nothing():
    """q lies where p does not, so the residual is p: the correction is the token that plain decoding draws."""
    logits = np.tile(np.float32([0, 0, 0, 0, -9, -9, -9, -9]), (200, 2, 1))
    q = np.tile(np.float32([0, 0, 0, 0, 1, 1, 1, 1]) / 4, (200, 2, 1))
    tokens, slots = np.full((200, 2), 6), equal_slots(200, temperature=1.0, top_k=4)
    step = chains_of(tokens, logits, q, slots)
    rows = np.arange(200)
    np.testing.assert_array_equal(step.committed[::2], sample(logits[:, 0], rows, np.full(200, 100), rows, slots))
    assert (step.committed[1::2] == -1).all()
    assert (step.accepted_count == 1).all()


@pytest.mark.parametrize("q_other", [0.0, 1.0])
def test_a_token_is_accepted_by_its_own_number_at_its_own_position(q_other):
    """p is a half for both tokens, q is 1 for the drafted: accepted iff r <= 1/2. The rest is the other token's, or,
    where q leaves nothing, drawn from p."""
    chains = 300
    tokens, q = np.zeros((chains, 2), np.int64), np.tile(np.float32([1, q_other]), (chains, 2, 1))
    slots = equal_slots(chains, temperature=1.0, seed=9)
    step = chains_of(tokens, np.zeros((chains, 2, 2), np.float32), q, slots, position=20)
    accepted = [uniform(9, stream, 21, Purpose.REJECTION) <= 2**52 for stream in range(chains)]
    assert (step.accepted_count == np.where(accepted, 2, 1)).all()
    assert 100 < sum(accepted) < 200
    half = np.full(2, 2**39, np.uint64)
    drawn = [race(half, RaceKey(9, stream, 21, Purpose.TARGET)) if q_other else 1 for stream in range(chains)]
    assert (step.committed[::2] == np.where(accepted, 0, drawn)).all()


def test_the_adjustment_is_skipped_by_branch():
    chains = 400
    tokens, q = np.zeros((chains, 2), np.int64), np.tile(np.float32([1, 0]), (chains, 2, 1))
    logits, slots = np.zeros((chains, 2, 2), np.float32), equal_slots(chains, temperature=1.0)
    adjusted, skipped = (chains_of(tokens, logits, q, slots, skip=skip) for skip in (0, 1))
    rejected = adjusted.accepted_count == 1
    assert (skipped.accepted_count == adjusted.accepted_count).all()
    assert (adjusted.committed[::2][rejected] == 1).all()
    rows = np.arange(chains)
    plain = sample(logits[:, 0], rows, np.full(chains, 100), rows, slots)
    assert (skipped.committed[::2][rejected] == plain[rejected]).all()
    assert (plain[rejected] == 0).any()


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
def test_tokens_have_the_distribution_of_the_target(drafter, filters, gamma):
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


# What is refused.


def small_step(
    *, logit_indices=(0, 1, 2), parent=(-1, 0, 1), tokens=(0, 1, 1), q=0.25, skip=0, rule=1, trees=2, slots=None
):
    logits, zeros = np.zeros((3, 4), np.float32), np.zeros(3, np.int64)
    arrays = (logits, np.array(logit_indices), np.arange(3), zeros, np.array(tokens), np.array(parent))
    probs = np.full((3, 4), 0.25, np.float32)
    probs[2, 3] = q
    slots = slots or equal_slots(temperature=1.0)
    return chain_step(slots, *arrays, probs, skip=[skip], by_rejection=[rule], trees=trees)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"logit_indices": (0, 2, 1)}, r"logit_indices must ascend; logit_indices\[2\] is 1 after 2"),
        ({"logit_indices": (0, 1, 3)}, r"logit_indices\[2\] is 3; it must be in 0\.\.2"),
        ({"parent": (-1, 1, 1)}, r"parent\[1\] is 1; it must be in -1\.\.0"),
        ({"parent": (-1, -1, 0)}, r"the parent of new token 2 stands before the root of another tree, new token 1"),
        ({"parent": (-1, -1, -1)}, r"the step holds 3 trees, but accepted_count has room for 2"),
        (
            {"parent": (-1, 0, 0)},
            r"the parent of new token 2 is new token 0, but in a chain it is .* logit_indices, 1;",
        ),
        ({"tokens": (0, 1, 4)}, r"token_ids\[2\] is 4; it must be in 0\.\.3"),
        ({"tokens": (0, -1, 1)}, r"token_ids\[1\] is -1"),
        ({"q": -1e-30}, r"draft_probs\[2, 3\] is -.*; a probability is finite and at least 0"),
        ({"q": np.nan}, r"draft_probs\[2, 3\] is -?nan"),
        ({"q": -np.nan}, r"draft_probs\[2, 3\] is -?nan"),
        ({"q": np.inf}, r"draft_probs\[2, 3\] is inf"),
        ({"q": -np.inf}, r"draft_probs\[2, 3\] is -inf"),
        ({"skip": 2}, r"skip_sample_adjustment\[0\] is 2; it must be in 0\.\.1"),
        ({"skip": -1}, r"skip_sample_adjustment\[0\] is -1"),
        ({"rule": 2}, r"by_rejection\[0\] is 2; it must be in 0\.\.1"),
        ({"slots": equal_slots(temperature=-1.0)}, r"settings of branch 0 cannot be used: temperature"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(wrong, sentence):
    step = small_step(**wrong)
    with pytest.raises(ValueError, match=f"ChainAccept: .*{sentence}"):
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


def test_settings_of_branches_without_a_chain_are_not_looked_at():
    slots = slots_of([Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=np.nan)])
    zeros = np.zeros(1, np.int64)
    arrays = (np.zeros((1, 4), np.float32), zeros, zeros, zeros, zeros, zeros - 1, np.zeros((1, 4), np.float32))
    assert chain_step(slots, *arrays, skip=[0, 7]).run().accepted_count[0] == 1


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
