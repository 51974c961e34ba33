// DraftSample: a block draws one node's token, and writes what from.
#pragma once

#include "draft_row.h"
#include "row_choice.h"

namespace outrider {

OUTRIDER_KERNEL outrider_draft_sample(const float* logits, const double* draws, const double* temperature,
                                      const i64* top_k, const double* top_p, i64* token, float* probability, i64 nodes,
                                      i64 vocabulary) {
  OUTRIDER_SHARED u64 best[kMostBest];
  const i64 node = block_index();
  const i64 tree = node / nodes;
  const DraftFilters filters = draft_filters(temperature[tree], top_k[tree], top_p[tree]);
  const DraftRow row = read_row(logits + node * vocabulary, vocabulary, filters, 1, best);
  i64 drawn = index_of(best[0]);
  const double scale = 1.0 / static_cast<double>(row.kept_total);
  if (filters.sampled) {
    const u64 draw = fraction53(draws[tree]);
    const u64 place = draw_place(draw < kWhole53 ? draw : kWhole53 - 1, row.kept_total);
    drawn = token_by([&row](i64 i) { return row.kept(i); }, vocabulary, place);
  }
  if (thread_index() == 0) token[node] = drawn;
  for (i64 i = thread_index(); i < vocabulary; i += thread_count()) {
    const double certain = i == drawn ? 1.0 : 0.0;
    const double share = filters.sampled ? static_cast<double>(row.kept(i)) * scale : certain;
    probability[node * vocabulary + i] = static_cast<float>(share);
  }
}

}  // namespace outrider
