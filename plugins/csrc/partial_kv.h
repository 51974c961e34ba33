// Where the tokens of a full KV cache stand in a partial one: sink | retrieval | window, in order, the buffer after them.
// Blocks are counted from the sink's end; the window begins on their grid, so that no token falls between.
#pragma once

#include "portable.h"

namespace outrider {

struct PartialLayout {
  i64 block_size, sink_blocks, window_blocks;

  OUTRIDER_HD i64 sink() const { return sink_blocks * block_size; }

  // Blocks between sink and window of a KV cache that has `covered` tokens.
  OUTRIDER_HD i64 candidates(i64 covered) const {
    const i64 between = covered / block_size - sink_blocks - window_blocks;
    return between > 0 ? between : 0;
  }

  // Of the last candidates, those that a query after the covered tokens may see where it sees `window` >= 1 keys, its
  // own the last: the window of the layout has at least window_blocks whole blocks of them.
  OUTRIDER_HD i64 reach(i64 window) const {
    const i64 before = window - 1 - window_blocks * block_size;
    return before > 0 ? (before - 1) / block_size + 1 : 0;
  }

  // Which block lies in place `place` of the `count` of a layer that sees the last tokens alone: those within its reach
  // are the last candidates, the ones before them the first, which it does not see and which never change.
  OUTRIDER_HD static i64 recent(i64 place, i64 count, i64 reach, i64 candidates) {
    return place < count - reach ? place : candidates - count + place;
  }

  // The first token of block `block`, and of the window where that is the number of candidates.
  OUTRIDER_HD i64 first(i64 block) const { return (sink_blocks + block) * block_size; }
};

// A score that is no number is worth nothing.
OUTRIDER_HD inline float worth(float score) { return score == score ? score : -3.402823466e38f; }

// How scores of one block by several queries become one.
enum Reduction : int { kMax = 0, kMean = 1, kLast = 2 };

}  // namespace outrider
