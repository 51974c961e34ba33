"""A lowered graph as launches of our own kernels: the engines of the backend `cuda`."""

from outrider.compiler.kernels.elements import ELEMENTS
from outrider.compiler.kernels.indexing import INDEXING
from outrider.compiler.kernels.layers import LAYERS
from outrider.compiler.kernels.products import PRODUCTS

HANDLERS = {("", operator): handler for operator, handler in (ELEMENTS | INDEXING).items()} | PRODUCTS | LAYERS
"""What to do with a node, by domain and operator; a graph with any other is refused."""
