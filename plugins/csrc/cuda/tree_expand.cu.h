// TreeExpand: a block works out the children of one node, and the last one to finish picks the next frontiers.
#pragma once

#include "draft_row.h"

namespace outrider {

// The likeliest winners of the target's race, in `best`, as probabilities. Paces count as shares of the fastest, in
// integer units, so that their sum does not depend on its order.
OUTRIDER_DEVICE void find_likeliest(const DraftRow& row, const float* noise, float doubt, i64 count, u64* best) {
  i32 own_fastest = 0;
  for (i64 i = thread_index(); i < row.size; i += thread_count()) {
    const i32 bits = bits_of(pace(row.kept(i), noise[i]));  // those of positive floats order as the floats do
    own_fastest = bits > own_fastest ? bits : own_fastest;
  }
  const float fastest = float_of(fold(own_fastest, Largest()));
  u64 own = 0;
  for (i64 i = thread_index(); i < row.size; i += thread_count()) {
    own += units_of(pace(row.kept(i), noise[i]) / fastest);
  }
  const Likelihood chosen = likelihood(doubt, sum_of(fold(own, Sum())), sum_of(row.total));
  find_best(
      [&](const auto& visit) {
        for (i64 i = thread_index(); i < row.size; i += thread_count()) {
          visit(rank_key(chosen.of(pace(row.kept(i), noise[i]) / fastest, row.weight(i)), i));
        }
      },
      count, best);
}

// The `count` best of a tree's candidates. Other blocks of this launch may have written the scores: read past this
// multiprocessor's own cache.
OUTRIDER_DEVICE void choose_frontier(const volatile float* candidate_score, i64 candidates, i64 count, i64* frontier) {
  OUTRIDER_SHARED u64 best[kMostBest];
  find_best_values(candidate_score, candidates, count, best);
  for (i64 i = thread_index(); i < count; i += thread_count()) frontier[i] = index_of(best[i]);
}

// `doubt` is a float32 as its bits.
OUTRIDER_KERNEL outrider_tree_expand(const float* logits, const float* score, const float* noise,
                                     const float* draft_sampling, i64* token, float* candidate_score, i64* frontier,
                                     u32* counter, i64 nodes, i64 vocabulary, i64 top_k, i64 doubt) {
  follow();
  OUTRIDER_SHARED u64 best[kMostBest];
  const i64 node = block_index();
  const i64 tree = node / nodes;
  const DraftFilters filters = draft_filters(sampling_of(draft_sampling, tree));
  const DraftRow row = read_row(logits + node * vocabulary, vocabulary, filters, filters.sampled ? 1 : top_k, best);
  if (filters.sampled) {
    find_likeliest(row, noise + tree * vocabulary, float_of(static_cast<i32>(doubt)), top_k, best);
  }
  for (i64 i = thread_index(); i < top_k; i += thread_count()) {
    const float value = value_of(best[i]);
    double log_prob = kUnknownScore;
    if (row.top > minus_infinity()) {
      log_prob = filters.sampled ? shared_log(value) : draft_log_prob(value, row.top, row.total);
    }
    token[node * top_k + i] = index_of(best[i]);
    candidate_score[node * top_k + i] = child_score(score[node], log_prob);
  }
  if (!last_to_finish(counter, block_count())) return;
  for (i64 t = 0; t < block_count() / nodes; ++t) {
    choose_frontier(candidate_score + t * nodes * top_k, nodes * top_k, top_k, frontier + t * top_k);
  }
}

}  // namespace outrider
