"""DraftSample: a token drawn from a drafter's own distribution, and that distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.cuda.launches import ROW_THREADS, make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.ops.tree_expand import DRAFT_SETTINGS, DraftSettings, kept_weights
from outrider.plugins.schema import INTEGER, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Plugin

SCHEMA = OpSchema(
    name="DraftSample",
    version=4,
    doc="""A token drawn from a drafter's own distribution, and that distribution, for rejection.

    token[b] wins the race of probability[b] with noise[b]: the largest probability over noise. probability[b] is the
    drafter's distribution under the branch's temperature, top-k, top-p (their cuts looked for among the 64 likeliest
    tokens) and min-p; greedy, all of it at the argmax.
    Stands in graphs only: a function body of standard ops, or the CUDA kernel.
    Source: arXiv 2211.17192.""",
    inputs=(
        TensorSpec("logits", "float32", ("trees", "nodes", "V")),
        *DRAFT_SETTINGS,
    ),
    outputs=(
        TensorSpec("token", INTEGER, ("trees", "nodes")),
        TensorSpec("probability", "float32", ("trees", "nodes", "V")),
    ),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_draft_sample",
    numbers=("nodes", "V"),
    blocks=lambda s: s["trees"] * s["nodes"],
    threads=lambda s: ROW_THREADS,
)
_PLUGIN = Plugin(name="DraftSample", launch=_LAUNCH, inputs=SCHEMA.inputs, outputs=SCHEMA.outputs)
OP = Op(SCHEMA, (_PLUGIN,), _LAUNCH)


def draft_sample(logits: NDArray[np.float32], settings: DraftSettings) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return `(token [B, F], probability [B, F, V])`; shapes as in the schema of DraftSample, sums in float64."""
    trees, nodes, _ = logits.shape
    token = np.zeros((trees, nodes), np.int64)
    probability = np.zeros(logits.shape)
    for tree in range(trees):
        for node in range(nodes):
            row = logits[tree, node].astype(np.float64)
            if settings.row(tree).temperature > 0:
                weights = kept_weights(row, settings, tree)
                token[tree, node] = (weights / settings.noise[tree]).argmax()
                probability[tree, node] = weights / weights.sum()
            else:
                token[tree, node] = row.argmax()
                probability[tree, node, row.argmax()] = 1.0
    return token, probability
