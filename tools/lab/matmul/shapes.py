"""Products of a model: how wide each is, in the order in which a pass computes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """A weight `[outputs, inputs]`; `layer` is that of the model, and the head's the number of layers."""

    layer: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """Geometry of a decoder. Heads are of 64."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    def products(self) -> list[Product]:
        """All products of a pass; each reads as much as it needs of the one before."""
        attended = self.heads * 64
        found = []
        for layer in range(self.layers):
            found += [
                Product(layer, self.hidden, attended + 2 * self.kv_heads * 64),
                Product(layer, attended, self.hidden),
                Product(layer, self.hidden, 2 * self.intermediate),
                Product(layer, self.intermediate, self.hidden),
            ]
        return [*found, Product(self.layers, self.hidden, self.vocab)]

    @property
    def weights(self) -> int:
        """Number of weights in all products."""
        return sum(product.inputs * product.outputs for product in self.products())


SHAPES = {
    "40m": ModelShape(384, 17, 1632, 6, 3, 1024),  # the targets of tools.lab.synthetic_pair
    "150m": ModelShape(768, 24, 1920, 12, 6, 1024),
    "1b": ModelShape(2048, 16, 8192, 32, 8, 32768),
    "1b-128k": ModelShape(2048, 16, 8192, 32, 8, 131072),
}
