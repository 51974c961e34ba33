"""The `Execution` of exported models: rotation and attention over a KV cache, as graph ops."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.compiler.export.ops import attention, path_conv
from outrider.compiler.models.attention import Attention
from outrider.compiler.models.decoder import HeadNorms, RmsNorm
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


class ConvStates:
    """The states of a graph's convolutions, a tail and a log for each layer, and what says how they go on: `path`, in
    the order of `STATE_PATH`."""

    def __init__(self, tails: Sequence[Tensor], logs: Sequence[Tensor], path: list[Tensor]) -> None:
        self.tails, self.logs, self.path = tails, logs, path
        self.presents: list[Tensor] = []

    def convolve(self, index: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with the state of the `index`-th layer that convolves, which goes on."""
        out: Tensor
        out, *after = path_conv(x, taps, self.tails[index], self.logs[index], self.path, bias)
        self.presents += after
        return out


STATE_PATH = (names.PARENT, names.BRANCH, names.REPLAY, names.REPLAYS, names.FOLD)


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
        states: ConvStates | None = None,
    ) -> None:
        self._later, self._states = later, states
        self._attention, self._tables, self._caches = attention, tables, caches
        self._positions, self._past, self._splits = positions, past, splits
        self._bias = bias
        self.queries: list[Tensor] = []  # each layer's, `[n, heads * head_dim]`, as they are compared with keys

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q, k, v, norms, sinks, self._attention.num_heads)

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        assert self._states is not None
        return self._states.convolve(layer - bisect_left(self._attention.attention_layers, layer), x, taps, bias)

    def append(self, layer: int, k: Tensor, v: Tensor, norm: RmsNorm | None) -> Tensor:
        """Append the keys, neither normed nor rotated, and values of tokens that ask nothing, `[1, n, kv_size]`.

        Returns one number of each, `[1, n, 1]`, for what must run after it: the keys stand for queries.
        """
        return self._attend(layer, k, k, v, (norm, norm), None, self._attention.num_kv_heads, asks=0)[..., :1]

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms, sinks: Tensor | None, heads: int,
        asks: int = 1,
    ) -> Tensor:  # fmt: skip
        a, kind, place = self._attention, self._attention.kinds[layer], self._attention.attention_layers.index(layer)
        k_cache = self._caches.k_caches[place]
        window = 0 if kind.window is None or kind.window >= k_cache.shape[2] else kind.window
        cos, sin = (None, None) if kind.rope is None else self._tables.cos_and_sin(kind.rope)
        positions = None if kind.rope is None else self._positions
        q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
        epsilon = 0.0 if norms[0] is None else norms[0].eps
        softcap = (a.attention_softcap or 0.0) if asks else 0.0
        out, k_out, v_out, queries = attention(
            q, k, v, k_cache, self._caches.v_caches[place], self._bias, self._past, self._splits, sinks,
            positions, cos, sin, q_norm, k_norm, heads, a.num_kv_heads, a.attention_scale,
            int(self._later and asks == 1), asks, softcap, window, epsilon,
        )  # fmt: skip
        self.queries.append(queries)
        self._caches.presents += (k_out, v_out)
        return out


def cache_outputs(layers: int, passes: int) -> list[str]:
    """Return the names of the cache outputs, in the order in which the passes append them to `presents`."""
    return [
        names.cache_output(cache(layer), index)
        for index in range(passes)
        for layer in range(layers)
        for cache in (names.k_cache, names.v_cache)
    ]
