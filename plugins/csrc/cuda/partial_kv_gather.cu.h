// PartialKvGather: a block of threads fills both planes of one head, and then writes what lies there.
#pragma once

#include "../partial_kv.h"
#include "fold.h"
#include "move.h"

namespace outrider {

// A slot has `units` of `unit` bytes.
OUTRIDER_KERNEL outrider_partial_kv_gather(const char* kv, const i64* row, const i64* covered, const i64* selected,
                                           char* partial_kv, i64* resident, i64 rows, i64 layers, i64 heads, i64 capacity, i64 room, i64 retrieval,
                                           i64 block_size, i64 sink_blocks, i64 window_blocks, i64 units, i64 unit) {
  follow();
  const PartialLayout layout = {block_size, sink_blocks, window_blocks};
  const i64 of = block_index();
  if (row[0] < 0 || row[0] >= rows) return;
  const i64* wanted = selected + of * retrieval;
  i64* there = resident + (row[0] * layers * heads + of) * retrieval;
  const i64 candidates = layout.candidates(covered[0]);
  i64 own_end = retrieval;
  for (i64 i = thread_index(); i < retrieval; i += thread_count()) {
    if (selected[i] == -1 && i < own_end) own_end = i;
  }
  const i64 count = fold(own_end, Least());  // of every head
  i64 own_astray = 0;
  for (i64 i = thread_index(); i < retrieval; i += thread_count()) {
    const bool fits = i < count ? 0 <= wanted[i] && wanted[i] < candidates : wanted[i] == -1;
    if (!fits) own_astray = 1;
  }
  if (fold(own_astray, Largest()) != 0) return;
  const i64 window = layout.first(candidates);
  const i64 in_window = covered[0] - window;
  if (in_window < 0 || covered[0] > capacity || layout.first(count) + in_window > room) return;

  const i64 slot_bytes = units * unit;
  const i64 head = (2 * (of / heads) * rows + row[0]) * heads + of % heads;
  const auto copy = [&](i64 first, i64 at, i64 slots) {
    const char* from = kv + (head * capacity + first) * slot_bytes;
    char* to = partial_kv + (head * room + at) * slot_bytes;
    const i64 lanes = slots * units;
    for (i64 i = thread_index(); i < 2 * lanes; i += thread_count()) {  // of K, then of V
      const i64 plane = i < lanes ? 0 : rows * heads * slot_bytes;
      const i64 lane = (i < lanes ? i : i - lanes) * unit;
      move_lane(to + plane * room + lane, from + plane * capacity + lane, unit);
    }
  };
  copy(0, 0, layout.sink());
  for (i64 i = 0; i < count; ++i) {
    if (there[i] != wanted[i]) copy(layout.first(wanted[i]), layout.first(i), block_size);
  }
  copy(window, layout.first(count), in_window);
  barrier();  // all threads have read the old contents
  for (i64 i = thread_index(); i < retrieval; i += thread_count()) there[i] = wanted[i];
}

}  // namespace outrider
