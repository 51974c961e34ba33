"""ChainAccept: accept each drafted token of a chain by p / q, or correct it from the residual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.cuda.launches import COUNTER, Scratch, make_launch
from outrider.plugins.ops import row_choices as rows
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.ops.tree_accept import Accepted, walk_trees
from outrider.plugins.reference.choice import filtered_weights, sampling_of
from outrider.plugins.reference.philox import uniform
from outrider.plugins.reference.race import race
from outrider.plugins.schema import INTEGER, OpSchema, Purpose, TensorSpec

SCHEMA = OpSchema(
    name="ChainAccept",
    version=6,
    doc="""Walk each drafted chain by classical speculative sampling: accept by p / q, or correct from the residual.

    Tokens stand as in TreeAccept. That is for trees of branches b whose by_rejection[b] is 1, which are chains: in
    logit_indices a drafted node stands right after its parent. Trees of the others are walked as TreeAccept does.
    The token x of the node at place i was drawn from q = draft_probs[i] (a root's is not read), q summing to
    about 1; p is what Sample draws from at the parent, filters included (greedy: all of it at the argmax). Draws are
    those of the token after the parent, at positions[parent] + 1. With r = uniform(.., Purpose.REJECTION):
    x is accepted iff p(x) > 0 and r q(x) <= p(x), and the walk continues at its node.
    Otherwise a token that wins a race of weights max(0, p - q), with the noise that Sample takes, is committed, and the
    walk stops. It is drawn from p where nothing is left of p - q, or where skip_sample_adjustment[b] is 1 (debugging:
    the output no longer has the target's distribution). After the last node, if accepted: one more token, as Sample
    draws it.
    p and q are compared in integer units of 2^-50; q above 1 counts as 1. A q that sums to 1 + e moves the output's
    distribution by no more than about e.

    Outputs as of TreeAccept, and trials[i] = (r, p(x) / q(x)) of each drafted node at place i that the walk visited,
    NaN elsewhere; p and q in their integer units, so that x is accepted iff r <= p / q but for the last bits of the
    quotient: 0 where p(x) is, else infinite where q(x) is 0.
    Errors: as TreeAccept, and ValueError for such trees that are no chains, drafted tokens outside the vocabulary,
    draft_probs that are negative, NaN or infinite, and skip_sample_adjustment and by_rejection other than 0 and 1.
    Source: arXiv 2211.17192 (algorithm 1); arXiv 2302.01318.""",
    inputs=(
        *rows.CHOICE_INPUTS,
        *rows.TREE_INPUTS,
        TensorSpec(names.DRAFT_PROBS, "float32", (names.LOGITS, rows.VOCABULARY)),
        TensorSpec(names.SKIP_SAMPLE_ADJUSTMENT, INTEGER, (rows.SLOTS,)),
        TensorSpec(names.BY_REJECTION, INTEGER, (rows.SLOTS,)),
    ),
    outputs=(*rows.ACCEPT_OUTPUTS, TensorSpec(names.TRIALS, "float64", (names.LOGITS, 2))),
    extents=(names.NEW, names.LOGITS),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_chain_accept",
    numbers=("V", "B", "trees", names.NEW),
    blocks=rows.share_blocks,
    scratch={
        **rows.SHARED_OUT,
        **rows.NODES,
        "weighed": Scratch(lambda s: 16 * s[names.LOGITS]),
        **rows.ARRIVED,
        **COUNTER,
    },
)
_FOUND = (rows.CHOSEN, rows.NEXT, TensorSpec("weighed", "float64", (names.LOGITS, 2)))
_PLUGINS = (
    rows.share_plugin(
        SCHEMA,
        "ChainShares",
        "outrider_chain_shares",
        (names.PARENT, names.DRAFT_PROBS, names.BY_REJECTION),
        rows.ROWS_FIT,
    ),
    rows.choice_plugin(SCHEMA, "ChainChoices", "outrider_chain_choices", _FOUND, rows.ROWS_FIT),
    rows.walk_plugin(SCHEMA, "ChainWalk", "outrider_chain_walk", _FOUND),
)
OP = Op(SCHEMA, _PLUGINS, _LAUNCH)


# p and q are integers in units of 2**-50, rounded down, so that a residual, and its sum in any order, is exact.
# Rounding moves less than V * 2**-50 of p; q comes in as float32, whose own rounding is 2**-25 of it.
_PROBABILITY_ONE = 2.0**50
_DRAW_BITS = 53


def target_probability(weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return p `[V]` in units of 2**-50 from the weights `[V]` that `choice` draws by."""
    scale = _PROBABILITY_ONE / float(int(weights.sum()))
    return np.floor(weights.astype(np.float64) * scale).astype(np.uint64)


def draft_probability(draft_probs: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return q `[V]` in units of 2**-50; values that rounding put above 1 count as 1."""
    return np.floor(np.minimum(draft_probs, 1.0).astype(np.float64) * _PROBABILITY_ONE).astype(np.uint64)


def accepts(r: int, p: int, q: int) -> bool:
    """Return whether r q <= p, for the uniform number r / 2**53; never where p is 0."""
    return p > 0 and r * q <= p << _DRAW_BITS


def residual(p: NDArray[np.uint64], q: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return max(0, p - q), the weights that the replacement of a rejected token is drawn from."""
    return np.where(p > q, p - q, np.uint64(0))


@dataclass(frozen=True)
class WeighedChains(Accepted):
    """Result of a step, with `trials` f64 `[M, 2]`: r and p / q of the nodes that the walk weighed, NaN elsewhere."""

    trials: NDArray[np.float64]


def chain_accept(tensors: Tensors) -> WeighedChains:
    """Apply the rule of arXiv 2211.17192 to chains of branches with rejection, and TreeAccept's rule to others, by the
    inputs of ChainAccept."""
    slots, logit_indices, logits = SamplingSlots.among(tensors), tensors[names.LOGIT_INDICES], tensors[names.LOGITS_OUT]
    branch, positions = tensors[names.BRANCH], tensors[names.POSITIONS]
    token_ids, parent = tensors[names.TOKEN_IDS], tensors[names.PARENT]
    place_of = {row: place for place, row in enumerate(logit_indices.tolist())}
    trials = np.full((len(logit_indices), 2), np.nan)

    def step(node: int) -> tuple[int, int | None]:
        b, position = int(branch[node]), int(positions[node])
        weights = filtered_weights(logits[place_of[node]], sampling_of(slots.sampling, b))
        key = slots.key(b, position, Purpose.TARGET)
        if not tensors[names.BY_REJECTION][b]:
            token = race(weights, key)
            return token, next((row for row in place_of if parent[row] == node and token_ids[row] == token), None)
        drafted = next((row for row in place_of if parent[row] == node), None)
        if drafted is None:
            return race(weights, key), None  # the bonus

        x, r = int(token_ids[drafted]), uniform(*slots.key(b, position, Purpose.REJECTION))
        p, q = target_probability(weights), draft_probability(tensors[names.DRAFT_PROBS][place_of[drafted]])
        trials[place_of[drafted]] = r / 2**_DRAW_BITS, _ratio(int(p[x]), int(q[x]))
        if accepts(r, int(p[x]), int(q[x])):
            return x, drafted
        rest = residual(p, q)
        if tensors[names.SKIP_SAMPLE_ADJUSTMENT][b] or not rest.any():
            return race(weights, key), None
        return race(rest, key), None

    accepted = walk_trees(logit_indices, parent, branch, step)
    return WeighedChains(**vars(accepted), trials=trials)


def _ratio(p: int, q: int) -> float:
    if p == 0:
        return 0.0
    return float(p) / float(q) if q else float("inf")
