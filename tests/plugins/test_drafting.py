"""Ops of drafting give what the references give, as ONNX Runtime, the CUDA kernels and TensorRT's plugins run them.

Tokens, orders and trees are the references'; probabilities, within the rounding of float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.compiler.lowering.functions import unbranch
from outrider.plans.sampling import Sampling
from outrider.plugins.onnx_ops import FUNCTIONS
from outrider.plugins.ops import OPS
from outrider.plugins.ops.tree_expand import DraftSettings, chosen_log_probs, tree_expand
from tests.plugins.conftest import OP_KERNELS, kernels_of
from tests.plugins.drafting import (
    BRANCHES,
    DOUBT,
    GREEDY,
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
from tests.plugins.onnx_node import FLOAT, INT, body_session, kernel_session
from tests.plugins.test_cuda_kernels import FEW

BODY, WITHOUT_IFS, KERNEL = FORMS = ("body", "body without Ifs", "kernel of the CPU")


def unbranched(function: onnx.FunctionProto) -> onnx.FunctionProto:
    made = ir.serde.deserialize_function(function)
    assert any(node.op_type == "If" for node in made)
    unbranch(made)
    assert not any(node.op_type == "If" for node in made)
    return ir.serde.serialize_function(made)


@cache
def engine_of(form: str, op: str, **attributes: float) -> ort.InferenceSession:
    inputs, outputs = (
        tuple((spec.name, FLOAT if "float32" in spec.dtype else INT, len(spec.shape)) for spec in specs)
        for specs in (OPS[op].schema.inputs, OPS[op].schema.outputs)
    )
    if form == KERNEL:
        return kernel_session(op, inputs, outputs, 1, **attributes)
    body = unbranched(FUNCTIONS[op]()) if form == WITHOUT_IFS else None
    return body_session(op, inputs, outputs, body=body, **attributes)


class OnnxForm:
    """Ops in ONNX Runtime in one of FORMS, bound as the emulator binds them."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.tolerance = 3e-7 if form == KERNEL else 1e-5  # of greedy scores: bodies sum in float32

    def create(self, op: str, tensors: dict[str, NDArray[Any]], attributes: dict[str, float]) -> Any:
        if (self.form, op) in ((KERNEL, "DraftSample"), (WITHOUT_IFS, "TreeRerank")):
            pytest.skip(f"{op} has no {self.form}")

        def call() -> int:
            engine = engine_of(self.form, op, **attributes)
            found = engine.run(None, {spec.name: tensors[spec.name] for spec in OPS[op].schema.inputs})
            for spec, array in zip(OPS[op].schema.outputs, found, strict=True):
                tensors[spec.name][...] = array
            return 0

        return call


@pytest.fixture(scope="module", params=[*FORMS, *OP_KERNELS])
def drafters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return OnnxForm(request.param) if request.param in FORMS else kernels_of(request, tmp_path_factory)


def run(kernels, op, inputs, outputs, attributes=None, **how):
    """The outputs, of two launches on the same workspace that agree to the bit."""
    own, found = {name: array.copy() for name, array in outputs.items()}, []
    call = kernels.create(op, inputs | own, attributes or {}, **how)
    for _ in range(2):
        for name, array in outputs.items():
            own[name][...] = array
        assert call() == 0
        found.append({name: array.copy() for name, array in own.items()})
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)
    return found[0]


def expand(kernels, inputs, top_k, **how):
    return run(kernels, "TreeExpand", inputs, expand_outputs(inputs, top_k), {"top_k": top_k, **DOUBT}, **how)


def sample(kernels, inputs, **how):
    found = run(kernels, "DraftSample", inputs, sample_outputs(inputs), **how)
    check_sample(inputs, found)
    return found


def scores(random, *shape):
    return -random.exponential(size=shape).astype(np.float32)


@FEW
@given(data=st.data(), trees=st.integers(1, 3), nodes=st.integers(1, 5), vocabulary=st.sampled_from([1, 4, 65, 300]))
def test_greedy_children_are_the_likeliest_tokens(drafters, data, trees, nodes, vocabulary, logits_rows) -> None:
    top_k = data.draw(st.sampled_from([k for k in (1, 3, 4, 16, 64, vocabulary) if k <= min(vocabulary, 64)]))
    logits = data.draw(logits_rows(trees * nodes, vocabulary)).reshape(trees, nodes, vocabulary)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    inputs = expand_inputs(logits, scores(random, trees, nodes), [GREEDY] * trees, noise_of(random, trees, vocabulary))
    found = expand(drafters, inputs, top_k)
    if np.isposinf(logits).any():  # all of the probability is there, and neither reference nor bodies have a number
        if getattr(drafters, "form", KERNEL) != KERNEL:
            return
        best = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k].reshape(trees, -1)
        np.testing.assert_array_equal(found["token"], best)
        np.testing.assert_array_equal(found["candidate_score"][:, ::top_k], inputs["score"])
        check_frontier(found, top_k)
    else:
        check_expand(inputs, found, top_k, getattr(drafters, "tolerance", 3e-7))


@FEW
@given(
    data=st.data(), branches=BRANCHES, nodes=st.integers(1, 4), vocabulary=st.sampled_from([5, 63, 64, 65, 300, 1500]),
    smooth=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_children_of_a_sampling_branch_are_the_likeliest_with_the_targets_noise(
    drafters, data, branches, nodes, vocabulary, smooth, seed
) -> None:
    top_k = data.draw(st.sampled_from([1, 3, 4, 5] if vocabulary == 5 else [1, 4, 16, 60]))
    random, shape = np.random.default_rng(seed), (len(branches), nodes, vocabulary)
    logits = (random.normal(size=shape) * 3).astype(np.float32) if smooth else apart(random, shape)
    noise = noise_of(random, len(branches), vocabulary)
    inputs = expand_inputs(logits, scores(random, len(branches), nodes), branches, noise)
    check_expand(inputs, expand(drafters, inputs, top_k), top_k, getattr(drafters, "tolerance", 3e-7))


def test_of_equals_the_lower_token_and_the_lower_candidate_come_first(drafters) -> None:
    logits, score = np.zeros((2, 3, 100), np.float32), np.full((2, 3), -1.0, np.float32)
    noise = np.full((2, 100), 2.0, np.float32)
    noise[1, 40:60] = 1.0
    inputs = expand_inputs(logits, score, [GREEDY, (0.7, 0, 1.0, 0.0)], noise)
    found = expand(drafters, inputs, 4)
    assert found["token"].tolist() == [[0, 1, 2, 3] * 3, [40, 41, 42, 43] * 3]
    assert found["frontier"].tolist() == [[0, 1, 2, 3]] * 2


def test_tokens_too_faint_to_be_counted_are_weighed_all_the_same(drafters) -> None:
    """In units of 2^-40 none has a weight, nor a share of the fastest token's pace."""
    random = np.random.default_rng(4)
    logits = np.append(-28 - apart(random, (30,)), 0.0).reshape(1, 1, 31).astype(np.float32)
    inputs = expand_inputs(logits, np.zeros((1, 1), np.float32), [(1.0, 0, 1.0, 0.0)], noise_of(random, 1, 31))
    found = expand(drafters, inputs, 31)
    expected = tree_expand(logits, inputs["score"], settings_in(inputs), 31, **DOUBT)
    np.testing.assert_array_equal(found["token"], expected.token)
    np.testing.assert_allclose(found["candidate_score"], expected.score, atol=1e-3)


@pytest.mark.parametrize("doubt", [0.01, 0.07, 0.3, 0.93])
def test_a_certain_child_scores_no_more_than_its_parent(drafters, doubt) -> None:
    """Of any probability, calculated in float32."""
    logits, score = np.array([[[0, 90, 0]]], np.float32), np.zeros((1, 1), np.float32)
    inputs = expand_inputs(logits, score, [(1.0, 0, 1.0, 0.0)], np.array([[0.3, 0.7, 1.9]], np.float32))
    found = run(drafters, "TreeExpand", inputs, expand_outputs(inputs, 1), {"top_k": 1, "doubt": doubt})
    assert found["token"].item() == 1
    assert -1e-6 < found["candidate_score"].item() <= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("together", [True, False])
def test_the_best_are_found_where_one_thread_has_most_of_them(fast_kernels, temperature, together) -> None:
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
    logits, noise = (random.normal(size=(1, 2, 50_257)) * 2).astype(np.float32), noise_of(random, 1, 50_257)
    inputs = expand_inputs(logits, scores(random, 1, 2), [branch], noise)
    check_expand(inputs, expand(fast_kernels, inputs, 10), 10)
    inputs = {"logits": logits, **settings_of([branch], noise)}
    check_sample_is_the_reference(inputs, sample(fast_kernels, inputs))


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
    drafters, top_k, temperature, bad, top_p, min_p, noise, seed
) -> None:
    """The tree's shape rests on it, and so the positions at which the target verifies."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(1, 3, 20)).astype(np.float32)
    logits[random.random(logits.shape) < random.choice([0.0, 0.1, 1.0])] = bad
    every = noise_of(random, 1, 20)
    every[random.random(every.shape) < 0.3] = noise
    inputs = expand_inputs(logits, scores(random, 1, 3), [(temperature, 5, top_p, min_p)], every)
    found = expand(drafters, inputs, top_k)
    check_frontier(found, top_k)
    assert (found["candidate_score"] <= np.repeat(inputs["score"], top_k, axis=1)).all()
    assert ((found["token"] >= 0) & (found["token"] < 20)).all()
    assert all(len(set(children)) == top_k for children in found["token"].reshape(-1, top_k).tolist())


def test_probabilities_are_those_of_a_disturbed_race() -> None:
    """How often a target whose log-probabilities are off by Gumbel noise, or that is unrelated, chooses each token."""
    random, doubt, runs = np.random.default_rng(0), 0.3, 400_000
    logits = np.array([0.0, 2.0, 1.0, -1.0, 1.5])
    q = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    noise = np.array([[0.3, 2.5, 0.9, 0.01, 1.1]])
    raced = np.where(logits >= 1.0, logits / 0.8 - np.log(noise[0]), -np.inf) + random.gumbel(size=(runs, 5))
    found = (1 - doubt) * np.bincount(raced.argmax(1), minlength=5) / runs + doubt * q
    sampling = DraftSettings(noise, np.array([Sampling(temperature=0.8, top_k=3)]))
    expected = np.exp(chosen_log_probs(logits, sampling, 0, doubt))
    np.testing.assert_allclose(found, expected, atol=4e-3)  # 5 standard deviations of 400,000 draws


def test_a_drafter_that_is_the_target_drafts_the_targets_choice(drafters) -> None:
    """Where the winner has more than 5/7 of all paces: at a doubt of 0.3, that is more than all others have."""
    random = np.random.default_rng(1)
    logits = (random.normal(size=(200, 1, 30)) * 2).astype(np.float32)
    branches, score = [(0.7, 0, 1.0, 0.0)] * 200, np.zeros((200, 1), np.float32)
    inputs = expand_inputs(logits, score, branches, noise_of(random, 200, 30))
    found = expand(drafters, inputs, 1)["token"]
    pace = np.exp(logits[:, 0] / 0.7) / inputs["noise"]
    clear = pace.max(1) > 5 / 7 * pace.sum(1)
    assert clear.sum() > 50
    np.testing.assert_array_equal(found[clear, 0], pace[clear].argmax(1))


@FEW
@given(
    branches=BRANCHES,
    nodes=st.integers(1, 3),
    vocabulary=st.sampled_from([1, 5, 64, 300]),
    seed=st.integers(0, 2**32 - 1),
)
def test_draft_sample(drafters, branches, nodes, vocabulary, seed) -> None:
    random = np.random.default_rng(seed)
    settings_ = settings_of(branches, noise_of(random, len(branches), vocabulary))
    inputs = {"logits": apart(random, (len(branches), nodes, vocabulary)), **settings_}
    check_sample_is_the_reference(inputs, sample(drafters, inputs))


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 300])
def test_cuts_around_the_64_likeliest(drafters, top_k) -> None:
    random = np.random.default_rng(8)
    branches = [(temperature, top_k, top_p, 0.0) for temperature in (2.5, 9.0) for top_p in (1.0, 0.6)]
    inputs = {"logits": apart(random, (4, 1, 300)), **settings_of(branches, noise_of(random, 4, 300))}
    check_sample_is_the_reference(inputs, sample(drafters, inputs))


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 3, 65, 300]), seed=st.integers(0, 2**32 - 1))
def test_draft_sample_draws_from_the_distribution_that_it_gives_of_any_logits(
    op_kernels, data, vocabulary, seed, slots, logits_rows
) -> None:
    drawn, logits = data.draw(slots(2)), data.draw(logits_rows(6, vocabulary)).reshape(2, 3, vocabulary)
    if data.draw(st.booleans()):
        logits[1, 1] = data.draw(st.sampled_from([np.nan, -np.inf]))
    noise = noise_of(np.random.default_rng(seed), 2, vocabulary)
    sample(op_kernels, {"logits": logits, **settings_of(drawn.sampling, noise)})


@st.composite
def candidates(draw: st.DrawFn) -> tuple[int, int, int, int]:
    k = draw(st.integers(1, 4))
    depth = draw(st.integers(0, 4))
    return k, depth, draw(st.integers(2, 1 + k + depth * k * k)), draw(st.integers(0, 2**32 - 1))


def grown(k: int, depth: int, trees: int, seed: int, zeros: float) -> tuple[NDArray[Any], ...]:
    """Candidates as levels leave them: a child never scores above its parent, and may score the same."""
    random = np.random.default_rng(seed)

    def loss(count: int) -> NDArray[np.float32]:
        value = random.exponential(size=count).astype(np.float32)
        value[random.random(count) < zeros] = 0
        return value

    scores, parents = [], []
    for _ in range(trees):
        score, parent = list(-loss(k)), [-1] * k
        frontier = list(range(k))
        for _ in range(depth):
            first = len(score)
            for node in frontier:
                score += [np.float32(score[node] - step) for step in loss(k)]
                parent += [node] * k
            level = range(first, len(score))
            frontier = sorted(level, key=lambda i: (-score[i], i))[:k]
        scores.append(score)
        parents.append(parent)
    depths = np.array([1] * k + [2 + level for level in range(depth) for _ in range(k * k)], np.int64)
    token = random.integers(0, 1000, (trees, len(depths)))
    return token, np.array(scores, np.float32), np.array(parents, np.int64), depths


def rerank(kernels, arrays, nodes, **how):
    inputs = rerank_inputs(arrays)
    found = run(kernels, "TreeRerank", inputs, rerank_outputs(len(arrays[0]), nodes), {"nodes": nodes}, **how)
    check_rerank(inputs, found, nodes)
    return found


@FEW
@given(shape=candidates(), trees=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.4, 1.0]))
def test_tree_rerank(drafters, shape, trees, zeros) -> None:
    k, depth, nodes, seed = shape
    rerank(drafters, grown(k, depth, trees, seed, zeros), nodes)


@FEW
@given(count=st.integers(1, 300), levels=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_of_candidates_at_the_cut_the_first_are_chosen(drafters, count, levels, seed, data) -> None:
    random, nodes = np.random.default_rng(seed), data.draw(st.integers(2, count + 1))
    score = -random.integers(0, levels, (2, count)).astype(np.float32)
    equals = (random.integers(0, 99, (2, count)), score, np.full((2, count), -1), np.ones(count, np.int64))
    rerank(drafters, equals, nodes)


@pytest.mark.parametrize(
    ("k", "depth", "nodes"), [(10, 7, 60), (10, 7, 711), (16, 15, 64), (16, 15, 3857), (1, 0, 2), (1, 7, 3)]
)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 1.0])
def test_big_trees_and_chains(drafters, k, depth, nodes, zeros) -> None:
    arrays = grown(k, depth, 2, 7, zeros)
    arrays[1][0, -1] = -np.inf  # of a masked token
    rerank(drafters, arrays, nodes)


@pytest.mark.parametrize("kernels", ["emulated", pytest.param("ptx", marks=pytest.mark.long)], indirect=True)
def test_results_do_not_depend_on_the_threads_of_a_block(kernels) -> None:
    random = np.random.default_rng(2)
    branches = [GREEDY, (0.7, 0, 1.0, 0.05), (1.3, 40, 0.8, 0.0)]
    noise = noise_of(random, 3, 777)
    logits = (random.normal(size=(3, 4, 777)) * 4).astype(np.float32)
    logits[:, 1] = np.round(logits[:, 1])
    grow = expand_inputs(logits, scores(random, 3, 4), branches, noise)
    drafted = {"logits": logits, **settings_of(branches, noise)}

    def everything(threads):
        found = [
            expand(kernels, grow, 9, most_threads=threads),
            sample(kernels, drafted, most_threads=threads),
            rerank(kernels, grown(4, 4, 3, 9, 0.5), 20, most_threads=threads),
        ]
        return [(name, array) for outputs in found for name, array in outputs.items()]

    alone = everything(1)
    for threads in (3, 31, 64):
        for (name, array), (_, expected) in zip(everything(threads), alone, strict=True):
            np.testing.assert_array_equal(array, expected, err_msg=f"{name} of {threads} threads")
