// DraftSample: a block runs one node's race, and writes the distribution of the draw.
#pragma once

#include "draft_row.h"

namespace outrider {

OUTRIDER_KERNEL outrider_draft_sample(const float* logits, const float* noise, const float* draft_sampling, i64* token,
                                      float* probability, i64 nodes, i64 vocabulary) {
  follow();
  OUTRIDER_SHARED u64 best[kMostBest];
  const i64 node = block_index();
  const i64 tree = node / nodes;
  const DraftFilters filters = draft_filters(sampling_of(draft_sampling, tree));
  const DraftRow row = read_row(logits + node * vocabulary, vocabulary, filters, 1, best);
  i64 drawn = index_of(best[0]);
  const double scale = 1.0 / static_cast<double>(row.kept_total);
  if (filters.sampled) {
    u64 own = 0;
    for (i64 i = thread_index(); i < vocabulary; i += thread_count()) {
      const u64 key = rank_key(pace(row.kept(i), noise[tree * vocabulary + i]), i);
      own = key > own ? key : own;
    }
    drawn = index_of(fold(own, Largest()));
  }
  if (thread_index() == 0) token[node] = drawn;
  for (i64 i = thread_index(); i < vocabulary; i += thread_count()) {
    const double certain = i == drawn ? 1.0 : 0.0;
    const double share = filters.sampled ? static_cast<double>(units_of(row.kept(i))) * scale : certain;
    probability[node * vocabulary + i] = static_cast<float>(share);
  }
}

}  // namespace outrider
