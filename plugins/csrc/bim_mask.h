// Who sees whom: one rule for prefill, chain, tree and branch.
#pragma once

#include "portable.h"

namespace outrider {

constexpr i64 kSharedPrefix = -1;  // a bim entry that every branch sees
constexpr i64 kPaddingKey = 0;     // the one key that a place after a row's tokens sees: no softmax is over nothing
constexpr float kVisible = 0.0f;
constexpr float kMasked = -0x1.fffffep+127f;  // the lowest float32: finite, so a fully masked row has no NaN

// A key committed before this step, to a query of `branch`.
OUTRIDER_HD inline bool sees_committed(i64 bim, i64 branch) { return bim == kSharedPrefix || bim == branch; }

// A key of this step, of the query's row: the query itself or an ancestor of it. Ancestors come first
// (parent[i] < i), so the climb ends.
OUTRIDER_HD inline bool sees_new(const i64* parent, i64 query, i64 key) {
  while (query > key) query = parent[query];
  return query == key;
}

}  // namespace outrider
