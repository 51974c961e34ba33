"""Steps of drafting, as inputs of TreeExpand, DraftSample and TreeRerank, and what their kernels may give for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans.sampling import Sampling
from outrider.plugins.ops.draft_sample import draft_sample
from outrider.plugins.ops.tree_expand import DraftSettings, chosen_log_probs, tree_expand
from outrider.plugins.ops.tree_rerank import tree_rerank

Tensors = dict[str, NDArray[Any]]

DOUBT = {"doubt": 0.3}
GREEDY = (0.0, 0, 1.0, 0.0)
BRANCHES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        st.sampled_from([0, 1, 2, 50, 64, 65, 1000, 2**63 - 1]),
        st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
        st.sampled_from([0.0, 0.0, 0.11, 1.0]),
    ),
    min_size=1,
    max_size=3,
)  # temperature, top_k, top_p, min_p
_NEAR = 3e-6  # of a probability: float32 exponentials, summed over a vocabulary
_TENSORS = ("candidate_token", "candidate_score", "candidate_parent", "candidate_depth")


Branch = tuple[float, int, float, float]


def settings_of(branches: list[Branch], noise: NDArray[np.float32]) -> Tensors:
    return {"noise": noise, "draft_sampling": np.array([Sampling(*branch) for branch in branches], np.float32)}


def samples(inputs: Tensors) -> NDArray[np.bool_]:
    """Of each branch."""
    return np.array([Sampling(*row).temperature > 0 for row in inputs["draft_sampling"]])


def noise_of(random: np.random.Generator, branches: int, vocabulary: int) -> NDArray[np.float32]:
    return random.exponential(size=(branches, vocabulary)).astype(np.float32)


def apart(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits in eighths, none twice in a row: probabilities are apart, and cuts do not fall between rounding errors."""
    ladder = np.tile(np.arange(shape[-1]), (*shape[:-1], 1))
    return (random.permuted(ladder, axis=-1) / 8).astype(np.float32)


def expand_inputs(
    logits: NDArray[np.float32], score: NDArray[np.float32], branches: list[Branch], noise: NDArray[np.float32]
) -> Tensors:
    return {"logits": logits, "score": score, **settings_of(branches, noise)}


def settings_in(inputs: Tensors) -> DraftSettings:
    return DraftSettings(inputs["noise"], inputs["draft_sampling"])


def expand_outputs(inputs: Tensors, top_k: int) -> Tensors:
    """Poisoned."""
    trees, nodes, _ = inputs["logits"].shape
    shape = (trees, nodes * top_k)
    return {
        "token": np.full(shape, -77),
        "candidate_score": np.full(shape, 7.0, np.float32),
        "frontier": np.full((trees, top_k), -77),
    }


def check_frontier(found: Tensors, top_k: int) -> None:
    for scores, frontier in zip(found["candidate_score"], found["frontier"], strict=True):
        assert frontier.tolist() == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]


def check_expand(inputs: Tensors, found: Tensors, top_k: int, tolerance: float = 3e-7) -> None:
    """Of logits without NaN and +inf. A child of a sampling branch may be one that is as likely as the reference's."""
    logits, score, settings = inputs["logits"], inputs["score"], settings_in(inputs)
    check_frontier(found, top_k)
    with np.errstate(divide="ignore"):
        expected = tree_expand(logits, score, settings, top_k, **DOUBT)
    parents = np.repeat(score, top_k, axis=1)
    assert (found["candidate_score"] <= parents).all()
    for tree, sampled in enumerate(samples(inputs)):
        token, own = found["token"][tree], found["candidate_score"][tree].astype(np.float64)
        if not sampled:
            np.testing.assert_array_equal(token, expected.token[tree])
            np.testing.assert_allclose(own, expected.score[tree], rtol=max(2e-7, tolerance / 10), atol=tolerance)
            continue
        probability = np.exp(own - parents[tree])
        wanted = np.exp(expected.score[tree] - parents[tree])
        assert (probability >= wanted * (1 - 1e-5) - _NEAR).all()
        assert (probability <= wanted * (1 + 1e-5) + _NEAR).all()
        for node, row in enumerate(logits[tree].astype(np.float64)):
            place = slice(node * top_k, (node + 1) * top_k)
            assert len(set(token[place].tolist())) == top_k
            at_token = np.exp(chosen_log_probs(row, settings, tree, **DOUBT)[token[place]])
            np.testing.assert_allclose(at_token, wanted[place], rtol=1e-5, atol=_NEAR)


def sample_outputs(inputs: Tensors) -> Tensors:
    """Poisoned."""
    shape = inputs["logits"].shape
    return {"token": np.full(shape[:2], -77), "probability": np.full(shape, -7.0, np.float32)}


def check_sample(inputs: Tensors, found: Tensors) -> None:
    """A distribution, and the token that wins its race."""
    probability = found["probability"].astype(np.float64)
    assert ((probability >= 0) & (probability <= 1)).all()
    np.testing.assert_allclose(probability.sum(-1), 1.0, atol=1e-6)
    for tree, noise in enumerate(inputs["noise"].astype(np.float64)):
        for node, token in enumerate(found["token"][tree]):
            assert probability[tree, node, token] > 0
            if samples(inputs)[tree]:
                pace = probability[tree, node] / noise
                assert pace[token] >= pace.max() * (1 - 1e-5)


def check_sample_is_the_reference(inputs: Tensors, found: Tensors) -> None:
    """Of logits that are apart."""
    token, probability = draft_sample(inputs["logits"], settings_in(inputs))
    np.testing.assert_array_equal(found["token"], token)
    np.testing.assert_allclose(found["probability"], probability, rtol=1e-6, atol=2e-12)


def rerank_inputs(arrays: tuple[NDArray[Any], ...]) -> Tensors:
    return dict(zip(_TENSORS, arrays, strict=True))


def rerank_outputs(trees: int, nodes: int) -> Tensors:
    """Poisoned."""
    shape = (trees, nodes - 1)
    integers = {name: np.full(shape, -77) for name in ("candidate", "token", "parent", "depth")}
    return integers | {"score": np.full(shape, 7.0, np.float32)}


def check_rerank(inputs: Tensors, found: Tensors, nodes: int) -> None:
    for name, expected in vars(tree_rerank(*inputs.values(), nodes)).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
