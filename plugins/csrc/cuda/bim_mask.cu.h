// BimMask: a block writes the bias of one place of one row.
#pragma once

#include "../bim_mask.h"
#include "block.h"

namespace outrider {

// As sees_new, for parents that a drafter wrote: a climb that does not descend has no end, and sees nothing.
OUTRIDER_DEVICE bool descends_to(const i64* parent, i64 query, i64 key) {
  while (query > key) {
    const i64 next = parent[query];
    if (next >= query) return false;
    query = next;
  }
  return query == key;
}

OUTRIDER_KERNEL outrider_bim_mask(const i64* bim, const i64* past_length, const i64* row_splits, const i64* branch,
                                  const i64* parent, float* attn_bias, i64 capacity, i64 view, i64 rows, i64 places) {
  follow();
  const i64 r = block_index() / places;
  const i64 s = block_index() % places;
  if (r >= rows) return;
  const i64 first = row_splits[r];
  const i64 tokens = row_splits[r + 1] - first;
  const i64 past = past_length[r];
  float* line = attn_bias + (r * places + s) * view;
  for (i64 t = thread_index(); t < view; t += thread_count()) {
    bool visible = t == kPaddingKey;  // of places after the row's tokens
    if (s < tokens) {
      const i64 query = first + s;
      const i64 key = first + (t - past);
      visible = t < past ? sees_committed(bim[r * capacity + t], branch[query])
                         : key < first + tokens && descends_to(parent, query, key);
    }
    line[t] = visible ? kVisible : kMasked;
  }
}

}  // namespace outrider
