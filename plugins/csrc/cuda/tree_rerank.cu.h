// TreeRerank: a block picks the nodes of one tree.
#pragma once

#include "../tree_rerank.h"
#include "best_places.h"

namespace outrider {

OUTRIDER_KERNEL outrider_tree_rerank(const i64* candidate_token, const float* candidate_score,
                                     const i64* candidate_parent, const i64* candidate_depth, i64* candidate,
                                     i64* token, i64* parent, i64* depth, float* score, i64 candidates, i64 nodes) {
  follow();
  const i64 tree = block_index();
  const i64 drafted = nodes - 1;
  const float* scores = candidate_score + tree * candidates;
  i64* chosen = candidate + tree * drafted;
  find_best_places(scores, candidates, drafted, chosen);
  barrier();
  for (i64 node = thread_index(); node < drafted; node += thread_count()) {
    const i64 from = tree * candidates + chosen[node];
    const i64 to = tree * drafted + node;
    token[to] = candidate_token[from];
    parent[to] = node_of(chosen, drafted, candidate_parent[from]);
    depth[to] = candidate_depth[chosen[node]];
    score[to] = candidate_score[from];
  }
}

}  // namespace outrider
