"""The ops in NumPy: the truth that every kernel is compared with, written for readers, not for speed.

Functions take the arrays of one step at their exact sizes and return new arrays; functions of KV caches work in place.
"""

from outrider.plugins.reference.bim_mask import bim_mask, window_bias
from outrider.plugins.reference.branch_attention import branch_attention
from outrider.plugins.reference.chain_accept import chain_accept
from outrider.plugins.reference.choice import choice, fixed_weights, shared_exp
from outrider.plugins.reference.draft_sample import draft_sample
from outrider.plugins.reference.kv_gather import kv_gather
from outrider.plugins.reference.kv_slots import from_slots, to_slots
from outrider.plugins.reference.lanes import clamped_unit, gated_unit, lanes_exp, ordered_matmul
from outrider.plugins.reference.lanes_attention import attend
from outrider.plugins.reference.mixture_of_experts import Expert, mixture_of_experts, route
from outrider.plugins.reference.partial_kv import block_select, block_summary, partial_kv_gather
from outrider.plugins.reference.philox import philox4x32, uniform
from outrider.plugins.reference.quant_matmul import dequantize, quant_matmul, quantize_rows
from outrider.plugins.reference.race import RaceKey, exponential, noise_words, race, race_noise
from outrider.plugins.reference.sample import SamplingSlots, sample
from outrider.plugins.reference.tree_accept import Accepted, tree_accept
from outrider.plugins.reference.tree_expand import DraftSettings, Expansion, tree_expand
from outrider.plugins.reference.tree_rerank import Reranking, tree_rerank

__all__ = [
    "Accepted",
    "DraftSettings",
    "Expansion",
    "Expert",
    "RaceKey",
    "Reranking",
    "SamplingSlots",
    "attend",
    "bim_mask",
    "block_select",
    "block_summary",
    "branch_attention",
    "chain_accept",
    "choice",
    "clamped_unit",
    "dequantize",
    "draft_sample",
    "exponential",
    "fixed_weights",
    "from_slots",
    "gated_unit",
    "kv_gather",
    "lanes_exp",
    "mixture_of_experts",
    "noise_words",
    "ordered_matmul",
    "partial_kv_gather",
    "philox4x32",
    "quant_matmul",
    "quantize_rows",
    "race",
    "race_noise",
    "route",
    "sample",
    "shared_exp",
    "to_slots",
    "tree_accept",
    "tree_expand",
    "tree_rerank",
    "uniform",
    "window_bias",
]
