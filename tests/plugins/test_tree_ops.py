"""TreeExpand and TreeRerank in ONNX Runtime, as function bodies and as our kernels, against NumPy."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from outrider.compiler.lowering.functions import unbranch
from outrider.plans.sampling import SETTINGS, Sampling
from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from outrider.plugins.reference import DraftSettings, draft_sample, tree_expand, tree_rerank
from outrider.plugins.reference.tree_expand import chosen_log_probs
from outrider.plugins.schema import CPU_DOMAIN
from tests.cpu_session import cpu_session
from tests.plugins.drafting import DOUBT, Tensors, apart, noise_of, samples, settings_of
from tests.properties import cheap

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def info(of: Any) -> tuple[int, list[None]]:
    """A type of two dimensions, or a type and their number."""
    kind, rank = of if isinstance(of, tuple) else (of, 2)
    return kind, [None] * rank


def session(
    op: str,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    domain: str = DOMAIN,
    without_ifs: bool = False,
    **attributes: float,
) -> ort.InferenceSession:
    node = helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, *info(of)) for name, of in outputs.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(domain, VERSION)]
    functions = [unbranched(FUNCTIONS[op]()) if without_ifs else FUNCTIONS[op]()] if domain == DOMAIN else []
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model)
    return cpu_session(model.SerializeToString())


def unbranched(function: onnx.FunctionProto) -> onnx.FunctionProto:
    made = ir.serde.deserialize_function(function)
    assert any(node.op_type == "If" for node in made)
    unbranch(made)
    assert not any(node.op_type == "If" for node in made)
    return ir.serde.serialize_function(made)


BODY, WITHOUT_IFS, KERNEL = FORMS = ("body", "body without Ifs", "kernel")
SETTINGS_INPUTS = {
    "noise": (FLOAT, ["B", "V"]),
    "draft_sampling": (FLOAT, ["B", SETTINGS]),
}
FILTERS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 50, 1000, 2**63 - 1]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.0, 0.11]),
)
GREEDY = (0.0, 0, 1.0, 0.0)
both_forms = pytest.mark.parametrize("domain", [DOMAIN, CPU_DOMAIN])


@pytest.fixture(scope="module", params=FORMS)
def expand(request: pytest.FixtureRequest) -> dict[int, ort.InferenceSession]:
    return {
        k: session(
            "TreeExpand",
            {
                "logits": (FLOAT, ["B", "F", "V"]),
                "score": (FLOAT, ["B", "F"]),
                **SETTINGS_INPUTS,
            },
            {"token": INT, "candidate_score": FLOAT, "frontier": INT},
            domain=CPU_DOMAIN if request.param == KERNEL else DOMAIN,
            without_ifs=request.param == WITHOUT_IFS,
            top_k=k,
            **DOUBT,
        )
        for k in (1, 3, 4)
    }


@pytest.fixture(scope="module", params=[BODY, WITHOUT_IFS])
def sampler(request: pytest.FixtureRequest) -> ort.InferenceSession:
    inputs = {"logits": (FLOAT, ["B", "F", "V"]), **SETTINGS_INPUTS}
    outputs = {"token": (INT, 2), "probability": (FLOAT, 3)}
    return session("DraftSample", inputs, outputs, without_ifs=request.param == WITHOUT_IFS)


def check(expand, k: int, logits: NDArray[np.float32], score: NDArray[np.float32], sampling: Tensors) -> None:
    token, candidate_score, frontier = expand[k].run(None, {"logits": logits, "score": score, **sampling})
    expected = tree_expand(logits, score, DraftSettings(**sampling), k, **DOUBT)
    # Sums of probabilities in float32: a share of 1e-6 of the largest is noise, and so is the order of such tokens.
    sampled = np.repeat(samples(sampling), logits.shape[1] * k).reshape(token.shape)
    clear = ~sampled | (expected.score - np.repeat(score, k, axis=1) > np.log(1e-4))
    np.testing.assert_array_equal(token[clear], expected.token[clear])
    np.testing.assert_allclose(candidate_score[~sampled], expected.score[~sampled], atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(candidate_score[clear], expected.score[clear], atol=2e-2, rtol=1e-6)
    # The order is that of float32 sums, in which scores that differ by less than their rounding may be equal.
    for tree, scores in enumerate(candidate_score):
        assert frontier[tree].tolist() == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


@cheap
@given(
    k=st.sampled_from([1, 3, 4]),
    trees=st.integers(1, 3),
    nodes=st.integers(1, 5),
    vocabulary=st.integers(4, 40),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_tree_expand_is_the_reference(expand, k, trees, nodes, vocabulary, scale, seed) -> None:
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(trees, nodes, vocabulary)) * scale).astype(np.float32)
    score = -random.exponential(size=(trees, nodes)).astype(np.float32)
    if scale == 0.0:  # nothing but ties
        score[:] = -1.0
    check(expand, k, logits, score, settings_of([GREEDY] * trees, np.ones((trees, vocabulary), np.float32)))


@cheap
@given(
    k=st.sampled_from([1, 3, 4]),
    nodes=st.integers(1, 4),
    vocabulary=st.sampled_from([5, 63, 64, 65, 300]),
    branches=st.lists(FILTERS, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_children_of_a_sampling_branch_are_the_likeliest_with_the_targets_noise(
    expand, k, nodes, vocabulary, branches, seed
) -> None:
    random = np.random.default_rng(seed)
    trees = len(branches)
    logits = apart(random, (trees, nodes, vocabulary))
    score = -random.exponential(size=(trees, nodes)).astype(np.float32)
    check(expand, k, logits, score, settings_of(branches, noise_of(random, trees, vocabulary)))


@cheap
@given(
    nodes=st.integers(1, 3),
    vocabulary=st.sampled_from([5, 64, 300]),
    branch=FILTERS,
    seed=st.integers(0, 2**32 - 1),
)
def test_draft_sample_is_the_reference(sampler, nodes, vocabulary, branch, seed) -> None:
    random = np.random.default_rng(seed)
    logits = apart(random, (1, nodes, vocabulary))
    sampling = settings_of([branch], noise_of(random, 1, vocabulary))
    token, probability = sampler.run(None, {"logits": logits, **sampling})
    expected_token, expected_probability = draft_sample(logits, DraftSettings(**sampling))
    np.testing.assert_array_equal(token, expected_token)
    np.testing.assert_allclose(probability, expected_probability, atol=1e-6)
    assert (np.take_along_axis(probability, token[..., None], -1) > 0).all()


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


@cheap
@given(
    k=st.sampled_from([1, 3, 4]),
    temperature=st.sampled_from([0.0, 1e-46, 1e-40, 1e-10, 1.0]),
    bad=st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_logits_make_a_child_score_above_its_parent_or_not_at_all(expand, k, temperature, bad, seed) -> None:
    """The tree's shape rests on it, and so the positions at which the target verifies."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(1, 3, 20)).astype(np.float32)
    logits[random.random(logits.shape) < random.choice([0.0, 0.1, 1.0])] = bad
    score = -random.exponential(size=(1, 3)).astype(np.float32)
    sampling = settings_of([(temperature, 5, 0.9, 0.0)], noise_of(random, 1, 20))
    token, found, frontier = expand[k].run(None, {"logits": logits, "score": score, **sampling})
    assert (found <= np.repeat(score, k, axis=1)).all()
    assert ((token >= 0) & (token < 20)).all()
    assert all(len(set(children)) == k for children in token.reshape(-1, k).tolist())
    assert ((frontier >= 0) & (frontier < 3 * k)).all()


def test_a_drafter_that_is_the_target_says_the_targets_choice(expand) -> None:
    """Where the winner has more than 5/7 of all paces: at a doubt of 0.3, that is more than all others come to."""
    random = np.random.default_rng(1)
    logits = (random.normal(size=(200, 1, 30)) * 2).astype(np.float32)
    sampling = settings_of([(0.7, 0, 1.0, 0.0)] * 200, noise_of(random, 200, 30))
    found, _, _ = expand[1].run(None, {"logits": logits, "score": np.zeros((200, 1), np.float32), **sampling})
    pace = np.exp(logits[:, 0] / 0.7) / sampling["noise"]
    clear = pace.max(1) > 5 / 7 * pace.sum(1)
    assert clear.sum() > 50
    np.testing.assert_array_equal(found[clear, 0], pace[clear].argmax(1))


def test_equal_logits_go_to_the_lower_token_and_equal_scores_to_the_lower_candidate(expand) -> None:
    sampling = settings_of([GREEDY], np.ones((1, 6), np.float32))
    feeds = {"logits": np.zeros((1, 2, 6), np.float32), "score": np.zeros((1, 2), np.float32), **sampling}
    token, score, frontier = expand[3].run(None, feeds)
    assert token.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert frontier.tolist() == [[0, 1, 2]]
    assert len(set(score.reshape(-1).tolist())) == 1


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


@both_forms
@cheap
@given(shape=candidates(), trees=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.4, 1.0]))
def test_tree_rerank_is_the_reference_and_gives_a_tree(domain, shape, trees, zeros) -> None:
    k, depth, nodes, seed = shape
    arrays = grown(k, depth, trees, seed, zeros)
    names = ("candidate_token", "candidate_score", "candidate_parent", "candidate_depth")
    kinds = (INT, FLOAT, INT, INT)
    ran = session(
        "TreeRerank",
        {
            name: (kind, list(array.shape))
            for name, kind, array in zip(names, kinds, arrays, strict=True)
        },
        {"candidate": INT, "token": INT, "parent": INT, "depth": INT, "score": FLOAT},
        domain,
        nodes=nodes,
    ).run(None, dict(zip(names, arrays, strict=True)))  # fmt: skip
    expected = tree_rerank(*arrays, nodes)
    for found, wanted in zip(ran, astuple(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    candidate, token, parent, found_depth, _ = ran
    np.testing.assert_array_equal(token, np.take_along_axis(arrays[0], candidate, 1))
    for tree in range(trees):
        depths = [0, *found_depth[tree].tolist()]
        for node, above in enumerate(parent[tree].tolist(), start=1):
            assert 0 <= above < node
            assert depths[node] == depths[above] + 1
