// The trees of a step, as places in `logit_indices` (ascending rows): where a row stands, which rows are roots, which child
// holds a token.
#pragma once

#include "portable.h"

namespace outrider {

struct Trees {
  const i64* logit_indices;  // [count], ascending
  i64 count;
  const i64* parent;     // [N]
  const i64* token_ids;  // [N]
};

// The place of `row` in logit_indices, or -1.
OUTRIDER_HD inline i64 place_of(const Trees& trees, i64 row) {
  i64 low = 0;
  i64 high = trees.count;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (trees.logit_indices[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < trees.count && trees.logit_indices[low] == row ? low : -1;
}

// The place of the parent of the node at `place`; -1 makes that node a root (a tip).
OUTRIDER_HD inline i64 parent_place(const Trees& trees, i64 place) {
  const i64 parent = trees.parent[trees.logit_indices[place]];
  return parent < 0 ? -1 : place_of(trees, parent);
}

// The place before `end` of the lowest child of `node` that holds `token`, or -1. Children stand after their parent.
OUTRIDER_HD inline i64 child_holding(const Trees& trees, i64 node, i64 end, i64 token) {
  for (i64 place = node + 1; place < end; ++place) {
    const i64 row = trees.logit_indices[place];
    if (trees.token_ids[row] == token && trees.parent[row] == trees.logit_indices[node]) return place;
  }
  return -1;
}

}  // namespace outrider
