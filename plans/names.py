"""Names that the compiler writes and the runtime reads: tensors of engines, buffers, symbols.

A name is a contract. Change one here and both sides change; nothing spells them elsewhere.
"""

from __future__ import annotations

# Symbols: sizes that change from step to step. Everything else about a shape is fixed by the plan.
NEW = "N"  # new tokens of the step
VIEW = "T"  # keys in view: committed and new, rounded up to a bucket
LOGITS = "M"  # tokens whose logits are computed
SYMBOLS = (NEW, VIEW, LOGITS)

# Symbols of graphs with several rows; with one row they are 1, 2 and N.
ROWS = "R"
ROW_EDGES = "E"  # R + 1
PLACES = "S"  # most new tokens of a row

# What a step is: one entry per new token, or per token with logits.
TOKEN_IDS = "token_ids"  # int64 [N]
POSITIONS = "positions"  # int64 [N], for RoPE and for draws
BRANCH = "branch"  # int64 [N], the branch each new token belongs to
PARENT = "parent"  # int64 [N], index in the step of a token's parent; -1: its parent is committed
ROW_SPLITS = "row_splits"  # int64 [R+1], which row owns which new tokens
LOGIT_ROWS = "logit_rows"  # int64 [M], new tokens whose logits are wanted, ascending

# The target's slot map.
BIM = "bim"  # int64 [capacity]
PAST_LENGTH = "past_length"  # int64 [1]
KV = "kv"  # [2 * layers, kv_heads, capacity, head_dim], K and V planes alternating

# Results of a step.
ATTN_BIAS = "attn_bias"  # f32 [1, 1, N, T]
LOGITS_OUT = "logits"  # f32 [M, vocab]
COMMITTED = "committed"  # int64 [M], committed tokens; tree t's start at its root's place in logit_rows
ACCEPTED_COUNT = "accepted_count"  # int64 [trees], committed tokens of each tree
KEPT_ROWS = "kept_rows"  # int64 [N], new tokens that stay, ascending
KEPT_COUNT = "kept_count"  # int64 [1]

# Sampling settings, one slot per branch.
TEMPERATURE = "temperature"  # f64 [branches], 0 is greedy
TOP_K = "top_k"  # int64 [branches], 0 is off
TOP_P = "top_p"  # f64 [branches], 1 is off
FILTER_ORDER = "filter_order"  # int64 [branches], 0 temperature first, 1 temperature last
SEED = "seed"  # uint64 [branches]
STREAM = "stream"  # int64 [branches]


# Programs.
PREFILL = "prefill"
DECODE = "decode"


def speculate(drafter: str) -> str:
    """The program that speculates with the drafter of this name."""
    return f"speculate.{drafter}"


def k_cache(layer: int) -> str:
    """Arena tensor of a layer's keys, `[1, kv_heads, capacity, head_dim]`; the graph's output has `_out` behind."""
    return f"k_cache.{layer}"


def v_cache(layer: int) -> str:
    return f"v_cache.{layer}"


def cache_output(name: str) -> str:
    """The output tensor of a graph that is bound to the same memory as cache input `name`."""
    return f"{name}_out"
