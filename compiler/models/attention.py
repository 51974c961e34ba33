"""What a layer's attention is, beside its weights: which keys it sees, and how queries and keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.compiler.models.rope import Rope, RopeScaling


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers. `window` is how many keys a query sees along its path, its own the last; None: all before it.
    `rope` is the rotation of queries and keys; None: they are not rotated."""

    window: int | None
    rope: Rope | None


class Attention:
    """Facts of a model's attention that an `Execution` needs; by default all layers see all tokens before, and rotate
    whole heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling
    attention_softcap: float | None = None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return (LayerKind(None, Rope(self.rope_theta, self.rope_scaling, self.head_dim)),) * self.num_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, ascending: each has a KV cache of its own."""
        return tuple(range(self.num_layers))

    @property
    def attention_scale(self) -> float:
        scale: float = self.head_dim**-0.5
        return scale
