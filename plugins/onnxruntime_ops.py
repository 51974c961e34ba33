"""Our ops inside of ONNX Runtime's engines on the CPU: the library that a session loads, and the domain they stand in.

The library has a kernel for each of float32, float16 and bfloat16 KV caches:

`outrider.cpu.BranchAttention(q, k, v, k_cache, v_cache, attn_bias, past_length, row_splits, positions, cos, sin,
q_norm, k_norm) -> (out, k_cache_out, v_cache_out, queries)`, with attributes `num_heads`, `kv_num_heads`, `scale` and
`epsilon`.

It is `outrider.BranchAttention` (`plugins.onnx_ops`) with these differences:

- attn_bias, float32 `[R, 1, S, T]`, shows a key where it is 0 and hides it where it is anything else;
- a query that sees nothing gives zeros;
- without k and v, q has all three side by side, `[1, N, (num_heads + 2 * kv_num_heads) * head_dim]`;
- without row_splits there is one row, which has all tokens;
- with positions, int64 `[1, N]`, queries and keys are rotated by halves: cos and sin are `[positions, head_dim / 2]`;
- with q_norm and k_norm, `[head_dim]`, each head is normed by its root mean square before that;
- queries, float32 `[N, num_heads * head_dim]`, which may be left out, are what is compared with the keys;
- caches that are bound to the memory of their inputs are appended to in place, others are copied.

A query's output depends on the query and on what it sees, in the order of slots, and on nothing else, bit for bit.
Which instructions compute it is chosen when it runs, so that other machines may give other last bits;
`OUTRIDER_CPU_LANES=8` in the environment gives those of our ops on a machine without AVX-512.

`outrider.cpu.SwiGlu(x) -> (y)`: of x float32 `[1, N, 2 * size]`, gate and up side by side, `silu(gate) * up`.

`outrider.cpu.TreeExpand` and `outrider.cpu.TreeRerank` are the ops of that name, in one node each.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from plugins.native import folder

CPU_DOMAIN = "outrider.cpu"
"""The domain of ops that only this library has."""

THREADS = "outrider.threads"
"""An entry of a session's configuration that the library reads when it is registered: how many threads the session has.

Attention cuts its work by them. Without it, as if there were one for every processor of the machine.
"""

_VERSION = 2  # of the ops, as the built library counts them


@cache
def cpu_library() -> Path:
    """The library for `SessionOptions.register_custom_ops_library`.

    Raises `ImportError` where it was not built, or of other sources.
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
