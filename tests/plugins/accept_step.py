"""What the tests of TreeAccept and ChainAccept share: a bound step, random forests, settings of branches."""

from __future__ import annotations

import numpy as np

from plugins import native
from plugins.reference import SamplingSlots

POISON = -77


class AcceptStep:
    """An accept op bound to the arrays of one step, by their names, with outputs full of POISON."""

    def __init__(self, op_name, reference, slots, tensors, *, trees=8):
        self.reference, self.slots, self.tensors = reference, slots, tensors
        self.new, self.count = len(tensors["token_ids"]), len(tensors["logit_rows"])
        self.committed = np.full(self.count, POISON)
        self.accepted_count = np.full(trees, POISON)
        self.kept_rows = np.full(self.new, POISON)
        self.kept_count = np.full(1, POISON)
        outputs = {"committed": self.committed, "accepted_count": self.accepted_count}
        outputs |= {"kept_rows": self.kept_rows, "kept_count": self.kept_count}
        self.trials = np.full((self.count, 2), float(POISON))
        if op_name == "ChainAccept":
            outputs["trials"] = self.trials
        self.op = native.create(op_name, tensors | outputs | vars(slots))

    def run(self):
        self.op(self.new, self.count)
        return self

    def assert_equals(self, expected):
        trees, kept = len(expected.accepted_count), len(expected.kept_rows)
        np.testing.assert_array_equal(self.committed, expected.committed)
        np.testing.assert_array_equal(self.accepted_count[:trees], expected.accepted_count)
        assert (self.accepted_count[trees:] == 0).all()
        assert self.kept_count[0] == kept
        np.testing.assert_array_equal(self.kept_rows[:kept], expected.kept_rows)
        assert (self.kept_rows[kept:] == -1).all()
        if hasattr(expected, "trials"):
            np.testing.assert_array_equal(self.trials, expected.trials)

    def assert_equals_reference(self):
        self.assert_equals(self.reference(slots=self.slots, **self.tensors))

    def assert_untouched(self):
        for output in (self.committed, self.accepted_count, self.kept_rows, self.kept_count, self.trials):
            assert (output == POISON).all()


def equal_slots(branches=1, *, temperature=0.0, top_k=0, top_p=1.0, seed=3) -> SamplingSlots:
    """The same settings for each branch; branch b draws from stream b."""
    return SamplingSlots(
        np.full(branches, temperature, np.float64),
        np.full(branches, top_k),
        np.full(branches, top_p, np.float64),
        np.zeros(branches, np.int64),
        np.full(branches, seed, np.uint64),
        np.arange(branches),
    )


def forest(rng, trees, most_pending, most_nodes, vocabulary, straight):
    """Random trees, each behind its chain of pending tokens: (token_ids, parent, branch, logit_rows).

    `straight` is the probability that a node is the child of the one before it: 1 makes chains.
    """
    token_ids, parent, branch, logit_rows = [], [], [], []
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
                logit_rows.append(row)
    return tuple(np.array(column, dtype=np.int64) for column in (token_ids, parent, branch, logit_rows))


def depth_of(parent):
    depth = np.zeros(len(parent), np.int64)
    for i, p in enumerate(parent.tolist()):
        depth[i] = depth[p] + 1 if p >= 0 else 0
    return depth
