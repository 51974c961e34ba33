"""The `Execution` of exported models: rotation and attention over a KV cache, as graph ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.compiler.export.ops import branch_attention, window_bias
from outrider.compiler.models.attention import Attention
from outrider.compiler.models.rope import Rope
from outrider.plans import names


class RopeTables(nn.Module):
    """Cosines and sines of `positions` positions as constants of the graph: a pair for each rotation of a model."""

    def __init__(self, attention: Attention, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ropes = list(dict.fromkeys(kind.rope for kind in attention.kinds if kind.rope is not None))
        for index, rope in enumerate(self.ropes):
            for name, table in zip(("cos", "sin"), rope.tables(positions), strict=True):
                self.register_buffer(self._name(name, index), torch.from_numpy(table).to(dtype))

    def cos_and_sin(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines `[positions, size / 2]` of a rotation."""
        index = self.ropes.index(rope)
        return getattr(self, self._name("cos", index)), getattr(self, self._name("sin", index))

    def _name(self, name: str, index: int) -> str:
        return f"{name}_{index}" if index else name


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
        attention: Attention,
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
        self._attention, self._tables, self._caches = attention, tables, caches
        self._positions, self._past, self._splits = positions, past, splits
        self._biases: dict[int | None, Tensor] = {None: bias}  # by window
        self.queries: list[Tensor] = []  # each layer's, `[1, n, heads * head_dim]`

    def rotate(self, layer: int, x: Tensor, heads: int) -> Tensor:
        rope = self._attention.kinds[layer].rope
        if rope is None:
            return x
        cos, sin = self._tables.cos_and_sin(rope)
        part = 0 if rope.size == self._attention.head_dim else rope.size
        rotated: Tensor = torch.onnx.ops.rotary_embedding(
            x, cos, sin, self._positions, num_heads=heads, rotary_embedding_dim=part
        )
        return rotated

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        a, caches = self._attention, self._caches
        self.queries.append(q)
        out, k_out, v_out = branch_attention(
            q, k, v, caches.k_caches[layer], caches.v_caches[layer], self._bias(layer), self._past, self._splits,
            a.num_heads, a.num_kv_heads, a.attention_scale, int(self._later), 1, a.attention_softcap or 0.0, sinks,
        )  # fmt: skip
        caches.presents += (k_out, v_out)
        attended: Tensor = out
        return attended

    def _bias(self, layer: int) -> Tensor:
        """Return the bias of a layer: of the keys that the pass may see, those in the layer's window.

        A window as wide as the KV cache hides nothing.
        """
        window = self._attention.kinds[layer].window
        if window is not None and window >= self._caches.k_caches[layer].shape[2]:
            window = None
        if window not in self._biases:
            self._biases[window] = window_bias(self._biases[None], window)
        return self._biases[window]

    def append(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Append the keys, not rotated yet, and values of tokens that ask nothing, `[1, n, kv_heads * head_dim]`.

        Returns one number of each, `[1, n, 1]`, for what must run after it: the keys stand for queries.
        """
        a, caches = self._attention, self._caches
        k = self.rotate(layer, k, a.num_kv_heads)
        out, k_out, v_out = branch_attention(
            k, k, v, caches.k_caches[layer], caches.v_caches[layer], self._bias(layer), self._past, self._splits,
            a.num_kv_heads, a.num_kv_heads, a.attention_scale, 0, 0,
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
