// The layout that the ops of partial KV are bound with.
#pragma once

#include "../partial_kv.h"
#include "op.h"

namespace outrider {

constexpr i64 kMostKeys = i64{1} << 40;  // of a layer's window

inline PartialLayout bound_layout(const Binding& bound) {
  const PartialLayout layout = {bound.size("block_size"), bound.size("sink_blocks"), bound.size("window_blocks")};
  check_value(bound.op(), "block_size", 0, layout.block_size, 1, 1 << 20);
  check_value(bound.op(), "sink_blocks", 0, layout.sink_blocks, 0, 1 << 20);
  check_value(bound.op(), "window_blocks", 0, layout.window_blocks, 1, 1 << 20);
  return layout;
}

}  // namespace outrider
