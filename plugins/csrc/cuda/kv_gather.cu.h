// KvGather: a block moves the slots of one head of one row of one plane, a thread its lanes of them, one move after
// another: a lane is read and written by the same thread, so that overlapping moves arrive whole.
#pragma once

#include "../kv_gather.h"
#include "../rows.h"
#include "block.h"
#include "move.h"

namespace outrider {

// A slot has `units` of `unit` bytes. The step has the first `rows` of the cache's rows.
OUTRIDER_KERNEL outrider_kv_gather(char* kv, const i64* source, const i64* source_count, const i64* row_splits,
                                   const i64* source_base, const i64* destination, i64 rows, i64 cache_rows,
                                   i64 heads, i64 capacity, i64 units, i64 unit) {
  follow();
  const i64 r = block_index() / heads % rows;
  const i64 plane = block_index() / heads / rows;
  const i64 new_tokens = row_splits[rows];
  const i64 slot_bytes = units * unit;
  char* slots = kv + ((plane * cache_rows + r) * heads + block_index() % heads) * capacity * slot_bytes;
  i64 earlier = 0;
  for (i64 i = 0; i < source_count[0]; ++i) {
    const i64 token = source[i];
    if (token < 0 || token >= new_tokens || row_of(row_splits, rows, token) != r) continue;
    const SlotMove move = slot_move(token, row_splits[r], earlier++, source_base[r], destination[r]);
    if (move.from == move.to || move.from >= capacity || move.to >= capacity) continue;
    for (i64 lane = thread_index(); lane < units; lane += thread_count()) {
      move_lane(slots + move.to * slot_bytes + lane * unit, slots + move.from * slot_bytes + lane * unit, unit);
    }
  }
}

}  // namespace outrider
