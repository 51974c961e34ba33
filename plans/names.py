"""Names that the compiler writes and the runtime reads: tensors of engines, buffers, symbols.

A name is a contract. Change one here and both sides change; nothing spells them elsewhere.
"""

from __future__ import annotations

# Symbols: sizes that change from step to step, each model its own. Everything else about a shape is fixed by the plan.
NEW = "N"  # new tokens of the step, of all rows
VIEW = "T"  # keys in view: committed and new, rounded up to a bucket
LOGITS = "M"  # tokens whose logits are computed
ROWS = "R"
ROW_EDGES = "E"  # R + 1
PLACES = "S"  # most new tokens of a row; N where there is one row
FEATURED = "F"  # features that there is room for: one a new token, and those that are kept
TIPS = "B"  # tips of each row that a drafter's trees grow from
GROWN = "D"  # nodes of all these trees, roots included
CAPACITY = "C"  # slots of the KV cache that a stage binds: where engines take several, and no size of a step
SYMBOLS = (NEW, VIEW, LOGITS, ROWS, ROW_EDGES, PLACES, FEATURED, TIPS, GROWN)

PROBED = "P"  # rows of a probe; no size of a step

# Models of a plan. The target is always there; a drafter with weights is another.
TARGET = "target"


def buffer_name(model: str, tensor: str) -> str:
    """The buffer that holds `tensor` for `model`; its symbols are that model's. Buffers without a dot are shared."""
    return f"{model}.{tensor}"


# A model's step: one entry per new token, or per token with logits. Rows lie one after another.
TOKEN_IDS = "token_ids"  # int64 [N]
POSITIONS = "positions"  # int64 [N], for RoPE and for draws
BRANCH = "branch"  # int64 [N], the branch each new token belongs to
PARENT = "parent"  # int64 [N], index in the step of a token's parent; -1: its parent is committed
ROW_SPLITS = "row_splits"  # int64 [E], which row owns which new tokens
LOGIT_INDICES = "logit_indices"  # int64 [M], new tokens whose logits are wanted, ascending
FREE_BIAS = "free_bias"  # int64 [1], 1: the step runs under an `attn_bias` that the host has written

# A model's KV cache and its slot table.
KV = "kv"  # [2 * layers, R, kv_heads, capacity, slot_size], K and V planes alternating
BIM = "bim"  # int64 [R, capacity], the branch index map: which branch each slot belongs to
SLOT_POSITIONS = "slot_positions"  # int64 [R, capacity], position of each slot's token
PAST_LENGTH = "past_length"  # int64 [R]

# A model's recurrent states, by branch: what each layer's convolution keeps of the tokens up to some position, and the
# inputs of the last step's tokens after it, which the next step replays as far as they were accepted.
CONV_TAIL = "conv_tail"  # f32 [layers, branches, kernel - 1, channels]
CONV_LOG = "conv_log"  # f32 [layers, branches, log, channels]
STATE = "state"  # f32 [layers, branches, heads, tiles, keys, 32], matrix states in tiles of 32 values
STATE_LOG = "state_log"  # f32 [layers, branches, log, record]
STATES = ((CONV_TAIL, CONV_LOG), (STATE, STATE_LOG))
"""Every kind of state, and the log of its inputs: their first dimensions are layers and branches."""
REPLAY = "replay"  # int64 [branches, log], rows of the log that were accepted, a path
REPLAYS = "replays"  # int64 [branches], how many
FOLD = "fold"  # int64 [branches], tokens of the step that are folded into the state; the others are logged
STATE_PATH = (PARENT, BRANCH, REPLAY, REPLAYS, FOLD)
"""What ops of recurrent states read of a step, in the order of their inputs."""

# The partial KV cache: the target's for long contexts. The step is the target's.
PARTIAL = "partial"
ROW = "row"  # int64 [1], the row that `refresh` fills; the next ones are of that
COVERED = "covered"  # int64 [1], tokens of the full KV cache that it stands for
LAYER_WINDOWS = "layer_windows"  # int64 [layers], the last tokens that each layer sees; 0: all
SUMMARISED = "summarised"  # int64 [1], blocks that have a summary
KEY_MAX = "key_max"  # f32 [R, layers, kv_heads, head_dim, blocks]
KEY_MIN = "key_min"
BUDGET = "budget"  # int64 [1], blocks to retrieve
SELECTED = "selected"  # int64 [layers, kv_heads, retrieval], blocks chosen, ascending; -1 after the last
RESIDENT = "resident"  # int64 [R, layers, kv_heads, retrieval], those that lie in the KV cache

# Results of a model's step.
QUERIES = "queries"  # f32 [layers, N, heads * head_dim], rotated; where a partial KV cache is filled by them
ATTN_BIAS = "attn_bias"  # f32 [R, 1, S, T]
LOGITS_OUT = "logits"  # f32 [M, vocab]
FEATURES = "features"  # f32 [F, taps * hidden], residual streams that heads read: the first N are the step's
COMMITTED = "committed"  # int64 [M], committed tokens; tree t's start at its root's place in logit_indices
ACCEPTED_COUNT = "accepted_count"  # int64 [branches], committed tokens of each tree
KEPT_INDICES = (
    "kept_indices"  # int64 [N], new tokens that stay, ascending; a drafter's: [grown], nodes of its last tree
)
KEPT_COUNT = "kept_count"  # int64 [1]
MOVE_TO = "move_to"  # int64 [R], where KV that is moved together goes, where not after the committed slots
STATUS = "status"  # int64 [1], of an engine that accepts: 0, or the number of a fault that the walk came to
UNREAD_STATUS = "unread_status"  # int64 [1], likewise, in programs that do not go by what the engine accepts
TRIALS = "trials"  # f64 [M, 2], by rejection: r and p / q of each drafted node that was weighed, NaN elsewhere

# What a drafter reads of the target's last step, and the tree it leaves: the next step of the target.
FEATURE_INDICES = "feature_indices"  # int64 [N], tokens of the target's step whose features the new pairs hold
TIP_POSITION = "tip_position"  # int64 [branches], the tip's in the target
TIP_INDICES = "tip_indices"  # int64 [R, B], new tokens that trees grow from; of plans of several branches
TIP_BRANCH = "tip_branch"  # int64 [R, B], the branch of each
NOISE = "noise"  # f32 [branches, depth + 1, vocab], of the races after the tip: the target's own but for rejection
DRAFT_SAMPLING = "draft_sampling"  # f32 [branches, SETTINGS], what a drafter reads of `sampling`
# One tree has `nodes` of them. Of several, one lies after another, [D] in all: [branches * nodes] is room for them.
TREE_TOKEN_IDS = "tree_token_ids"  # int64 [nodes]; node 0, the root, is the tip
TREE_POSITIONS = "tree_positions"  # int64 [nodes], in the target
TREE_PARENT = "tree_parent"  # int64 [nodes]; -1 at the root
TREE_SCORE = "tree_score"  # f32 [nodes], log-probability summed from the root
TREE_SLOTS = "tree_slots"  # int64 [nodes], slot after the tip's that a level gave the node; -1: none, the root
DRAFT_PROBS = "draft_probs"  # f32 [M, vocab], what each node was drawn from, by rejection; [D, vocab], a drafter's
TREE = (TREE_TOKEN_IDS, TREE_POSITIONS, TREE_PARENT, TREE_SCORE)

# What stages may write. Everything else is the host's; a drafter's engine writes the target's next step.
STAGE_WRITTEN = frozenset(
    {ATTN_BIAS, LOGITS_OUT, FEATURES, COMMITTED, ACCEPTED_COUNT, KEPT_INDICES, KEPT_COUNT, TRIALS, KV}
    | {NOISE, DRAFT_SAMPLING, DRAFT_PROBS, TREE_SLOTS, *TREE}
    | {STATUS, UNREAD_STATUS, QUERIES}
)
PARTIAL_WRITTEN = frozenset({KV, KEY_MAX, KEY_MIN, SELECTED, RESIDENT})
"""Tensors of the partial KV cache that stages of the target may write."""

DRAFTED = {TREE_TOKEN_IDS: TOKEN_IDS, TREE_POSITIONS: POSITIONS, TREE_PARENT: PARENT, DRAFT_PROBS: DRAFT_PROBS}

# Sampling settings, one slot per branch, shared by all models.
SAMPLING = "sampling"  # f64 [branches, SETTINGS], rows of `plans.sampling.Sampling`
SEED = "seed"  # uint64 [branches]
STREAM = "stream"  # int64 [branches]
BY_REJECTION = "by_rejection"  # int64 [branches], 1: the branch's chain is accepted by rejection
SKIP_SAMPLE_ADJUSTMENT = "skip_sample_adjustment"  # int64 [branches], 1: rejection draws from p (debugging)


# Programs.
PREFILL = "prefill"
DECODE = "decode"
VERIFY = "verify"  # what hangs after the tips of any number of branches
BEAM = "beam"  # the target's engine alone, under an `attn_bias` that the host writes
REFRESH = "refresh"  # fills the partial KV cache from the full one


def speculate(drafter: str) -> str:
    """The program that speculates with the drafter of this name."""
    return f"speculate.{drafter}"


def partial(program: str) -> str:
    """The name of a program that reads the partial KV cache."""
    name, dot, drafter = program.partition(".")
    return f"{name}_partial{dot}{drafter}"


def draft(drafter: str) -> str:
    """The program that drafts after the tips of several sequences."""
    return f"draft.{drafter}"


def compact(model: str) -> str:
    """The program that moves slots of a model's KV cache together: accepted nodes of a drafter's last tree after the
    tip's, or live slots over dead ones."""
    return f"compact.{model}"


def extend(drafter: str) -> str:
    """The program that computes a drafter's KV, and drafts nothing that is used."""
    return f"extend.{drafter}"


def k_cache(layer: int) -> str:
    """KV cache tensor of a layer's keys, `[R, kv_heads, capacity, slot_size]`; the graph's output has `_out` after."""
    return f"k_cache.{layer}"


def v_cache(layer: int) -> str:
    return f"v_cache.{layer}"


def of_layer(state: str, layer: int) -> str:
    """What the `layer`-th layer that keeps states has of a kind of `STATES`, without the dimension of layers."""
    return f"{state}.{layer}"


def queries(layer: int) -> str:
    """A layer's queries, rotated, f32 `[N, heads * head_dim]`: an output of the target's graph."""
    return f"{QUERIES}.{layer}"


def cache_output(name: str, index: int = 0) -> str:
    """The output tensor of a graph's `index`-th pass that is bound to the same memory as cache input `name`."""
    return f"{name}_out.{index}" if index else f"{name}_out"
