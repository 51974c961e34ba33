"""The ops of partial KV: the tensors and the layout that they share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.schema import INTEGER, AttributeSpec, TensorSpec
from outrider.plugins.tensorrt.plugin import Declined

_SUMMARY = (names.ROWS, "layers", "heads", "head_dim", "blocks")
RETRIEVED = ("layers", "heads", "retrieval")
KEY_MAX = TensorSpec(names.KEY_MAX, "float32", _SUMMARY)
KEY_MIN = TensorSpec(names.KEY_MIN, "float32", _SUMMARY)
LAYER_WINDOWS = TensorSpec(names.LAYER_WINDOWS, INTEGER, ("layers",))
SELECTED = TensorSpec(names.SELECTED, INTEGER, RETRIEVED)
LAYOUT = tuple(AttributeSpec(name, int) for name in ("block_size", "sink_blocks", "window_blocks"))
LAYOUT_NAMES = tuple(spec.name for spec in LAYOUT)
BETWEEN_ENGINES = Declined("it runs between engines, on what their steps have left")

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def candidate_blocks(covered: int, block_size: int, sink_blocks: int, window_blocks: int) -> int:
    """Return the number of blocks between sink and window of `covered` tokens; the window begins at a block."""
    return max(0, covered // block_size - sink_blocks - window_blocks)


def blocks_in_reach(window: int, block_size: int, window_blocks: int) -> int:
    """Return how many blocks in front of `window_blocks` whole ones the last `window` tokens may lie in, the one after
    them all included."""
    return max(0, -(-(window - 1 - window_blocks * block_size) // block_size))
