"""What the tests of TreeAccept and ChainAccept share: a bound step, random forests, faults, settings of branches."""

from __future__ import annotations

import numpy as np

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.reference import SamplingSlots

POISON = -77


class AcceptStep:
    """An accept op bound to the arrays of one step, by their names, with outputs full of POISON."""

    def __init__(self, op_name, reference, slots, tensors, *, trees=8):
        self.reference, self.slots, self.tensors = reference, slots, tensors
        self.new, self.count = len(tensors["token_ids"]), len(tensors["logit_indices"])
        self.committed = np.full(self.count, POISON)
        self.accepted_count = np.full(trees, POISON)
        self.kept_indices = np.full(self.new, POISON)
        self.kept_count = np.full(1, POISON)
        outputs = {"committed": self.committed, "accepted_count": self.accepted_count}
        outputs |= {"kept_indices": self.kept_indices, "kept_count": self.kept_count}
        self.trials = np.full((self.count, 2), float(POISON))
        if op_name == "ChainAccept":
            outputs["trials"] = self.trials
        self.op = native.create(op_name, tensors | outputs | vars(slots))

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
        self.assert_equals(self.reference(slots=self.slots, **self.tensors))

    def assert_untouched(self):
        for output in (self.committed, self.accepted_count, self.kept_indices, self.kept_count, self.trials):
            assert (output == POISON).all()


def slots_of(settings, seed=3) -> SamplingSlots:
    """A branch for each of `settings`, rows of `Sampling`; branch b draws from stream b."""
    rows = np.array([Sampling(*each) for each in settings], np.float64)
    return SamplingSlots(rows, np.full(len(rows), seed, np.uint64), np.arange(len(rows)))


def equal_slots(branches=1, *, seed=3, **settings) -> SamplingSlots:
    """The same settings for each branch."""
    return slots_of([Sampling(**settings)] * branches, seed)


def forest(rng, trees, most_pending, most_nodes, vocabulary, straight):
    """Random trees, each after its chain of pending tokens: (token_ids, parent, branch, logit_indices).

    `straight` is the probability that a node is the child of the one before it: 1 makes chains.
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
            elif i <= pending or rng.random() < straight:
                parent.append(row - 1)
            else:
                parent.append(int(rng.integers(root, row)))
            token_ids.append(int(rng.integers(0, vocabulary)))
            branch.append(b)
            if row >= root:
                logit_indices.append(row)
    return tuple(np.array(column, dtype=np.int64) for column in (token_ids, parent, branch, logit_indices))


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
        told = {"contains NaN": 1, "is -inf for every token": 2}
        return next((number for text, number in told.items() if text in str(error)), 3)
    return 0


def fork(op):
    """A step whose walk comes to nodes 0 and 1 of 4, tensors and outputs. Of a tree, 2 hangs from 0 and 3 from 1."""
    logits = np.zeros((4, 8), np.float32)
    logits[0, 1] = logits[1, 5] = 9
    tensors = {
        "logits": logits, "logit_indices": np.arange(4), "positions": np.arange(4), "branch": np.zeros(4, np.int64),
        **vars(equal_slots()), "token_ids": np.array([7, 1, 2, 3]), "parent": np.array([-1, 0, 0, 1]),
    }  # fmt: skip
    sizes = {"committed": 4, "accepted_count": 1, "kept_indices": 4, "kept_count": 1}
    outputs = {name: np.full(size, POISON) for name, size in sizes.items()}
    if op == "ChainAccept":
        tensors["parent"] = np.arange(4) - 1
        tensors |= {"draft_probs": np.full((4, 8), 0.125, np.float32), "skip_sample_adjustment": np.zeros(1, np.int64)}
        tensors["by_rejection"] = np.ones(1, np.int64)
        outputs["trials"] = np.full((4, 2), float(POISON))
    return tensors, outputs


def depth_of(parent):
    depth = np.zeros(len(parent), np.int64)
    for i, p in enumerate(parent.tolist()):
        depth[i] = depth[p] + 1 if p >= 0 else 0
    return depth
