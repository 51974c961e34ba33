"""TreeExpand: children of a draft tree's frontier, and the next frontier among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.sampling import SETTINGS, Sampling
from outrider.plugins.cuda.launches import COUNTER, ROW_THREADS, Launch, make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.reference.choice import sampling_of
from outrider.plugins.schema import INTEGER, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Plugin

_FRONTIER = ("trees", "frontier")
CANDIDATES = ("trees", "candidates")
DRAFT_SETTINGS = (
    TensorSpec(names.NOISE, "float32", ("trees", "V")),
    TensorSpec(names.DRAFT_SAMPLING, "float32", ("trees", SETTINGS)),
)

SCHEMA = OpSchema(
    name="TreeExpand",
    version=5,
    doc="""Children of a draft tree's frontier nodes, and which of them are expanded next.

    A node's children are its top_k likeliest tokens, scored by the node's score plus their log-probability. Where a
    branch samples, its temperature above 0, the target will run a race with noise[b]: what is likely depends on that.
    With q the drafter's distribution at the branch's temperature, and k the same under top-k, top-p (their cuts looked
    for among the 64 likeliest tokens) and min-p, token x counts as the target's choice with probability

        (1 - doubt) * r(x) / sum of r + doubt * q(x), where r(x) = k(x) / noise(x)

    The race's winner under the drafter has the largest r; the target's distribution differs, and so may its winner.
    A probability counts as 1e-30 at least.
    Candidates are node-major, a node's best first; frontier holds the top_k best of them, best first. Of equals, the
    lower index comes first. Stands in graphs only: a function body of standard ops, or the CUDA kernel.
    Source: EAGLE-2 (arXiv 2406.16858) for the tree.""",
    inputs=(
        TensorSpec("logits", "float32", (*_FRONTIER, "V")),
        TensorSpec("score", "float32", _FRONTIER),
        *DRAFT_SETTINGS,
    ),
    outputs=(
        TensorSpec("token", INTEGER, CANDIDATES),
        TensorSpec("candidate_score", "float32", CANDIDATES),
        TensorSpec("frontier", INTEGER, ("trees", "top_k")),
    ),
    attributes=(AttributeSpec("top_k", int), AttributeSpec("doubt", float)),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_tree_expand",
    numbers=("frontier", "V", "top_k", "doubt"),
    blocks=lambda s: s["trees"] * s["frontier"],
    threads=lambda s: ROW_THREADS,
    scratch=COUNTER,
)
_TOKEN, _SCORE, _NEXT_FRONTIER = SCHEMA.outputs
_PLUGINS = (
    Plugin(
        name="TreeChildren",
        launch=_LAUNCH,
        inputs=SCHEMA.inputs,
        outputs=(_TOKEN, _SCORE),
        attributes=("top_k", "doubt"),
        floats=("doubt",),
        derived={"candidates": lambda s: s["frontier"] * s["top_k"]},
        guard="0 < top_k && top_k <= kMostBest && top_k <= V",
        stand_ins={"counter": "never_full()", "frontier": "nullptr"},
    ),
    Plugin(
        name="TreeFrontier",
        launch=Launch(
            kernel="outrider_tree_frontier",
            pointers=("candidate_score", "frontier"),
            numbers=("candidates", "top_k"),
            blocks=lambda s: s["trees"],
        ),
        inputs=(_SCORE,),
        outputs=(_NEXT_FRONTIER,),
        attributes=("top_k",),
        guard="0 < top_k && top_k <= kMostBest && top_k <= candidates",
    ),
)
OP = Op(SCHEMA, _PLUGINS, _LAUNCH)


@dataclass(frozen=True)
class DraftSettings:
    """What a drafter knows of each branch: its noise float32 `[B, V]`, and its settings `[B, SETTINGS]`."""

    noise: NDArray[np.float32]
    draft_sampling: NDArray[np.floating]

    def row(self, tree: int) -> Sampling:
        return sampling_of(self.draft_sampling, tree)


@dataclass(frozen=True)
class Expansion:
    """The candidates of one level: `token` int64 and `score` `[B, F * top_k]`, node by node, a node's best child first.

    `frontier` int64 `[B, top_k]` holds the indices of the candidates to expand next, best first.
    """

    token: NDArray[np.int64]
    score: NDArray[np.float64]
    frontier: NDArray[np.int64]


def best(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values, largest first; of equals the lower index first."""
    return np.argsort(-values, kind="stable")[:count]


LIKELY = 64  # likeliest tokens among which the cuts of top-k and top-p are searched


def weights_of(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Return weights `[V]` at the temperature; the largest weighs 1."""
    weights: NDArray[np.float64] = np.exp((logits - logits.max()) / temperature)
    return weights


def kept_weights(logits: NDArray[np.float64], settings: DraftSettings, tree: int) -> NDArray[np.float64]:
    """Return weights `[V]` under temperature, then top-k, then top-p, with cuts searched among the likeliest tokens,
    then min-p.
    """
    sampling = settings.row(tree)
    top_k, top_p = int(sampling.top_k), sampling.top_p
    weights = weights_of(logits, sampling.temperature)
    likely = best(logits, LIKELY)
    limited = 0 < top_k <= len(likely)
    survivors = weights[likely[:top_k]].sum() if limited else weights.sum()
    kept = [
        token
        for rank, token in enumerate(likely)
        if (not top_k or rank < top_k) and (top_p >= 1 or rank == 0 or weights[likely[:rank]].sum() < top_p * survivors)
    ]
    threshold = -np.inf if len(kept) == len(likely) and not limited else logits[kept].min()
    return np.where((logits >= threshold) & (weights >= sampling.min_p), weights, 0.0)


def chosen_log_probs(
    logits: NDArray[np.float64], settings: DraftSettings, tree: int, doubt: float
) -> NDArray[np.float64]:
    """Return the log-probability `[V]` of each token to win the target's race: the schema of TreeExpand."""
    pace = kept_weights(logits, settings, tree) / settings.noise[tree]
    every = weights_of(logits, settings.row(tree).temperature)
    mass: NDArray[np.float64] = (1 - doubt) * pace / pace.sum() + doubt * every / every.sum()
    return np.log(np.maximum(mass, 1e-30))


def tree_expand(
    logits: NDArray[np.float32], score: NDArray[np.float32], settings: DraftSettings, top_k: int, doubt: float
) -> Expansion:
    """Expand the frontier of each tree, as the schema of TreeExpand says, with sums in float64.

    `top_k` counts the children of a node.
    """
    trees, nodes, _ = logits.shape
    token = np.zeros((trees, nodes * top_k), np.int64)
    summed = np.zeros((trees, nodes * top_k))
    frontier = np.zeros((trees, top_k), np.int64)
    for tree in range(trees):
        for node in range(nodes):
            row = logits[tree, node].astype(np.float64)
            log_probs = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
            if settings.row(tree).temperature > 0:
                log_probs = chosen_log_probs(row, settings, tree, doubt)
            children = best(log_probs, top_k)
            place = slice(node * top_k, (node + 1) * top_k)
            token[tree, place] = children
            summed[tree, place] = score[tree, node] + log_probs[children]
        frontier[tree] = best(summed[tree], top_k)
    return Expansion(token, summed, frontier)
