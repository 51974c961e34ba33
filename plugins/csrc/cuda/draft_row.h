// A row of a drafter's logits, read by a block of threads: its best, its sums, and where the filters cut it.
#pragma once

#include "../draft.h"
#include "best.h"
#include "fold.h"

namespace outrider {

struct DraftRow {
  const float* logits;
  i64 size;
  float heat;
  float top;
  u64 total;       // of the units of all tokens
  float least;     // the smallest logit that is kept
  float min_p;     // the least weight that is kept
  u64 kept_total;  // of the units of those that are kept

  OUTRIDER_DEVICE float weight(i64 token) const { return draft_weight(legible(logits[token]), top, heat); }
  OUTRIDER_DEVICE float kept(i64 token) const {
    const float own = weight(token);
    return legible(logits[token]) >= least && own >= min_p ? own : 0.0f;
  }
};

// The smallest logit that top-k and top-p keep, of the `likely` best of a row that is whole but for them. Every thread
// gets it.
OUTRIDER_DEVICE float least_kept(const DraftFilters& filters, const DraftRow& row, const u64* best, i64 likely) {
  OUTRIDER_SHARED u64 units[kLikely];
  for (i64 i = thread_index(); i < likely; i += thread_count()) {
    units[i] = units_of(draft_weight(value_of(best[i]), row.top, row.heat));
  }
  barrier();
  const bool limited = 0 < filters.top_k && filters.top_k <= likely;
  const i64 most = limited ? filters.top_k : likely;
  u64 survivors = limited ? 0 : row.total;
  for (i64 i = 0; limited && i < most; ++i) survivors += units[i];
  const u64 need = ceil_share(filters.top_p, survivors);
  i64 kept = 0;
  for (u64 before = 0; kept < most && (kept == 0 || filters.top_p == kWhole53 || before < need);) {
    before += units[kept++];
  }
  return kept == likely && !limited ? minus_infinity() : value_of(best[kept - 1]);
}

// Reads a row; `best` [kMostBest], which the block shares, gets its `count` best logits.
OUTRIDER_DEVICE DraftRow read_row(const float* logits, i64 size, const DraftFilters& filters, i64 count, u64* best) {
  const i64 likely = kLikely < size ? kLikely : size;
  find_best_values(logits, size, filters.cut() && likely > count ? likely : count, best);
  DraftRow row = {logits, size, filters.heat, value_of(best[0]), 0, minus_infinity(), filters.min_p, 0};
  u64 own = 0;
  for (i64 i = thread_index(); i < size; i += thread_count()) own += units_of(row.weight(i));
  row.total = row.kept_total = fold(own, Sum());
  if (filters.cut()) row.least = least_kept(filters, row, best, likely);
  if (filters.cut() || filters.min_p > 0.0f) {
    own = 0;
    for (i64 i = thread_index(); i < size; i += thread_count()) own += units_of(row.kept(i));
    row.kept_total = fold(own, Sum());
  }
  return row;
}

}  // namespace outrider
