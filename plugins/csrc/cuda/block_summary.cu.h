// BlockSummary: a block of threads summarises every few of the new blocks of one head, a thread an element of them.
#pragma once

#include "../partial_kv.h"
#include "block.h"
#include "element.h"

namespace outrider {

OUTRIDER_KERNEL outrider_block_summary(const char* kv, const i64* layer_windows, const i64* row, const i64* covered, const i64* summarised,
                                       float* key_max, float* key_min, i64 rows, i64 layers, i64 heads, i64 capacity, i64 head_dim, i64 blocks,
                                       i64 element, i64 block_size, i64 sink_blocks, i64 window_blocks) {
  follow();
  const PartialLayout layout = {block_size, sink_blocks, window_blocks};
  const i64 of = block_index() % (layers * heads);
  const i64 share = block_index() / (layers * heads);
  const i64 shares = block_count() / (layers * heads);
  const i64 end = layout.candidates(covered[0]);
  if (row[0] < 0 || row[0] >= rows) return;
  if (layer_windows[of / heads] != 0) return;  // its blocks are not scored
  if (covered[0] < 0 || covered[0] > capacity || end > blocks || summarised[0] < 0) return;
  const i64 keys = ((2 * (of / heads) * rows + row[0]) * heads + of % heads) * capacity;
  for (i64 block = summarised[0] + share; block < end; block += shares) {
    const i64 first = (keys + layout.first(block)) * head_dim;
    for (i64 d = thread_index(); d < head_dim; d += thread_count()) {
      float high = element_at(kv, first + d, element);
      float low = high;
      for (i64 t = 1; t < block_size; ++t) {
        const float key = element_at(kv, first + t * head_dim + d, element);
        high = key > high || key != key ? key : high;  // NaN stays
        low = key < low || key != key ? key : low;
      }
      const i64 to = ((row[0] * layers * heads + of) * head_dim + d) * blocks + block;
      key_max[to] = high;
      key_min[to] = low;
    }
  }
}

}  // namespace outrider
