"""Our ops in ONNX Runtime's engines on the CPU: the library that a session loads, and the ops' domain.

The library has a kernel for each of float32, float16 and int8 KV caches (`plans.kv_slots`); all else is float32:

`outrider.cpu.BranchAttention(q, k, v, k_cache, v_cache, attn_bias, past_length, row_splits, positions, cos, sin,
q_norm, k_norm, sinks) -> (out, k_cache_out, v_cache_out, queries)`, with attributes `num_heads`, `kv_num_heads`,
`scale`, `epsilon`, `asks`, `softcap` and `window`.

It is `outrider.BranchAttention` (`plugins.onnx_ops`) with these differences:

- a key is visible where attn_bias, float32 `[R, 1, S, T]`, is 0, and hidden where it is anything else;
- a query that sees no key gives zeros; where `asks` is 0, every query does, and none is computed;
- without k and v, q has all three side by side, `[1, N, (num_heads + 2 * kv_num_heads) * head_dim]`;
- without row_splits there is one row, which has all tokens;
- with a window, a query sees the last `window` of its visible keys, as under `outrider.WindowBias`; keys before them
  cost nothing;
- with positions, int64 `[1, N]`, the first r numbers of each query and key are rotated, by halves: cos and sin are
  `[positions, r / 2]`;
- a key or value is rounded to the cache's type when it is appended, and read as the number that its slot stands for:
  `plugins.reference.to_slots` and `from_slots`, bit for bit on any machine;
- with q_norm and k_norm, `[head_dim]`, each head is normed by its root mean square before the rotation;
- the output queries, float32 `[N, num_heads * head_dim]`, which may be left out, are the ones compared with the keys;
- the op appends in place to cache outputs that are bound to their inputs' memory, and copies other caches.

A query's output depends on the query and on the keys and values that it sees, in the order of slots, and on nothing
else, bit for bit. The library chooses its instructions at run time; every op has the same bits with all of them, so
that an engine whose products are quantised has the same logits on any processor.

`outrider.cpu.QuantMatMul(x, packed) -> (y)` is x, float32 `[..., K]`, times the transpose of weights `[N, K]` that
`plugins.quant_layout.pack` packed, in the layout of the attributes `N`, `K`, `bits`, `wide` and `minimums`. It is
`plugins.reference.quant_matmul` bit for bit on any machine: a row of y is a function of the same row of x.
`outrider.cpu.QuantGather(ids, packed) -> (rows)` looks rows of such weights up, as float32.

`OUTRIDER_ISA=plain|avx2|avxvnni|avx512|amx`, or on arm64 `plain|neon|i8mm`, in the environment makes the ops use these
instructions and no better ones.

`outrider.cpu.RmsNorm(x, weight, added) -> (normed, sum)` norms float32 rows `[..., K]` by their root mean square, with
attribute `epsilon`; with `added`, the rows of `sum = x + added`.

`outrider.cpu.GatedUnit(x) -> (y)` is `activation(gate) * up` for x float32 `[1, N, 2 * size]`, gate and up side by
side; the attribute `activation` is `silu`, or `gelu_tanh`: `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.

`outrider.cpu.Softcap(x) -> (y)` is `cap * tanh(x / cap)` for float32 of any shape, with attribute `cap`, and
`outrider.cpu.Sigmoid(x) -> (y)` is `1 / (1 + exp(-x))`.

`outrider.cpu.PathConv` and `outrider.cpu.StateScan` are the ops of the same names in `plugins.ops`, bit for bit on any
machine. They advance states in place where outputs are bound to their inputs' memory, and copy others.

`outrider.cpu.Route(x, router, bias) -> (weights)` is `plugins.reference.route` bit for bit on any machine: x float32
`[1, N, H]`, the router `[1, panels, H, 16]` as `plugins.panel_layout` packs it, weights `[1, N, experts]`, 0 of experts
that a token does not choose. Attributes are `experts`, `top_k` and `normalise`; the bias `[experts]` may be left out.

`outrider.cpu.MixtureOfExperts(x, weights, gate, up, down, gate_bias, up_bias, down_bias) -> (y)` is
`plugins.reference.mixture_of_experts` bit for bit on any machine, of float32 weights in panels,
`outrider.cpu.QuantMixtureOfExperts` of packed ones: an expert's outputs stand after those of the expert before, and
the attributes `bits`, `wide` and `minimums` have the layout. The attributes `experts`, `hidden` and `size` are their
number, the width of tokens and that of gate and up. The unit is `silu(gate) * up` where `limit` is 0, else the clamped
one with `alpha` and `limit`. Biases may be left out. A pass reads the weights of an expert once, and those that no
token chose not at all.

`outrider.cpu.TreeExpand` and `outrider.cpu.TreeRerank` are the ops of the same names, as one node each.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from outrider.plugins.native import folder

THREADS = "outrider.threads"
"""An entry of a session's configuration, read when the library is registered: the session's number of threads.

Attention divides its work by that number; without the entry, by the number of the machine's processors.
"""

SAME_ON_EVERY_PROCESSOR = frozenset(
    {
        "BranchAttention", "GatedUnit", "MixtureOfExperts", "QuantGather", "QuantMatMul", "QuantMixtureOfExperts",
        "RmsNorm", "Route", "Softcap", "PathConv", "StateScan", "Sigmoid",
    }
)  # fmt: skip
"""Ops whose results have the same bits on every processor that they run on."""

_VERSION = 15  # version of the ops that the built library must report


@cache
def cpu_library() -> Path:
    """Return the library for `SessionOptions.register_custom_ops_library`.

    Raises `ImportError` where the library was not built, or was built from other sources.
    """
    path = folder() / f"outrider_onnxruntime{'.dll' if sys.platform == 'win32' else '.so'}"
    if not path.is_file():
        raise ImportError(f"{path} is missing. Run `pip install -e .` at the top of the repository.")
    if (built := ctypes.CDLL(str(path)).outrider_cpu_ops_version()) != _VERSION:
        raise ImportError(
            f"{path} has version {built} of our ops, and {_VERSION} is wanted. "
            "Run `pip install -e .` at the top of the repository."
        )
    return path
