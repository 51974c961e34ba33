"""The function bodies of TreeExpand and TreeRerank, run by ONNX Runtime, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from plugins.reference import tree_expand, tree_rerank

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def session(op: str, inputs: dict[str, Any], outputs: dict[str, int], **attributes: int) -> ort.InferenceSession:
    node = helper.make_node(op, list(inputs), list(outputs), domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, [None, None]) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, functions=[FUNCTIONS[op]()], opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def expand() -> dict[int, ort.InferenceSession]:
    return {
        k: session(
            "TreeExpand",
            {"logits": (FLOAT, ["B", "F", "V"]), "score": (FLOAT, ["B", "F"])},
            {"token": INT, "candidate_score": FLOAT, "frontier": INT},
            top_k=k,
        )
        for k in (1, 3, 4)
    }


@settings(max_examples=60, deadline=None)
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
    token, candidate_score, frontier = expand[k].run(None, {"logits": logits, "score": score})
    expected = tree_expand(logits, score, k)
    np.testing.assert_array_equal(token, expected.token)
    np.testing.assert_allclose(candidate_score, expected.score, atol=1e-5, rtol=1e-6)
    # The order is that of float32 sums, in which scores that differ by less than their rounding may be equal.
    for tree in range(trees):
        own = sorted(range(nodes * k), key=lambda i: (-candidate_score[tree, i], i))[:k]
        assert frontier[tree].tolist() == own
    np.testing.assert_allclose(
        np.take_along_axis(candidate_score, frontier, 1), np.take_along_axis(expected.score, expected.frontier, 1),
        atol=1e-5, rtol=1e-6,
    )  # fmt: skip


def test_equal_logits_go_to_the_lower_token_and_equal_scores_to_the_lower_candidate(expand) -> None:
    logits = np.zeros((1, 2, 6), np.float32)
    token, score, frontier = expand[3].run(None, {"logits": logits, "score": np.zeros((1, 2), np.float32)})
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


@settings(max_examples=80, deadline=None)
@given(shape=candidates(), trees=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.4, 1.0]))
def test_tree_rerank_is_the_reference_and_gives_a_tree(shape, trees, zeros) -> None:
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
        {"token": INT, "parent": INT, "depth": INT, "score": FLOAT},
        nodes=nodes,
    ).run(None, dict(zip(names, arrays, strict=True)))  # fmt: skip
    expected = tree_rerank(*arrays, nodes)
    for found, wanted in zip(ran, (expected.token, expected.parent, expected.depth, expected.score), strict=True):
        np.testing.assert_array_equal(found, wanted)
    _, parent, found_depth, _ = ran
    for tree in range(trees):
        depths = [0, *found_depth[tree].tolist()]
        for node, above in enumerate(parent[tree].tolist(), start=1):
            assert 0 <= above < node
            assert depths[node] == depths[above] + 1
