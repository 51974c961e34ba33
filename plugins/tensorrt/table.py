"""The plugins that each op becomes in an engine, or why it becomes none: data, made of the ops' schemas and launches.

A plugin's kernel gets inputs, outputs and integers, and no memory that outlives the kernel. Hence:

- Scratch that a launch fills and uses itself is an output that nobody reads (`candidates`). A node may leave out its
  last outputs, so the op's own outputs come first.
- A row of logits is shared out to blocks, and chosen from by one block when all of them are done, which needs a
  counter. So every choice is a plugin that summarises shares, and another that chooses.
- `status` is an output with a place for each block that may report a fault. Each block writes its own place, also
  without a fault, because nobody zeroes `status` before. In acceptance only the walk reports faults, because logits of
  nodes that the walk does not visit may hold anything. The choices pass a node's fault to the walk in place of the
  node's token.
- Acceptance in one kernel, whose last block walks, needs a counter in memory that is zero before the first block runs.
  So acceptance becomes three plugins: after the shares, one computes what each node would commit, and the last walks,
  in one block. None keeps state, so an engine may be interrupted, timed or replayed at will. The price is two launches.
  (A single block would take as long as all blocks one after another.) Tree growth is split likewise: the first plugin
  computes the children of each node, the second picks each tree's next frontier.
- A size that no input has comes as an extra input whose memory is not read: `places` [S], `view` [T], `slots` [B]. With
  one row, `branch` serves as `places`. A value that the engine's builder knows is an attribute: `purpose`, `depths`,
  `V`. TensorRT bakes it into the engine as a constant argument.
- TensorRT has neither float64 nor uint64. Such tensors are carried as int64, bit for bit: sampling and seed (engine
  inputs, bound to the same memory) and trials of `ChainAccept` (engine outputs). Only our plugins can calculate with
  them, so that drafters read `RaceNoise`'s float32s.
- A kernel's arguments are integers. A float attribute is passed as the bits of a float32.
- A builder times kernels on arbitrary memory contents. Guards keep the kernels within their tensors then (parts.cu.h).
  Drafting kernels follow no index that they read, so their guards check sizes only.
- TensorRT gives every such plugin version 1. An engine holds its own kernels and never uses other ones.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.plans import names
from outrider.plugins.cuda.launches import (
    CANDIDATE_BYTES,
    LAUNCHES,
    MOST_CANDIDATES,
    SHARE_BYTES,
    STATUS,
    Launch,
    shares,
)
from outrider.plugins.schema import EXPERT_OPS, QUANT_OPS, SLOT, TensorSpec
from outrider.plugins.schemas import SCHEMAS
from outrider.plugins.tensorrt.plugin import SAME_SIZE, Declined, Plugin

_PLACES = TensorSpec("places", "int64", (names.PLACES,))
_VIEW = TensorSpec("view", "int64", (names.VIEW,))
_SLOTS = TensorSpec("slots", "int64", ("B",))

_STATUS = TensorSpec(STATUS, "int64", (1,))  # status of a step: 0, or the number of a fault
_STATUS_OF_ROWS = TensorSpec(STATUS, "int64", (names.LOGITS,))
_SHARES = TensorSpec("shares", "uint64", (names.LOGITS, "shares", SHARE_BYTES // 8))  # csrc/cuda/row_share.h
_CANDIDATES = TensorSpec("candidates", "uint64", (names.LOGITS, MOST_CANDIDATES * CANDIDATE_BYTES // 8))
_CHOSEN = TensorSpec("chosen", "int64", (names.LOGITS,))  # the token that each node would commit; below -1, its fault
_NEXT = TensorSpec("next", "int64", (names.LOGITS,))  # the place of the child where the walk continues, or -1
_WEIGHED = TensorSpec("weighed", "float64", (names.LOGITS, 2))

_CHILD, _CHILD_SCORE, _FRONTIER = SCHEMAS["TreeExpand"].outputs

_ROWS_FIT = f"rows_ascend({names.LOGIT_INDICES}, {names.LOGITS}, {names.NEW})"


def _inputs(op: str) -> tuple[TensorSpec, ...]:
    return SCHEMAS[op].inputs


def _outputs(op: str) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, shape=tuple(SAME_SIZE.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape))
        for spec in SCHEMAS[op].outputs
    )


def _attributes(op: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in SCHEMAS[op].attributes)


def _shares(op: str, name: str, kernel: str, others: tuple[str, ...], guard: str) -> Plugin:
    """Return the first part of a choice: blocks summarise their shares of every row of logits."""
    tensors = {spec.name: spec for spec in SCHEMAS[op].inputs}
    inputs = (*_inputs("Sample"), *(tensors[other] for other in others))
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, _SHARES)),
            numbers=("V", "B", *_attributes(op)),
            blocks=LAUNCHES[op].blocks,
        ),
        inputs=inputs,
        outputs=(_SHARES,),
        attributes=_attributes(op),
        derived={"shares": shares},
        guard=guard,
        extra=(names.LOGITS, names.NEW),
    )


def _choices(
    op: str, name: str, kernel: str, found: tuple[TensorSpec, ...], guard: str, reported: tuple[TensorSpec, ...] = ()
) -> Plugin:
    """Return the second part of a choice: one block for each row."""
    inputs = (*_inputs(op), _SHARES)
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, *found, _CANDIDATES, *reported)),
            numbers=("V", "B", *_attributes(op)),
            blocks=lambda sizes: sizes[names.LOGITS],
        ),
        inputs=inputs,
        outputs=(*found, *reported, _CANDIDATES),
        attributes=_attributes(op),
        guard=guard,
        extra=(names.LOGITS, names.NEW),
    )


def _walk(op: str, name: str, kernel: str, found: tuple[TensorSpec, ...]) -> Plugin:
    """Return the last part of an acceptance: one warp reads the choices; its first thread walks and reports faults."""
    tensors = {spec.name: spec for spec in SCHEMAS[op].inputs}
    inputs = (tensors[names.LOGIT_INDICES], tensors[names.PARENT], *found)
    return Plugin(
        name=name,
        launch=Launch(
            kernel=kernel,
            pointers=tuple(spec.name for spec in (*inputs, *SCHEMAS[op].outputs, _STATUS)),
            numbers=(names.LOGITS, "trees", names.NEW),
            blocks=lambda sizes: 1,
            threads=lambda sizes: 32,
        ),
        inputs=(*inputs, _SLOTS),
        outputs=(*_outputs(op), _STATUS),
        guard=f"{_ROWS_FIT} && steps_forward(next, {names.LOGITS})",
    )


_ROW_SHARES = _shares(
    "Sample",
    "RowShares",
    "outrider_row_shares",
    (),
    f"within({names.LOGIT_INDICES}[block_index() / shares_of(V)], {names.NEW})",
)
_BETWEEN_ENGINES = Declined("it runs between engines, on what their steps have left")

PLUGINS: dict[str, tuple[Plugin, ...] | Declined] = {
    "BimMask": (
        Plugin(
            name="BimMask",
            launch=LAUNCHES["BimMask"],
            inputs=(*_inputs("BimMask"), _PLACES, _VIEW),
            outputs=_outputs("BimMask"),
            guard="row_fits(row_splits, past_length, block_index() / S, N) && T <= capacity",
            extra=(names.NEW,),
        ),
    ),
    "Sample": (
        _ROW_SHARES,
        _choices(
            "Sample",
            "RowChoice",
            "outrider_row_choice",
            _outputs("Sample"),
            f"within({names.LOGIT_INDICES}[block_index()], {names.NEW})",
            reported=(_STATUS_OF_ROWS,),
        ),
    ),
    "TreeAccept": (
        _ROW_SHARES,
        _choices("TreeAccept", "TreeChoices", "outrider_tree_choices", (_CHOSEN, _NEXT), _ROWS_FIT),
        _walk("TreeAccept", "TreeWalk", "outrider_tree_walk", (_CHOSEN, _NEXT)),
    ),
    "ChainAccept": (
        _shares(
            "ChainAccept",
            "ChainShares",
            "outrider_chain_shares",
            (names.PARENT, names.DRAFT_PROBS, names.BY_REJECTION),
            _ROWS_FIT,
        ),
        _choices("ChainAccept", "ChainChoices", "outrider_chain_choices", (_CHOSEN, _NEXT, _WEIGHED), _ROWS_FIT),
        _walk("ChainAccept", "ChainWalk", "outrider_chain_walk", (_CHOSEN, _NEXT, _WEIGHED)),
    ),
    "RaceNoise": (
        Plugin(
            name="RaceNoise",
            launch=LAUNCHES["RaceNoise"],
            inputs=_inputs("RaceNoise"),
            outputs=_outputs("RaceNoise"),
            attributes=("depths", "V", *_attributes("RaceNoise")),
        ),
    ),
    "KvGather": (
        Plugin(
            name="KvGather",
            launch=LAUNCHES["KvGather"],
            inputs=_inputs("KvGather"),
            outputs=_outputs("KvGather"),
            guard=(
                "moves_fit(source_count, row_splits, source_base, destination, R, block_index() / heads % R, N, "
                "capacity)"
            ),
            extra=(names.NEW,),
            aliased={names.KV: names.KV},
            constants=(SLOT,),
        ),
    ),
    **dict.fromkeys(("BlockSummary", "BlockSelect", "PartialKvGather"), _BETWEEN_ENGINES),
    **dict.fromkeys(
        QUANT_OPS,
        Declined("TensorRT fuses dequantised weights with the product that reads them"),
    ),
    "BranchAttention": Declined("it is lowered to TensorRT's own cache update and attention layers"),
    **dict.fromkeys(
        ("Route", "BiasedRoute", *EXPERT_OPS),
        Declined("standard ops compute every expert; no kernel of ours for GPUs computes the chosen ones alone"),
    ),
    **dict.fromkeys(("SiluUnit", "GeluUnit", "Softcap"), Declined("TensorRT fuses their standard ops")),
    "WindowBias": Declined("standard ops compute it once for all layers that share a window"),
    "DraftSample": (
        Plugin(
            name="DraftSample",
            launch=LAUNCHES["DraftSample"],
            inputs=_inputs("DraftSample"),
            outputs=SCHEMAS["DraftSample"].outputs,
        ),
    ),
    "TreeExpand": (
        Plugin(
            name="TreeChildren",
            launch=LAUNCHES["TreeExpand"],
            inputs=_inputs("TreeExpand"),
            outputs=(_CHILD, _CHILD_SCORE),
            attributes=_attributes("TreeExpand"),
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
                blocks=lambda sizes: sizes["trees"],
            ),
            inputs=(_CHILD_SCORE,),
            outputs=(_FRONTIER,),
            attributes=("top_k",),
            guard="0 < top_k && top_k <= kMostBest && top_k <= candidates",
        ),
    ),
    "TreeRerank": (
        Plugin(
            name="TreeRerank",
            launch=LAUNCHES["TreeRerank"],
            inputs=_inputs("TreeRerank"),
            outputs=SCHEMAS["TreeRerank"].outputs,
            attributes=_attributes("TreeRerank"),
            derived={"nodes - 1": lambda s: s["nodes"] - 1},
            guard="0 < nodes && nodes <= candidates + 1",
        ),
    ),
}

DISTINCT: tuple[Plugin, ...] = tuple(
    {plugin.name: plugin for entry in PLUGINS.values() if not isinstance(entry, Declined) for plugin in entry}.values()
)
"""Every plugin once: ops may have some in common."""
