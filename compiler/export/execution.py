"""The `Execution` of exported models: rotation and attention over a KV cache, as graph ops."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.compiler.export.ops import branch_attention, path_conv, state_scan
from outrider.compiler.models.attention import Attention
from outrider.compiler.models.decoder import HeadNorms, RmsNorm
from outrider.compiler.models.mixers import DeltaConfig
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
    """The KV cache of one graph: the cache inputs among the graph's `inputs`, and the outputs of each pass over them.

    Every pass reads the graph's cache inputs and gives its own outputs, all bound to the same memory; a later pass runs
    after an earlier one because it needs data that the earlier one computes.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        self.presents: list[Tensor] = []

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cache inputs of keys and of values of the `layer`-th layer that attends."""
        return self._inputs[names.k_cache(layer)], self._inputs[names.v_cache(layer)]


class LayerStates:
    """The recurrent states of a graph's layers: those that it reads, among the graph's `inputs`, and `presents`, those
    after the pass, by name."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        self._path = {name: inputs[name] for name in names.STATE_PATH if name in inputs}
        self.presents: dict[str, Tensor] = {}

    def run(self, op: Any, index: int, kind: tuple[str, str], **own: Any) -> Tensor:
        """Run an op that advances a kind of state of the `index`-th layer that has one."""
        state, log = (names.of_layer(name, index) for name in kind)
        before = dict(zip(kind, (self._inputs[state], self._inputs[log]), strict=True))
        out, *after = op(**own, **before, **self._path)
        self.presents |= zip((state, log), after, strict=True)
        return out  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PassTokens:
    """The tokens of one pass, at `positions` int64 `[1, n]` under `bias` `[R, 1, S, T]`.

    `past` `[R]` is the slot where each row's tokens are appended, `splits` `[R + 1]` says which tokens each row has.
    With `later`, the bias may show a token of the pass that comes after the query's.
    """

    positions: Tensor
    bias: Tensor
    past: Tensor
    splits: Tensor
    later: bool = False


class GraphExecution:
    """One pass over tokens; `states` are those of layers without attention."""

    def __init__(
        self,
        attention: Attention,
        tables: RopeTables,
        caches: KvCaches,
        tokens: PassTokens,
        states: LayerStates | None = None,
    ) -> None:
        self._attention, self._tables, self._caches, self._tokens = attention, tables, caches, tokens
        self._states = states
        self.queries: list[Tensor] = []  # each layer's, `[n, heads * head_dim]`, as they are compared with keys

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        own = {"num_heads": self._attention.num_heads, "softcap": self._attention.attention_softcap or 0.0}
        return self._attend(layer, norms, q=q, k=k, v=v, sinks=sinks, asks=1, later=int(self._tokens.later), **own)

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, *, silu: bool = False) -> Tensor:
        assert self._states is not None
        own = {"x": x, "weight": taps, "bias": bias, "silu": int(silu)}
        return self._states.run(path_conv, self._place(layer), names.STATES[0], **own)

    def scan(self, layer: int, x: Tensor, gates: tuple[Tensor, Tensor], rates: tuple[Tensor, Tensor]) -> Tensor:
        mixer = self._attention.mixer
        assert self._states is not None
        assert isinstance(mixer, DeltaConfig)
        own = dict(zip(("x", "a", "b", "decay_log", "step_bias"), (x, *gates, *rates), strict=True))
        sizes = {"key_heads": mixer.key_heads, "values": mixer.values, "delta": 1, "scale": 1.0}
        steps = {"skip": None, "least_step": 0.0, "most_step": float("inf")}
        return self._states.run(state_scan, self._place(layer), names.STATES[1], **own, **sizes, **steps)

    def _place(self, layer: int) -> int:
        """Return which of the layers without attention it is."""
        return layer - bisect_left(self._attention.attention_layers, layer)

    def append(self, layer: int, k: Tensor, v: Tensor, norm: RmsNorm | None) -> Tensor:
        """Append the keys, neither normed nor rotated, and values of tokens that ask nothing, `[1, n, kv_size]`.

        Returns one number of each, `[1, n, 1]`, for what must run after it: the keys stand for queries.
        """
        own = {"num_heads": self._attention.num_kv_heads, "softcap": 0.0}
        return self._attend(layer, (norm, norm), q=k, k=k, v=v, sinks=None, asks=0, later=0, **own)[..., :1]

    def _attend(self, layer: int, norms: HeadNorms, **own: Any) -> Tensor:
        """Return what queries attend to, by the arguments of BranchAttention that the layer does not give."""
        a, kind = self._attention, self._attention.kinds[layer]
        k_cache, v_cache = self._caches.of_layer(a.attention_layers.index(layer))
        cos, sin = (None, None) if kind.rope is None else self._tables.cos_and_sin(kind.rope)
        q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
        out, k_out, v_out, queries = branch_attention(
            **own,
            k_cache=k_cache,
            v_cache=v_cache,
            attn_bias=self._tokens.bias,
            past_length=self._tokens.past,
            row_splits=self._tokens.splits,
            positions=None if kind.rope is None else self._tokens.positions,
            cos=cos,
            sin=sin,
            q_norm=q_norm,
            k_norm=k_norm,
            kv_num_heads=a.num_kv_heads,
            scale=a.attention_scale,
            window=0 if kind.window is None or kind.window >= k_cache.shape[2] else kind.window,
            epsilon=0.0 if norms[0] is None else norms[0].eps,
        )
        self.queries.append(queries)
        self._caches.presents += (k_out, v_out)
        return out  # type: ignore[no-any-return]


def cache_outputs(layers: int, passes: int) -> list[str]:
    """Return the names of the cache outputs, in the order in which the passes append them to `presents`."""
    return [
        names.cache_output(cache(layer), index)
        for index in range(passes)
        for layer in range(layers)
        for cache in (names.k_cache, names.v_cache)
    ]
