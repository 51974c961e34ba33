"""TreeAccept: walk each draft tree along the target's own choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.sampling import NOBODY
from outrider.plugins.cuda.launches import COUNTER, make_launch
from outrider.plugins.ops import row_choices as rows
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.ops.sample import ROW_SHARES
from outrider.plugins.schema import OpSchema, Purpose

SCHEMA = OpSchema(
    name="TreeAccept",
    version=4,
    doc="""Walk each draft tree along the target's own choices.

    logit_indices ascends. A token in it whose parent is not in it is the root of a tree (its tip), the others are
    drafted nodes of that tree and stand next to each other. Tokens outside it are pending: committed, KV not yet
    computed. A root of branch NOBODY fills up the step: it is no tree's, commits nothing, and is not kept.
    From the root: x = choice(node), as Sample does; if a child of the node holds x, commit x and continue at it; else
    commit x and stop. One draw a visited node.

    committed[m + j] is token j of the tree whose root has place m; accepted_count[t] counts the tokens of tree t, the
    extra one included, and is 0 after the last tree; kept_indices[:kept_count] are the pending tokens and the visited
    nodes, ascending. Entries of committed[:M] and kept_indices[:N] that say nothing are -1.
    Errors: as Sample, and ValueError for parents out of range, indices not ascending, trees not contiguous or too many.
    An error found before the walk leaves the outputs as they were.
    Source: arXiv 2408.07978 for the invariance.""",
    inputs=(*rows.CHOICE_INPUTS, *rows.TREE_INPUTS),
    outputs=rows.ACCEPT_OUTPUTS,
    attributes=(rows.PURPOSE,),
    extents=(names.NEW, names.LOGITS),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_tree_accept",
    numbers=("V", "B", "trees", names.NEW, "purpose"),
    blocks=rows.share_blocks,
    scratch={**rows.SHARED_OUT, **rows.NODES, **rows.ARRIVED, **COUNTER},
)
_PLUGINS = (
    ROW_SHARES,
    rows.choice_plugin(SCHEMA, "TreeChoices", "outrider_tree_choices", (rows.CHOSEN, rows.NEXT), rows.ROWS_FIT),
    rows.walk_plugin(SCHEMA, "TreeWalk", "outrider_tree_walk", (rows.CHOSEN, rows.NEXT)),
)
OP = Op(SCHEMA, _PLUGINS, _LAUNCH)


@dataclass(frozen=True)
class Accepted:
    """The tokens that a step committed, and the new tokens whose KV stays.

    committed int64 `[M]`: token j of a tree stands j after the place of the tree's root in `logit_indices`; -1
    elsewhere. accepted_count int64 `[trees]`; kept_indices int64 `[kept]`, ascending.
    """

    committed: NDArray[np.int64]
    accepted_count: NDArray[np.int64]
    kept_indices: NDArray[np.int64]


def walk_trees(
    logit_indices: NDArray[np.int64],
    parent: NDArray[np.int64],
    branch: NDArray[np.int64],
    step: Callable[[int], tuple[int, int | None]],
) -> Accepted:
    """Walk each tree from its root: `step(node)` returns the token after the node, and the next node or None."""
    rows = logit_indices.tolist()
    committed = np.full(len(rows), -1, dtype=np.int64)
    counts = []
    kept = [row for row in range(len(parent)) if row not in rows]

    for place, root in enumerate(rows):
        if parent[root] in rows or branch[root] == NOBODY:
            continue  # a drafted node, or one that fills up the step
        tokens: list[int] = []
        node: int | None = root
        while node is not None:
            kept.append(node)
            token, node = step(node)
            tokens.append(token)
        committed[place : place + len(tokens)] = tokens
        counts.append(len(tokens))

    return Accepted(committed, np.array(counts, dtype=np.int64), np.array(sorted(kept), dtype=np.int64))


def tree_accept(tensors: Tensors, purpose: Purpose = Purpose.TARGET) -> Accepted:
    """Walk every tree of the step along the target's own choices, by the inputs of TreeAccept."""
    slots, rows = SamplingSlots.among(tensors), tensors[names.LOGIT_INDICES]
    branch, positions = tensors[names.BRANCH], tensors[names.POSITIONS]
    token_ids, parent = tensors[names.TOKEN_IDS], tensors[names.PARENT]
    place_of = {row: place for place, row in enumerate(rows.tolist())}

    def step(node: int) -> tuple[int, int | None]:
        x = slots.choose(tensors[names.LOGITS_OUT][place_of[node]], int(branch[node]), int(positions[node]), purpose)
        return x, next((row for row in place_of if parent[row] == node and token_ids[row] == x), None)

    return walk_trees(rows, parent, branch, step)
