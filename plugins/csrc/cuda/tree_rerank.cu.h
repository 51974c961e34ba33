// TreeRerank: a block picks the nodes of one tree.
#pragma once

#include "../tree_rerank.h"
#include "row_choice.h"

namespace outrider {

OUTRIDER_KERNEL outrider_tree_rerank(const i64* candidate_token, const float* candidate_score,
                                     const i64* candidate_parent, const i64* candidate_depth, i64* candidate,
                                     i64* token, i64* parent, i64* depth, float* score, i64 candidates, i64 nodes) {
  const i64 tree = block_index();
  const i64 drafted = nodes - 1;
  const float* scores = candidate_score + tree * candidates;
  i64* chosen = candidate + tree * drafted;
  const i32 cut = top_k_key(scores, candidates, drafted);
  const Stretch stretch = own_stretch(candidates);
  i64 own_above = 0;
  i64 own_at_cut = 0;
  for (i64 i = stretch.begin; i < stretch.end; ++i) {
    const i32 key = order_key(scores[i]);
    own_above += key > cut ? 1 : 0;
    own_at_cut += key == cut ? 1 : 0;
  }
  // Of those at the cut the first ones are chosen, as many as there is room for.
  const i64 room = drafted - fold(own_above, Sum());
  i64 at_cut = static_cast<i64>(sum_before(own_at_cut));
  const i64 left = room > at_cut ? room - at_cut : 0;
  i64 place = static_cast<i64>(sum_before(own_above + (own_at_cut < left ? own_at_cut : left)));
  for (i64 i = stretch.begin; i < stretch.end; ++i) {
    const i32 key = order_key(scores[i]);
    if (key > cut || (key == cut && at_cut++ < room)) chosen[place++] = i;
  }
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
