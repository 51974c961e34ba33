"""What the tests of TreeAccept and ChainAccept share: a bound step, random forests, faults, settings of branches; and
two tokens drawn after one tip of a target that is a table, whose next token depends on the last one alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans.sampling import NOBODY, Sampling
from outrider.plugins import native
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.reference.choice import filtered_weights, sampling_of

POISON = -77


class AcceptStep:
    """An accept op bound to the arrays of one step, by their names, with outputs full of POISON."""

    def __init__(self, op_name, reference, slots, tensors, *, trees=8):
        self.reference, self.slots, self.tensors = reference, slots, tensors
        self.new, self.count = len(tensors["token_ids"]), len(tensors["logit_indices"])
        self.outputs = outputs_of(op_name, self.new, self.count, trees)
        vars(self).update(self.outputs)
        self.op = native.create(op_name, tensors | self.outputs | vars(slots))

    def run(self):
        self.op(self.new, self.count)
        return self

    def assert_equals(self, expected):
        trees, kept = len(expected.accepted_count), len(expected.kept_indices)
        np.testing.assert_array_equal(self.committed, expected.committed)
        np.testing.assert_array_equal(self.accepted_count[:trees], expected.accepted_count)
        assert (self.accepted_count[trees:] == 0).all()
        assert self.kept_count[0] == kept
        np.testing.assert_array_equal(self.kept_indices[:kept], expected.kept_indices)
        assert (self.kept_indices[kept:] == -1).all()
        if hasattr(expected, "trials"):
            np.testing.assert_array_equal(self.trials, expected.trials)

    def assert_equals_reference(self):
        self.assert_equals(self.reference(self.tensors | vars(self.slots)))

    def assert_untouched(self):
        assert all((output == POISON).all() for output in self.outputs.values())


def slots_of(settings, seed=3) -> SamplingSlots:
    """A branch for each of `settings`, rows of `Sampling`; branch b draws from stream b."""
    rows = np.array([Sampling(*each) for each in settings], np.float64)
    return SamplingSlots(rows, np.full(len(rows), seed, np.uint64), np.arange(len(rows)))


def equal_slots(branches=1, *, seed=3, **settings) -> SamplingSlots:
    """The same settings for each branch."""
    return slots_of([Sampling(**settings)] * branches, seed)


def forest(rng, trees, most_pending, most_nodes, vocabulary, straight):
    """Random trees, each after its chain of pending tokens, some before a root of NOBODY: (token_ids, parent, branch,
    logit_indices).

    `straight` has the probability, by branch, that a node is the child of the one before it: 1 makes chains.
    """
    token_ids, parent, branch, logit_indices = [], [], [], []
    for b in range(trees):
        pending = int(rng.integers(0, most_pending + 1))
        start = len(parent)
        nodes = int(rng.integers(1, most_nodes + 1))
        root = start + pending
        for i in range(pending + nodes):
            row = start + i
            if i == 0:
                parent.append(-1)
            elif i <= pending or rng.random() < straight[b]:
                parent.append(row - 1)
            else:
                parent.append(int(rng.integers(root, row)))
            token_ids.append(int(rng.integers(0, vocabulary)))
            branch.append(b)
            if row >= root:
                logit_indices.append(row)
        if rng.random() < 0.2:
            logit_indices.append(len(parent))
            for column, value in ((token_ids, 0), (parent, -1), (branch, NOBODY)):
                column.append(value)
    return tuple(np.array(column, dtype=np.int64) for column in (token_ids, parent, branch, logit_indices))


def outputs_of(op, new, count, trees):
    """Outputs of Sample or of an op that accepts, full of POISON."""
    sizes = {"committed": count, "accepted_count": trees, "kept_indices": new, "kept_count": 1}
    outputs = {name: np.full(sizes[name], POISON) for name in (["committed"] if op == "Sample" else sizes)}
    return outputs | ({"trials": np.full((count, 2), float(POISON))} if op == "ChainAccept" else {})


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


def random_step(rng, op, slots, trees, nodes, vocabulary, logits_of, by_rejection=None):
    """A step of random trees or chains, in which often a likely token is drafted: tensors, outputs and extents."""
    branches = len(slots.seed)
    if by_rejection is None:
        by_rejection = rng.integers(0, 2, branches)
    straight = np.where(by_rejection, 1.0, 0.4) if op == "ChainAccept" else np.full(branches, 0.4)
    token_ids, parent, branch, logit_indices = forest(rng, trees, 3, nodes, vocabulary, straight)
    logits, q = logits_of(len(logit_indices)), np.full((len(logit_indices), vocabulary), np.nan, np.float32)
    for place, row in enumerate(logit_indices.tolist()):  # a root's q is not read
        if parent[row] not in logit_indices:
            continue
        p = distribution(logits[np.searchsorted(logit_indices, parent[row])], slots, branch[row])
        if rng.random() < 0.6:
            token_ids[row] = rng.choice(vocabulary, p=p)
        q[place] = drafted_probs(rng, rng.choice(KINDS), p, token_ids[row])
    tensors = {
        "logits": logits, "logit_indices": logit_indices, "positions": 2**33 + depth_of(parent), "branch": branch,
        **vars(slots),
    }  # fmt: skip
    if op != "Sample":
        tensors |= {"token_ids": token_ids, "parent": parent}
    if op == "ChainAccept":
        skip = rng.integers(0, 2, branches)
        tensors |= {"draft_probs": q, "skip_sample_adjustment": skip, "by_rejection": by_rejection}
    return tensors, outputs_of(op, len(branch), len(logit_indices), trees), (len(branch), len(logit_indices))


def draw_step(data, op, slots, logits_rows, *, least_trees=1, nodes=9, vocabularies=(1, 2, 3, 5, 64, 65, 200, 300)):
    """`random_step` of drawn sizes, settings and logits."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees, vocabulary = data.draw(st.integers(least_trees, 3)), data.draw(st.sampled_from(vocabularies))
    settings = data.draw(slots(max(trees, 1)))
    return random_step(
        rng, op, settings, trees, data.draw(st.integers(1, nodes)), vocabulary,
        lambda count: data.draw(logits_rows(count, vocabulary)),
    )  # fmt: skip


def spoiled(rng, tensors):
    """The tensors of a step with rows of logits that no token can be chosen from, and seldom an index fault."""
    tensors = {name: array.copy() for name, array in tensors.items()}
    rows, logits = tensors["logit_indices"], tensors["logits"]
    for place in np.flatnonzero(rng.random(len(rows)) < rng.choice([0.1, 0.4])):
        if rng.random() < 0.7:
            logits[place, rng.integers(logits.shape[1])] = np.nan
        else:
            logits[place] = -np.inf
    if rng.random() < 0.1:
        tensors["branch"][rng.choice(rows)] = rng.choice([-1, 99])
    if "draft_probs" in tensors and rng.random() < 0.2:
        q = tensors["draft_probs"]
        q[rng.integers(len(q)), rng.integers(q.shape[1])] = rng.choice([np.nan, np.inf, -0.5])
    return tensors


def fault_on_the_cpu(op, tensors, outputs, extents, attributes):
    """The number of the fault (`plugins.cuda.launches.FAULTS`) that the CPU's kernel raises for; else `outputs` are
    its, and 0."""
    call = native.create(op, tensors | outputs, attributes)
    try:
        call(*extents)
    except ValueError as error:
        faults = {"contains NaN": 1, "is -inf for every token": 2}
        return next((number for text, number in faults.items() if text in str(error)), 3)
    return 0


def fork(op):
    """A step whose walk visits nodes 0 and 1 of 4, tensors and outputs. Of a tree, 2 hangs from 0 and 3 from 1."""
    logits = np.zeros((4, 8), np.float32)
    logits[0, 1] = logits[1, 5] = 9
    tensors = {
        "logits": logits, "logit_indices": np.arange(4), "positions": np.arange(4), "branch": np.zeros(4, np.int64),
        **vars(equal_slots()), "token_ids": np.array([7, 1, 2, 3]), "parent": np.array([-1, 0, 0, 1]),
    }  # fmt: skip
    if op == "ChainAccept":
        tensors["parent"] = np.arange(4) - 1
        tensors |= {"draft_probs": np.full((4, 8), 0.125, np.float32), "skip_sample_adjustment": np.zeros(1, np.int64)}
        tensors["by_rejection"] = np.ones(1, np.int64)
    return tensors, outputs_of(op, 4, 4, 1)


def depth_of(parent):
    depth = np.zeros(len(parent), np.int64)
    for i, p in enumerate(parent.tolist()):
        depth[i] = depth[p] + 1 if p >= 0 else 0
    return depth


DRAWS = 20_000
TIP = 0
TABLE = np.random.default_rng(11).normal(size=(6, 6)).astype(np.float32)
DRAFTERS = {
    "near": TABLE + np.random.default_rng(12).normal(size=TABLE.shape) * 0.4,
    "flat": np.zeros(TABLE.shape),
    "opposite": -TABLE,
    "sharp": np.eye(6)[:, ::-1] * 4,
    "one-hot": np.where(np.eye(6, dtype=bool)[:, [3, 4, 5, 0, 1, 2]], 0.0, -np.inf),
}
"""More or less like the target."""
FILTERS = [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}, {"temperature": 0.9, "min_p": 0.2}]

Step = Callable[[NDArray[np.int64], SamplingSlots, int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""From tips `[branches]` at a position: the tokens that a step commits, `[branches, most]`, and their counts."""


def decode_two(step: Step, slots: SamplingSlots) -> tuple[NDArray[np.int64], float]:
    """The first two tokens after TIP of each branch `[DRAWS, 2]`, and the share of steps that accepted a draft."""
    committed, count = step(np.full(DRAWS, TIP), slots, 50)
    pairs = committed[:, :2].copy()
    short = np.flatnonzero(count == 1)  # its second token is the next step's first
    of_short = SamplingSlots(**{name: column[short] for name, column in vars(slots).items()})
    pairs[short, 1] = step(pairs[short, 0], of_short, 51)[0][:, 0]
    return pairs, float((count > 1).mean())


def distribution(logits, slots: SamplingSlots, branch=0):
    """p: what the target draws from, filters included."""
    weights = filtered_weights(logits, sampling_of(slots.sampling, branch)).astype(np.float64)
    return weights / weights.sum()


def chi_square(tokens, p):
    """(statistic, degrees of freedom); a token outside the distribution makes it infinite."""
    counts = np.bincount(tokens, minlength=len(p))
    possible = p > 0
    expected = len(tokens) * p[possible]
    statistic = np.inf if counts[~possible].any() else ((counts[possible] - expected) ** 2 / expected).sum()
    return statistic, int(possible.sum()) - 1


def one_in_a_thousand(freedom):
    """The chi-square that is exceeded so often (Wilson and Hilferty's approximation).

    Seeds are fixed, so a test that passes once always does. Wrong rules are to exceed it several times over.
    """
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def chi_squares(pairs, slots):
    """Of the first token, and of the second given the first, all firsts together."""
    first = chi_square(pairs[:, 0], distribution(TABLE[TIP], slots))
    given_first = [
        chi_square(pairs[pairs[:, 0] == token, 1], distribution(TABLE[token], slots))
        for token in np.unique(pairs[:, 0])
    ]
    return first, tuple(sum(column) for column in zip(*given_first, strict=True))
