"""What a layer's attention is, beside its weights: which keys it sees, and how queries and keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.compiler.models.rope import Rope, RopeScaling


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers. `window` is how many keys a query sees along its path, its own the last; None: all before it.
    `rope` is the rotation of queries and keys; None: they are not rotated."""

    window: int | None
    rope: Rope | None


class Attention(Protocol):
    """Facts of a model's attention that an `Execution` needs."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def kinds(self) -> tuple[LayerKind, ...]: ...

    @property
    def attention_scale(self) -> float: ...

    @property
    def attention_softcap(self) -> float | None: ...


class ProjectionSizes:
    """Widths of the projections of queries, and of keys and of values, in numbers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class PlainAttention(ProjectionSizes):
    """`Attention` of models whose layers are all alike: each sees all tokens before, and rotates whole heads."""

    num_layers: int
    rope_theta: float
    rope_scaling: RopeScaling

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(None, Rope(self.rope_theta, self.rope_scaling, self.head_dim)),) * self.num_layers

    @property
    def attention_scale(self) -> float:
        scale: float = self.head_dim**-0.5
        return scale

    @property
    def attention_softcap(self) -> None:
        return None
