"""The CUDA kernels of drafting give what the references give: run block by block on the CPU, and on a GPU (`-m gpu`).

Tokens, orders and trees are the references'; probabilities, within the rounding of float32.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins.reference import tree_expand
from tests.plugins.drafting import (
    BRANCHES,
    DOUBT,
    apart,
    check_expand,
    check_frontier,
    check_rerank,
    check_sample,
    check_sample_is_the_reference,
    expand_inputs,
    expand_outputs,
    noise_of,
    rerank_inputs,
    rerank_outputs,
    sample_outputs,
    settings_in,
    settings_of,
)
from tests.plugins.test_cuda_kernels import FEW
from tests.plugins.test_tree_ops import candidates, grown

GREEDY = (0.0, 0, 1.0, 0.0)


def run(kernels, op, inputs, outputs, attributes=None, **how):
    """The outputs, of two launches on the same workspace that agree to the bit."""
    first = {name: array.copy() for name, array in outputs.items()}
    call = kernels.create(op, inputs | first, attributes or {}, **how)
    assert call() == 0
    found = {name: array.copy() for name, array in first.items()}
    for name, array in outputs.items():
        first[name][...] = array
    assert call() == 0
    for name, array in first.items():
        np.testing.assert_array_equal(found[name], array)
    return found


def expand(kernels, inputs, top_k, **how):
    return run(kernels, "TreeExpand", inputs, expand_outputs(inputs, top_k), {"top_k": top_k, **DOUBT}, **how)


def scores(random, *shape):
    return -random.exponential(size=shape).astype(np.float32)


@FEW
@given(data=st.data(), trees=st.integers(1, 3), nodes=st.integers(1, 5), vocabulary=st.sampled_from([1, 4, 65, 300]))
def test_greedy_children_are_the_likeliest_tokens(kernels, data, trees, nodes, vocabulary, logits_rows) -> None:
    top_k = data.draw(st.sampled_from([k for k in (1, 3, 4, 16, 64, vocabulary) if k <= min(vocabulary, 64)]))
    logits = data.draw(logits_rows(trees * nodes, vocabulary)).reshape(trees, nodes, vocabulary)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    inputs = expand_inputs(logits, scores(random, trees, nodes), [GREEDY] * trees, noise_of(random, trees, vocabulary))
    found = expand(kernels, inputs, top_k)
    if np.isposinf(logits).any():  # all of the probability is there, and the reference has no number for it
        best = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k].reshape(trees, -1)
        np.testing.assert_array_equal(found["token"], best)
        np.testing.assert_array_equal(found["candidate_score"][:, ::top_k], inputs["score"])
        check_frontier(found, top_k)
    else:
        check_expand(inputs, found, top_k)


@FEW
@given(
    data=st.data(), branches=BRANCHES, nodes=st.integers(1, 4), vocabulary=st.sampled_from([5, 63, 64, 65, 300, 1500]),
    smooth=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_children_of_a_sampling_branch_are_the_likeliest_with_the_targets_noise(
    kernels, data, branches, nodes, vocabulary, smooth, seed
) -> None:
    top_k = data.draw(st.sampled_from([1, 3, 4, 5] if vocabulary == 5 else [1, 4, 16, 60]))
    random, shape = np.random.default_rng(seed), (len(branches), nodes, vocabulary)
    logits = (random.normal(size=shape) * 3).astype(np.float32) if smooth else apart(random, shape)
    noise = noise_of(random, len(branches), vocabulary)
    inputs = expand_inputs(logits, scores(random, len(branches), nodes), branches, noise)
    check_expand(inputs, expand(kernels, inputs, top_k), top_k)


def test_of_equals_the_lower_token_and_the_lower_candidate_come_first(kernels) -> None:
    logits, score = np.zeros((2, 3, 100), np.float32), np.full((2, 3), -1.0, np.float32)
    noise = np.full((2, 100), 2.0, np.float32)
    noise[1, 40:60] = 1.0
    inputs = expand_inputs(logits, score, [GREEDY, (0.7, 0, 1.0, 0.0)], noise)
    found = expand(kernels, inputs, 4)
    assert found["token"].tolist() == [[0, 1, 2, 3] * 3, [40, 41, 42, 43] * 3]
    assert found["frontier"].tolist() == [[0, 1, 2, 3]] * 2


def test_tokens_too_faint_to_be_counted_are_weighed_all_the_same(kernels) -> None:
    """In units of 2^-40 none has a weight, nor a share of the fastest token's pace."""
    random = np.random.default_rng(4)
    logits = np.append(-28 - apart(random, (30,)), 0.0).reshape(1, 1, 31).astype(np.float32)
    inputs = expand_inputs(logits, np.zeros((1, 1), np.float32), [(1.0, 0, 1.0, 0.0)], noise_of(random, 1, 31))
    found = expand(kernels, inputs, 31)
    expected = tree_expand(logits, inputs["score"], settings_in(inputs), 31, **DOUBT)
    np.testing.assert_array_equal(found["token"], expected.token)
    np.testing.assert_allclose(found["candidate_score"], expected.score, atol=1e-3)


@pytest.mark.parametrize("doubt", [0.01, 0.07, 0.3, 0.93])
def test_a_certain_child_scores_no_more_than_its_parent(kernels, doubt) -> None:
    """Whatever its probability is, calculated in float32."""
    logits, score = np.array([[[0, 90, 0]]], np.float32), np.zeros((1, 1), np.float32)
    inputs = expand_inputs(logits, score, [(1.0, 0, 1.0, 0.0)], np.array([[0.3, 0.7, 1.9]], np.float32))
    found = run(kernels, "TreeExpand", inputs, expand_outputs(inputs, 1), {"top_k": 1, "doubt": doubt})
    assert found["token"].item() == 1
    assert -1e-6 < found["candidate_score"].item() <= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("together", [True, False])
def test_the_best_are_found_however_many_one_thread_has(fast_kernels, temperature, together) -> None:
    """More than fit into shared memory lie above the best of most threads, next to each other or a stride apart."""
    vocabulary = 152_064
    random = np.random.default_rng(3)
    logits = random.normal(size=(1, 1, vocabulary)).astype(np.float32)
    high = np.arange(70_000, 72_376) if together else np.arange(0, vocabulary, 64)
    logits[0, 0, high] = 20 + random.permutation(len(high)) / 512
    inputs = expand_inputs(logits, scores(random, 1, 1), [(temperature, 0, 0.95, 0.0)], noise_of(random, 1, vocabulary))
    check_expand(inputs, expand(fast_kernels, inputs, 16), 16)


@pytest.mark.parametrize("branch", [GREEDY, (0.8, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.02)])
def test_a_big_vocabulary(fast_kernels, branch) -> None:
    random = np.random.default_rng(1)
    logits = (random.normal(size=(1, 2, 50_257)) * 2).astype(np.float32)
    inputs = expand_inputs(logits, scores(random, 1, 2), [branch], noise_of(random, 1, 50_257))
    check_expand(inputs, expand(fast_kernels, inputs, 10), 10)


@FEW
@given(
    top_k=st.sampled_from([1, 3, 4]),
    temperature=st.sampled_from([0.0, -1.0, 1e-46, 1e-40, 1e-10, 1.0, 3e38, np.inf, np.nan]),
    bad=st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38]),
    top_p=st.sampled_from([0.9, -1.0, 2.0, np.nan]),
    min_p=st.sampled_from([0.0, 0.1, -1.0, 2.0, np.nan]),
    noise=st.sampled_from([0.3, 0.0, 2.0**-34, -5.0, 1e38, np.inf, np.nan]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_input_makes_a_child_score_above_its_parent_or_not_at_all(
    kernels, top_k, temperature, bad, top_p, min_p, noise, seed
) -> None:
    """The tree's shape rests on it, and so the positions at which the target verifies."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(1, 3, 20)).astype(np.float32)
    logits[random.random(logits.shape) < random.choice([0.0, 0.1, 1.0])] = bad
    every = noise_of(random, 1, 20)
    every[random.random(every.shape) < 0.3] = noise
    inputs = expand_inputs(logits, scores(random, 1, 3), [(temperature, 5, top_p, min_p)], every)
    found = expand(kernels, inputs, top_k)
    check_frontier(found, top_k)
    assert (found["candidate_score"] <= np.repeat(inputs["score"], top_k, axis=1)).all()
    assert ((found["token"] >= 0) & (found["token"] < 20)).all()
    assert all(len(set(children)) == top_k for children in found["token"].reshape(-1, top_k).tolist())


@FEW
@given(
    branches=BRANCHES,
    nodes=st.integers(1, 3),
    vocabulary=st.sampled_from([1, 5, 64, 300]),
    seed=st.integers(0, 2**32 - 1),
)
def test_draft_sample(kernels, branches, nodes, vocabulary, seed) -> None:
    random = np.random.default_rng(seed)
    settings_ = settings_of(branches, noise_of(random, len(branches), vocabulary))
    inputs = {"logits": apart(random, (len(branches), nodes, vocabulary)), **settings_}
    found = run(kernels, "DraftSample", inputs, sample_outputs(inputs))
    check_sample(inputs, found)
    check_sample_is_the_reference(inputs, found)


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_cuts_around_the_64_likeliest(kernels, top_k, top_p) -> None:
    random = np.random.default_rng(8)
    settings_ = settings_of([(2.5, top_k, top_p, 0.0), (9.0, top_k, top_p, 0.0)], noise_of(random, 2, 300))
    inputs = {"logits": apart(random, (2, 1, 300)), **settings_}
    check_sample_is_the_reference(inputs, run(kernels, "DraftSample", inputs, sample_outputs(inputs)))


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 3, 65, 300]), seed=st.integers(0, 2**32 - 1))
def test_draft_sample_draws_from_what_it_says_whatever_the_logits(
    kernels, data, vocabulary, seed, slots, logits_rows
) -> None:
    drawn, logits = data.draw(slots(2)), data.draw(logits_rows(6, vocabulary)).reshape(2, 3, vocabulary)
    if data.draw(st.booleans()):
        logits[1, 1] = data.draw(st.sampled_from([np.nan, -np.inf]))
    noise = noise_of(np.random.default_rng(seed), 2, vocabulary)
    inputs = {"logits": logits, **settings_of(drawn.sampling, noise)}
    check_sample(inputs, run(kernels, "DraftSample", inputs, sample_outputs(inputs)))


@pytest.mark.parametrize("branch", [GREEDY, (0.8, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.02)])
def test_draft_sample_of_a_big_vocabulary(kernels, branch) -> None:
    random = np.random.default_rng(5)
    inputs = {
        "logits": (random.normal(size=(1, 1, 50_257)) * 2).astype(np.float32),
        **settings_of([branch], noise_of(random, 1, 50_257)),
    }
    found = run(kernels, "DraftSample", inputs, sample_outputs(inputs))
    check_sample(inputs, found)
    check_sample_is_the_reference(inputs, found)


@FEW
@given(shape=candidates(), trees=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.4, 1.0]))
def test_tree_rerank(kernels, shape, trees, zeros) -> None:
    k, depth, nodes, seed = shape
    inputs = rerank_inputs(grown(k, depth, trees, seed, zeros))
    found = run(kernels, "TreeRerank", inputs, rerank_outputs(trees, nodes), {"nodes": nodes})
    check_rerank(inputs, found, nodes)


@FEW
@given(count=st.integers(1, 300), levels=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_of_candidates_at_the_cut_the_first_are_chosen(kernels, count, levels, seed, data) -> None:
    random, nodes = np.random.default_rng(seed), data.draw(st.integers(2, count + 1))
    score = -random.integers(0, levels, (2, count)).astype(np.float32)
    inputs = rerank_inputs(
        (random.integers(0, 99, (2, count)), score, np.full((2, count), -1), np.ones(count, np.int64))
    )
    found = run(kernels, "TreeRerank", inputs, rerank_outputs(2, nodes), {"nodes": nodes})
    check_rerank(inputs, found, nodes)


@pytest.mark.parametrize(
    ("k", "depth", "nodes"), [(10, 7, 60), (10, 7, 711), (16, 15, 64), (16, 15, 3857), (1, 0, 2), (1, 7, 3)]
)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 1.0])
def test_big_trees_and_chains(kernels, k, depth, nodes, zeros) -> None:
    inputs = rerank_inputs(grown(k, depth, 2, 7, zeros))
    inputs["candidate_score"][0, -1] = -np.inf  # what a masked token leaves
    found = run(kernels, "TreeRerank", inputs, rerank_outputs(2, nodes), {"nodes": nodes})
    check_rerank(inputs, found, nodes)


@pytest.mark.parametrize("kernels", ["emulated", pytest.param("ptx", marks=pytest.mark.long)], indirect=True)
def test_how_many_threads_a_block_has_leaves_no_trace(kernels) -> None:
    """A GPU runs as many as the table says."""
    random = np.random.default_rng(2)
    branches = [GREEDY, (0.7, 0, 1.0, 0.05), (1.3, 40, 0.8, 0.0)]
    noise = noise_of(random, 3, 777)
    logits = (random.normal(size=(3, 4, 777)) * 4).astype(np.float32)
    logits[:, 1] = np.round(logits[:, 1])
    grow = expand_inputs(logits, scores(random, 3, 4), branches, noise)
    sample = {"logits": logits, **settings_of(branches, noise)}
    rerank = rerank_inputs(grown(4, 4, 3, 9, 0.5))

    def everything(threads):
        found = [
            expand(kernels, grow, 9, most_threads=threads),
            run(kernels, "DraftSample", sample, sample_outputs(sample), most_threads=threads),
            run(kernels, "TreeRerank", rerank, rerank_outputs(3, 20), {"nodes": 20}, most_threads=threads),
        ]
        return [(name, array) for outputs in found for name, array in outputs.items()]

    alone = everything(1)
    for threads in (3, 31, 64):
        for (name, array), (_, expected) in zip(everything(threads), alone, strict=True):
            np.testing.assert_array_equal(array, expected, err_msg=f"{name} of {threads} threads")
