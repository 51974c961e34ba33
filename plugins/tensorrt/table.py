"""The plugins that each op becomes in an engine, or why it becomes none: `plugins.ops` has those of each op.

A plugin's kernel gets inputs, outputs and integers, and no memory that outlives the kernel. Hence:

- Scratch that a launch fills and uses itself is an output that nobody reads (`candidates`). A node may leave out its
  last outputs, so the op's own outputs come first.
- A row of logits is shared out to blocks, and chosen from by one block when all of them are done, which needs a
  counter. So every choice is a plugin that summarises shares, and another that chooses.
- `status` is an output with a place for each block that may report a fault. Each block writes its own place, also
  without a fault, because nobody zeroes `status` before. In acceptance only the walk reports faults, because logits of
  nodes that the walk does not visit may hold anything. The choices pass a node's fault to the walk in place of the
  node's token.
- Acceptance in one kernel, whose last block walks, needs a counter in memory that is zero before the first block runs.
  So acceptance becomes three plugins: after the shares, one computes what each node would commit, and the last walks,
  in one block. None keeps state, so an engine may be interrupted, timed or replayed at will. The price is two launches.
  (A single block would take as long as all blocks one after another.) Tree growth is split likewise: the first plugin
  computes the children of each node, the second picks each tree's next frontier.
- A size that no input has comes as an extra input whose memory is not read: `places` [S], `view` [T], `slots` [B]. With
  one row, `branch` serves as `places`. A value that the engine's builder knows is an attribute: `purpose`, `depths`,
  `V`. TensorRT bakes it into the engine as a constant argument.
- TensorRT has neither float64 nor uint64. Such tensors are carried as int64, bit for bit: sampling and seed (engine
  inputs, bound to the same memory) and trials of `ChainAccept` (engine outputs). Only our plugins can calculate with
  them, so that drafters read `RaceNoise`'s float32s.
- A kernel's arguments are integers. A float attribute is passed as the bits of a float32.
- A builder times kernels on arbitrary memory contents. Guards keep the kernels within their tensors then (parts.cu.h).
  Drafting kernels follow no index that they read, so their guards check sizes only.
- TensorRT gives every such plugin version 1. An engine holds its own kernels and never uses other ones.
"""

from __future__ import annotations

from outrider.plugins.onnx_ops.layers import LAYER_BODIES
from outrider.plugins.ops import OPS
from outrider.plugins.ops.route import EXPERTS_DECLINED
from outrider.plugins.schema import EXPERT_OPS, QUANT_OPS
from outrider.plugins.tensorrt.plugin import Declined, Plugin

PLUGINS: dict[str, tuple[Plugin, ...] | Declined] = {
    **dict.fromkeys(QUANT_OPS, Declined("TensorRT fuses dequantised weights with the product that reads them")),
    **dict.fromkeys(("BiasedRoute", *EXPERT_OPS), EXPERTS_DECLINED),
    **dict.fromkeys(LAYER_BODIES, Declined("TensorRT fuses their standard ops")),
    **{name: op.plugins for name, op in OPS.items()},
}
"""By the op type of a graph's node."""

DISTINCT: tuple[Plugin, ...] = tuple(
    {plugin.name: plugin for entry in PLUGINS.values() if not isinstance(entry, Declined) for plugin in entry}.values()
)
"""Every plugin once: ops may have some in common."""
