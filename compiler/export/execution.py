"""The `Execution` of exported models: rotation and attention over a KV cache, as graph ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from compiler.export.ops import branch_attention
from compiler.models.rope import RopeScaling, rope_tables
from plans import names


class Heads(Protocol):
    """Facts of a model's attention that its graph needs."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling: ...


class RopeTables(nn.Module):
    """Cosines and sines of `positions` positions as constants of the graph; one pair for all layers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, heads: Heads, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        cos, sin = rope_tables(heads.rope_theta, heads.head_dim, positions, heads.rope_scaling)
        self.register_buffer("cos", torch.from_numpy(cos).to(dtype))
        self.register_buffer("sin", torch.from_numpy(sin).to(dtype))


class KvCaches:
    """The KV cache of one graph: its cache inputs, and the outputs of each pass over them.

    Every pass reads the graph's cache inputs and gives its own outputs, all bound to the same memory; a later pass runs
    after an earlier one because it needs data that the earlier one computes.
    """

    def __init__(self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> None:
        self.k_caches, self.v_caches = k_caches, v_caches
        self.presents: list[Tensor] = []


class GraphExecution:
    """One pass over tokens at `positions` int64 `[1, n]` under `bias` `[R, 1, S, T]`.

    `past` `[R]` is the slot where each row's tokens are appended, `splits` `[R + 1]` says which tokens each row has.
    With `later`, the bias may show a token of the pass that comes after the query's.
    """

    def __init__(
        self,
        heads: Heads,
        tables: RopeTables,
        caches: KvCaches,
        positions: Tensor,
        bias: Tensor,
        past: Tensor,
        splits: Tensor,
        *,
        later: bool = False,
    ) -> None:
        self._later = later
        self._heads, self._tables, self._caches = heads, tables, caches
        self._positions, self._bias, self._past, self._splits = positions, bias, past, splits
        self.queries: list[Tensor] = []  # each layer's, `[1, n, heads * head_dim]`

    def rotate(self, x: Tensor, heads: int) -> Tensor:
        tables = self._tables
        rotated: Tensor = torch.onnx.ops.rotary_embedding(x, tables.cos, tables.sin, self._positions, num_heads=heads)
        return rotated

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, caches = self._heads, self._caches
        self.queries.append(q)
        out, k_out, v_out = branch_attention(
            q, k, v, caches.k_caches[layer], caches.v_caches[layer], self._bias, self._past, self._splits,
            h.num_heads, h.num_kv_heads, h.head_dim**-0.5, int(self._later), 1,
        )  # fmt: skip
        caches.presents += (k_out, v_out)
        attended: Tensor = out
        return attended

    def append(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Append the keys, not rotated yet, and values of tokens that ask nothing, `[1, n, kv_heads * head_dim]`.

        Returns one number of each, `[1, n, 1]`, for what must run after it: the keys stand for queries.
        """
        h, caches = self._heads, self._caches
        k = self.rotate(k, h.num_kv_heads)
        out, k_out, v_out = branch_attention(
            k, k, v, caches.k_caches[layer], caches.v_caches[layer], self._bias, self._past, self._splits,
            h.num_kv_heads, h.num_kv_heads, h.head_dim**-0.5, 0, 0,
        )  # fmt: skip
        caches.presents += (k_out, v_out)
        done: Tensor = out[..., :1]
        return done


def cache_outputs(layers: int, passes: int) -> list[str]:
    """Return the names of the cache outputs, in the order in which the passes append them to `presents`."""
    return [
        names.cache_output(cache(layer), index)
        for index in range(passes)
        for layer in range(layers)
        for cache in (names.k_cache, names.v_cache)
    ]
