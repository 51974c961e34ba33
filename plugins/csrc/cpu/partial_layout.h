// What the ops of partial KV check of their layout when they are bound.
#pragma once

#include "../partial_kv.h"
#include "refuse.h"

namespace outrider {

constexpr i64 kMostKeys = i64{1} << 40;  // of a layer's window

inline void check_layout(const char* op, const PartialLayout& layout) {
  check_value(op, "block_size", 0, layout.block_size, 1, 1 << 20);
  check_value(op, "sink_blocks", 0, layout.sink_blocks, 0, 1 << 20);
  check_value(op, "window_blocks", 0, layout.window_blocks, 1, 1 << 20);
}

}  // namespace outrider
