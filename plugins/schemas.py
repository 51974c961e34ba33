"""Inputs and outputs of our ops: pure data that the compiler writes programs from and the runtime binds tensors by.

A symbol in a shape is one size throughout an op: tensors that name the same symbol must agree on it, and E is R + 1.
The first line of a `doc` says what the op does; the function of the same name in `plugins.reference` is its rule in
readable form.
"""

from __future__ import annotations

from outrider.plans import names
from outrider.plans.sampling import SETTINGS
from outrider.plugins.kv_schemas import BLOCK_SELECT, BLOCK_SUMMARY, KV_GATHER, PARTIAL_KV_GATHER
from outrider.plugins.schema import (
    ANY_FLOAT,
    CAPACITY,
    INTEGER,
    ROW_SPLITS,
    AttributeSpec,
    OpSchema,
    Purpose,
    TensorSpec,
    one,
    per_new_token,
    per_row,
)

_SLOTS = "B"  # sampling slots, one per branch
_VOCABULARY = "V"

_CHOICE_SLOTS = (
    TensorSpec(names.SAMPLING, "float64", (_SLOTS, SETTINGS)),
    TensorSpec(names.SEED, "uint64", (_SLOTS,)),
    TensorSpec(names.STREAM, INTEGER, (_SLOTS,)),
)
_CHOICE_INPUTS = (
    TensorSpec(names.LOGITS_OUT, "float32", (names.LOGITS, _VOCABULARY)),
    TensorSpec(names.LOGIT_INDICES, INTEGER, (names.LOGITS,)),
    per_new_token(names.POSITIONS),
    per_new_token(names.BRANCH),
    *_CHOICE_SLOTS,
)
_ATTN_BIAS = TensorSpec(names.ATTN_BIAS, "float32", (names.ROWS, 1, names.PLACES, names.VIEW))
_COMMITTED = TensorSpec(names.COMMITTED, INTEGER, (names.LOGITS,))
_TREE_INPUTS = (per_new_token(names.TOKEN_IDS), per_new_token(names.PARENT))
_ACCEPT_OUTPUTS = (
    _COMMITTED,
    TensorSpec(names.ACCEPTED_COUNT, INTEGER, ("trees",)),
    per_new_token(names.KEPT_INDICES),
    one(names.KEPT_COUNT),
)
_PURPOSE = AttributeSpec("purpose", int, int(Purpose.TARGET))

_BIM_MASK = OpSchema(
    name="BimMask",
    version=1,
    doc="""The attention bias of a step: 0 where a key is visible, float32's lowest where it is not.

    Row r owns new tokens row_splits[r] .. row_splits[r+1]-1 (0 = row_splits[0] <= ... <= row_splits[R] = N; a row may
    own none), and its bias is attn_bias[r]. Its token n stands at place s = n - row_splits[r]:
    a committed key j < past_length[r] is visible iff bim[r, j] is -1 or branch[n]; the key of the row's token at place
    j, at past_length[r] + j, is visible iff that token is n or an ancestor of n through parent (parent[n] < n, a token
    of the same row; -1: its parent is committed; a prefill is a chain). All other keys are masked.
    Places after a row's tokens fill up the rectangle: they see key 0 alone, so that no softmax is over nothing.
    S >= a row's tokens and T >= past_length[r] + its tokens, for every row.
    Errors: ValueError for extents, splits, past_length, parents or branches out of range, before any write.""",
    inputs=(
        TensorSpec(names.BIM, INTEGER, (names.ROWS, CAPACITY)),
        per_row(names.PAST_LENGTH),
        ROW_SPLITS,
        per_new_token(names.BRANCH),
        per_new_token(names.PARENT),
    ),
    outputs=(_ATTN_BIAS,),
    extents=(names.NEW, names.VIEW, names.ROWS, names.PLACES),
)

_SAMPLE = OpSchema(
    name="Sample",
    version=3,
    doc="""One token for each new token with logits.

    committed[m] = choice(logits[m], sampling[b], noise), with n = logit_indices[m], b = branch[n] and the noise of
    (seed[b], stream[b], positions[n] + 1, purpose): an exponential race among the tokens that the filters keep.
    Errors: ValueError for extents, indices or settings out of range, and for logits with NaN or with -inf alone.""",
    inputs=_CHOICE_INPUTS,
    outputs=(_COMMITTED,),
    attributes=(_PURPOSE,),
    extents=(names.NEW, names.LOGITS),
)

_TREE_ACCEPT = OpSchema(
    name="TreeAccept",
    version=3,
    doc="""Walk each draft tree along the target's own choices.

    logit_indices ascends. A token in it whose parent is not in it is the root of a tree (its tip), the others are
    drafted nodes of that tree and stand next to each other. Tokens outside it are pending: committed, KV not yet
    computed.
    From the root: x = choice(node), as Sample does; if a child of the node holds x, commit x and continue at it; else
    commit x and stop. One draw a visited node.

    committed[m + j] is token j of the tree whose root has place m; accepted_count[t] counts the tokens of tree t, the
    extra one included, and is 0 after the last tree; kept_indices[:kept_count] are the pending tokens and the visited
    nodes, ascending. Entries of committed[:M] and kept_indices[:N] that say nothing are -1.
    Errors: as Sample, and ValueError for parents out of range, indices not ascending, trees not contiguous or too many.
    An error found before the walk leaves the outputs as they were.
    Source: arXiv 2408.07978 for the invariance.""",
    inputs=(*_CHOICE_INPUTS, *_TREE_INPUTS),
    outputs=_ACCEPT_OUTPUTS,
    attributes=(_PURPOSE,),
    extents=(names.NEW, names.LOGITS),
)

_CHAIN_ACCEPT = OpSchema(
    name="ChainAccept",
    version=5,
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
        *_CHOICE_INPUTS,
        *_TREE_INPUTS,
        TensorSpec(names.DRAFT_PROBS, "float32", (names.LOGITS, _VOCABULARY)),
        TensorSpec(names.SKIP_SAMPLE_ADJUSTMENT, INTEGER, (_SLOTS,)),
        TensorSpec(names.BY_REJECTION, INTEGER, (_SLOTS,)),
    ),
    outputs=(*_ACCEPT_OUTPUTS, TensorSpec(names.TRIALS, "float64", (names.LOGITS, 2))),
    extents=(names.NEW, names.LOGITS),
)

_RACE_NOISE = OpSchema(
    name="RaceNoise",
    version=2,
    doc="""What a drafter looks at: the noise of the races after each tip, and the branch's settings in float32.

    noise[b, d, i] is that of token i at (seed[b], stream[b], tip_position[b] + 1 + d, purpose), exponentially
    distributed: by the default purpose the target's own, so that the drafter runs the race that the target will.
    Not written where the temperature of b is 0. draft_sampling is sampling, rounded to the nearest float32: what is
    drafted is a guess, and backends without float64 make it too.
    Errors: ValueError for an unknown purpose.""",
    inputs=(
        TensorSpec(names.TIP_POSITION, INTEGER, (_SLOTS,)),
        *_CHOICE_SLOTS,
    ),
    outputs=(
        TensorSpec(names.NOISE, "float32", (_SLOTS, "depths", _VOCABULARY)),
        TensorSpec(names.DRAFT_SAMPLING, "float32", (_SLOTS, SETTINGS)),
    ),
    attributes=(_PURPOSE,),
)

_CACHE = (names.ROWS, "kv_num_heads", CAPACITY, "head_dim")
_QUERY_WIDTH = "num_heads * head_dim"
_KEY_WIDTH = "kv_num_heads * head_dim"

_BRANCH_ATTENTION = OpSchema(
    name="BranchAttention",
    version=3,
    doc="""Append each row's new keys and values, then attend over the row's T keys under a bias.

    Tokens of all rows lie one after another (row_splits); row r's are appended at past_length[r]. Token s of row r
    gives softmax(c(q . k * scale) + attn_bias[r, 0, s]) over the row's T keys, applied to v; query head h uses KV head
    h // (num_heads / kv_num_heads). c(x) is softcap * tanh(x / softcap), or x where `softcap` is 0; the bias is added
    to capped scores, so that hidden keys stay hidden. With `sinks`, which may be left out, the softmax of head h has
    exp(sinks[h]) in its sum as well: a key without a value, under no cap. Where `later` is 1, the bias may show a token
    of the step that comes after the query's, else none. Where `asks` is 0, nobody reads `out`: its numbers are any
    finite ones.
    Before that, where the inputs are there, each head of q and k is normed by its root mean square, with weights q_norm
    and k_norm, and its first numbers are rotated by halves, to positions; where `window` is not 0, the bias is that of
    WindowBias. queries are q as they are compared with keys.
    Stands in graphs only, and is lowered there: no CPU kernel.
    Source: the cap, Gemma 2 (arXiv 2408.00118); sinks, gpt-oss.""",
    inputs=(
        TensorSpec("q", ANY_FLOAT, (1, names.NEW, _QUERY_WIDTH)),
        TensorSpec("k", ANY_FLOAT, (1, names.NEW, _KEY_WIDTH)),
        TensorSpec("v", ANY_FLOAT, (1, names.NEW, _KEY_WIDTH)),
        TensorSpec("k_cache", ANY_FLOAT, _CACHE),
        TensorSpec("v_cache", ANY_FLOAT, _CACHE),
        _ATTN_BIAS,
        per_row(names.PAST_LENGTH),
        ROW_SPLITS,
        TensorSpec("sinks", ANY_FLOAT, ("num_heads",)),
        TensorSpec(names.POSITIONS, INTEGER, (1, names.NEW)),
        TensorSpec("cos", ANY_FLOAT, ("positions", "rotated / 2")),
        TensorSpec("sin", ANY_FLOAT, ("positions", "rotated / 2")),
        TensorSpec("q_norm", ANY_FLOAT, ("head_dim",)),
        TensorSpec("k_norm", ANY_FLOAT, ("head_dim",)),
    ),
    outputs=(
        TensorSpec("out", ANY_FLOAT, (1, names.NEW, _QUERY_WIDTH)),
        TensorSpec(names.cache_output("k_cache"), ANY_FLOAT, _CACHE),
        TensorSpec(names.cache_output("v_cache"), ANY_FLOAT, _CACHE),
        TensorSpec("queries", ANY_FLOAT, (names.NEW, _QUERY_WIDTH)),
    ),
    attributes=(
        AttributeSpec("num_heads", int),
        AttributeSpec("kv_num_heads", int),
        AttributeSpec("scale", float),
        AttributeSpec("later", int, 0),
        AttributeSpec("asks", int, 1),
        AttributeSpec("softcap", float, 0.0),
        AttributeSpec("window", int, 0),
        AttributeSpec("epsilon", float, 0.0),
    ),
)

_TOKENS = TensorSpec("x", ANY_FLOAT, (1, names.NEW, "hidden"))
_WEIGHTS = TensorSpec("weights", "float32", (1, names.NEW, "experts"))
_INWARD, _OUTWARD = ("experts", "hidden", "inner"), ("experts", "inner", "hidden")
_PRODUCTS = (
    TensorSpec("gate", ANY_FLOAT, _INWARD),
    TensorSpec("up", ANY_FLOAT, _INWARD),
    TensorSpec("down", ANY_FLOAT, _OUTWARD),
)

_ROUTE = OpSchema(
    name="Route",
    version=1,
    doc="""The experts of each token, and their weights.

    A token chooses the top_k experts with the largest logits x @ router, of equal ones those with the lower id, and
    gives them weights that are softmax over the chosen where normalise is 1, else over all experts: in float32 at
    any precision of the model. All others have weight 0. Softmax over all, then top-k, then division by the sum is
    the same as softmax over the top-k: normalise 1 is both.
    BiasedRoute has a third input, bias [experts], that is added to the logits.
    Source: Qwen3-MoE (arXiv 2505.09388); Mixtral (arXiv 2401.04088).""",
    inputs=(_TOKENS, TensorSpec("router", ANY_FLOAT, ("hidden", "experts"))),
    outputs=(_WEIGHTS,),
    attributes=(AttributeSpec("top_k", int), AttributeSpec("normalise", int)),
)

_MIXTURE_OF_EXPERTS = OpSchema(
    name="MixtureOfExperts",
    version=1,
    doc="""The sum over experts e of weights[n, e] * down_e(silu(gate_e(x)) * up_e(x)).

    Experts whose weight is 0 are left out; the others are added in ascending order.
    ClampedMixtureOfExperts, with attributes alpha and limit, has biases gate_bias, up_bias [experts, inner] and
    down_bias [experts, hidden] after the products, and another unit: (up + 1) * gate * sigmoid(alpha * gate), gate at
    most limit and up from -limit to limit.
    QuantMixtureOfExperts and ClampedQuantMixtureOfExperts have integers and scales in place of each product's weights,
    the transposed matrices of the experts one under another: [experts * outputs, inputs] and
    [experts * outputs, inputs / 32].
    The function body computes all experts for all tokens, and takes those out that a token did not choose: for one
    token, experts / top_k times the work and the memory traffic of the CPU kernel, which reads chosen experts alone.
    Source: Qwen3-MoE (arXiv 2505.09388); gpt-oss (arXiv 2508.10925) for the clamped unit.""",
    inputs=(_TOKENS, _WEIGHTS, *_PRODUCTS),
    outputs=(TensorSpec("out", ANY_FLOAT, (1, names.NEW, "hidden")),),
)

_WINDOW_BIAS = OpSchema(
    name="WindowBias",
    version=1,
    doc="""The bias under which each query sees no more than the last `window` keys of those that it sees.

    Of the keys with bias 0 in attn_bias[r, 0, s], the last `window` >= 1 have bias 0 in the output, the query's own key
    among them; every other key has float32's lowest. Slots ascend along a path, so this is a window over distance along
    the path, for chains, trees, branches and rows alike. Stands in graphs only: a function body of standard ops, or
    part of attention on the CPU.
    Source: sliding windows of Mistral (arXiv 2310.06825) and Gemma 2 (arXiv 2408.00118).""",
    inputs=(_ATTN_BIAS,),
    outputs=(TensorSpec("window_bias", "float32", (names.ROWS, 1, names.PLACES, names.VIEW)),),
    attributes=(AttributeSpec("window", int),),
)

_DRAFT_SETTINGS = (
    TensorSpec(names.NOISE, "float32", ("trees", _VOCABULARY)),
    TensorSpec(names.DRAFT_SAMPLING, "float32", ("trees", SETTINGS)),
)

_DRAFT_SAMPLE = OpSchema(
    name="DraftSample",
    version=4,
    doc="""A token drawn from a drafter's own distribution, and that distribution, for rejection.

    token[b] wins the race of probability[b] with noise[b]: the largest probability over noise. probability[b] is the
    drafter's distribution under the branch's temperature, top-k, top-p (their cuts looked for among the 64 likeliest
    tokens) and min-p; greedy, all of it at the argmax.
    Stands in graphs only: a function body of standard ops, or the CUDA kernel.
    Source: arXiv 2211.17192.""",
    inputs=(
        TensorSpec("logits", "float32", ("trees", "nodes", _VOCABULARY)),
        *_DRAFT_SETTINGS,
    ),
    outputs=(
        TensorSpec("token", INTEGER, ("trees", "nodes")),
        TensorSpec("probability", "float32", ("trees", "nodes", _VOCABULARY)),
    ),
)

_FRONTIER = ("trees", "frontier")
_CANDIDATES = ("trees", "candidates")

_TREE_EXPAND = OpSchema(
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
        TensorSpec("logits", "float32", (*_FRONTIER, _VOCABULARY)),
        TensorSpec("score", "float32", _FRONTIER),
        *_DRAFT_SETTINGS,
    ),
    outputs=(
        TensorSpec("token", INTEGER, _CANDIDATES),
        TensorSpec("candidate_score", "float32", _CANDIDATES),
        TensorSpec("frontier", INTEGER, ("trees", "top_k")),
    ),
    attributes=(AttributeSpec("top_k", int), AttributeSpec("doubt", float)),
)

_NODES = ("trees", "nodes - 1")

_TREE_RERANK = OpSchema(
    name="TreeRerank",
    version=2,
    doc="""The nodes - 1 best candidates of all levels, as the nodes of a draft tree after its root.

    A child scores no more than its parent and comes after it, so ancestors of a chosen candidate are chosen too: of
    equals, the lower index comes first. Nodes keep the order of their indices: ancestors before descendants. candidate
    holds these indices, ascending; parent counts nodes, 0 is the root. Stands in graphs only: a function body of
    standard ops, or the CUDA kernel.
    Source: EAGLE-2 (arXiv 2406.16858).""",
    inputs=(
        TensorSpec("candidate_token", INTEGER, _CANDIDATES),
        TensorSpec("candidate_score", "float32", _CANDIDATES),
        TensorSpec("candidate_parent", INTEGER, _CANDIDATES),
        TensorSpec("candidate_depth", INTEGER, ("candidates",)),
    ),
    outputs=(
        TensorSpec("candidate", INTEGER, _NODES),
        TensorSpec("token", INTEGER, _NODES),
        TensorSpec("parent", INTEGER, _NODES),
        TensorSpec("depth", INTEGER, _NODES),
        TensorSpec("score", "float32", _NODES),
    ),
    attributes=(AttributeSpec("nodes", int),),
)

SCHEMAS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        _BIM_MASK,
        _SAMPLE,
        _TREE_ACCEPT,
        _CHAIN_ACCEPT,
        _RACE_NOISE,
        KV_GATHER,
        BLOCK_SUMMARY,
        BLOCK_SELECT,
        PARTIAL_KV_GATHER,
        _BRANCH_ATTENTION,
        _ROUTE,
        _MIXTURE_OF_EXPERTS,
        _WINDOW_BIAS,
        _DRAFT_SAMPLE,
        _TREE_EXPAND,
        _TREE_RERANK,
    )
}
