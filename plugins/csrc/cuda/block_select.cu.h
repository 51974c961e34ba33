// BlockSelect: a block of threads scores the candidates of one key head, a thread a candidate at a time by several
// queries at once, and picks the best; of a layer that sees the last tokens alone, it takes the last ones.
#pragma once

#include "../partial_kv.h"
#include "best_places.h"

namespace outrider {

constexpr i64 kQueries = 8;    // that a candidate is scored by at once: its summaries are read once for all of them
constexpr i64 kElements = 32;  // of theirs that threads share at once

// The queries that one key head is asked by, of kept rows ascending, a row's heads one after another.
struct Asked {
  const float* queries;  // of the first head that shares the key head, in row 0 of the layer
  const i64* rows;
  i64 count;
  i64 group;
  i64 width;
  i64 head_dim;

  OUTRIDER_DEVICE const float* query(i64 i) const {
    return queries + rows[i / group] * width + i % group * head_dim;
  }
};

// The score of one block by all queries; `most` and `least` are its summaries, an element `stride` from the next. Every
// thread calls: threads without a block (null) load queries for the others.
OUTRIDER_DEVICE float score_of(const Asked& asked, const float* most, const float* least, i64 stride, i64 reduction) {
  OUTRIDER_SHARED float shared[kElements * kQueries];
  float total = 0.0f;
  for (i64 first = 0; first < asked.count; first += kQueries) {
    float high[kQueries] = {};
    float low[kQueries] = {};
    for (i64 start = 0; start < asked.head_dim; start += kElements) {
      const i64 left = asked.head_dim - start;
      const i64 elements = left < kElements ? left : kElements;
      barrier();  // until all threads have read the last ones
      for (i64 i = thread_index(); i < kQueries * kElements; i += thread_count()) {
        const i64 q = i / kElements;
        const i64 d = i % kElements;
        const bool there = first + q < asked.count && d < elements;
        shared[d * kQueries + q] = there ? asked.query(first + q)[start + d] : 0.0f;
      }
      barrier();
      for (i64 d = 0; most != nullptr && d < elements; ++d) {
        const float largest = most[(start + d) * stride];
        const float smallest = least[(start + d) * stride];
        for (i64 q = 0; q < kQueries; ++q) {
          high[q] += shared[d * kQueries + q] * largest;
          low[q] += shared[d * kQueries + q] * smallest;
        }
      }
    }
    for (i64 q = 0; q < kQueries; ++q) {
      if (first + q >= asked.count) continue;
      const float h = worth(high[q]);
      const float l = worth(low[q]);
      const float score = h > l ? h : l;
      if (first + q == 0) {
        total = score;
      } else if (reduction == kMax) {
        total = total < score ? score : total;
      } else {
        total += score;
      }
    }
  }
  return worth(total);
}

// `scores` `[layers, heads, blocks]` is scratch.
OUTRIDER_KERNEL outrider_block_select(const float* queries, const i64* kept_indices, const i64* kept_count,
                                      const float* key_max, const float* key_min, const i64* layer_windows, const i64* row, const i64* covered,
                                      const i64* budget, i64* selected, float* scores, i64 rows, i64 layers, i64 heads, i64 head_dim, i64 blocks, i64 retrieval,
                                      i64 new_tokens, i64 width, i64 block_size, i64 sink_blocks, i64 window_blocks,
                                      i64 reduction, i64 most_queries) {
  follow();
  const PartialLayout layout = {block_size, sink_blocks, window_blocks};
  const i64 of = block_index();
  const i64 candidates = layout.candidates(covered[0]);
  const i64 kept = kept_count[0];
  if (covered[0] < 0 || candidates > blocks || kept < 1 || kept > new_tokens) return;
  if (row[0] < 0 || row[0] >= rows) return;
  if (budget[0] < 0 || budget[0] > retrieval) return;
  const i64 most = reduction == kLast ? 1 : most_queries;
  const i64 asked_rows = kept < most ? kept : most;
  const i64* last_rows = kept_indices + kept - asked_rows;
  for (i64 i = 0; i < asked_rows; ++i) {
    if (last_rows[i] < 0 || last_rows[i] >= new_tokens) return;
  }
  const i64 count = budget[0] < candidates ? budget[0] : candidates;
  i64* chosen = selected + of * retrieval;
  const i64 window = layer_windows[of / heads];
  i64 reach = layout.reach(window);
  if (window < 0 || (count < candidates && reach > count)) return;
  if (reach > count) reach = count;
  if (count == candidates || window > 0) {
    for (i64 i = thread_index(); i < count; i += thread_count()) {
      chosen[i] = layout.recent(i, count, reach, candidates);
    }
  } else if (count > 0) {
    const i64 group = width / (heads * head_dim);
    const float* first = queries + of / heads * new_tokens * width + of % heads * group * head_dim;
    const Asked asked = {first, last_rows, asked_rows * group, group, width, head_dim};
    const i64 summaries = (row[0] * layers * heads + of) * head_dim * blocks;
    float* own = scores + of * blocks;
    for (i64 start = 0; start < candidates; start += thread_count()) {
      const i64 i = start + thread_index();
      const bool there = i < candidates;
      const float score = score_of(asked, there ? key_max + summaries + i : nullptr,
                                   there ? key_min + summaries + i : nullptr, blocks, reduction);
      if (there) own[i] = score;
    }
    barrier();  // every score stands
    find_best_places(own, candidates, count, chosen);
  }
  for (i64 i = count + thread_index(); i < retrieval; i += thread_count()) chosen[i] = -1;
}

}  // namespace outrider
