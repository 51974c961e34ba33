// The tokens of a row that can still be chosen, picked out of the row by its groups' largest logits.
#pragma once

#include "row_share.h"
#include "select.h"

namespace outrider {

constexpr i64 kMostCandidates = 16384;  // MOST_CANDIDATES in ops/row_choices.py

struct Candidate {
  u64 weight;
  i32 token;
  float logit;
};
static_assert(sizeof(Candidate) == 16, "CANDIDATE_BYTES in ops/row_choices.py");

constexpr i32 kMinusInfinityKey = ~kInfinityKey;
constexpr i32 kLeastFinite = kMinusInfinityKey + 1;

constexpr i64 kMostGroups = 1024;  // that a block looks at together

OUTRIDER_DEVICE i32* group_memory() {  // one for everything that goes over tokens
  OUTRIDER_SHARED i32 groups[kMostGroups];
  return groups;
}

// A row of logits and the summaries of its shares, which other blocks wrote, of this launch or the one before: they are
// read past this multiprocessor's own cache.
struct Row {
  const float* logits;
  i64 size;
  const volatile Share* shares;
  float top;  // the largest logit

  OUTRIDER_DEVICE i32 top_of_group(i64 group) const { return shares[group / kGroups].group_top[group % kGroups]; }
  OUTRIDER_DEVICE i64 groups() const { return (size + kGroup - 1) / kGroup; }

  // Calls `visit` with every token of this thread in the groups [begin, end) whose order key is `floor` or more, and
  // its logit. Groups below are not read, and the others shared out evenly. Every thread calls.
  template <typename Visit>
  OUTRIDER_DEVICE void each_token(i64 begin, i64 end, i32 floor, const Visit& visit) const {
    constexpr i64 kQuads = kGroup / kRacers;
    OUTRIDER_SHARED u32 found;
    i32* list = group_memory();
    for (i64 start = begin; start < end; start += kMostGroups) {
      const i64 stop = end < start + kMostGroups ? end : start + kMostGroups;
      barrier();  // until all threads have read the last ones
      if (thread_index() == 0) found = 0;
      barrier();
      for (i64 g = start + thread_index(); g < stop; g += thread_count()) {
        if (top_of_group(g) >= floor) list[count_up(&found)] = static_cast<i32>(g);
      }
      barrier();
      for (i64 q = thread_index(); q < found * kQuads; q += thread_count()) {
        const i64 first = list[q / kQuads] * kGroup + q % kQuads * kRacers;
        const Quad quad = quad_of(logits, size, first, 0.0f);
        for (int i = 0; i < kRacers && first + i < size; ++i) {
          if (order_key(quad.value[i]) >= floor) visit(first + i, quad.value[i]);
        }
      }
    }
  }

  // The order key that at least `groups` groups reach: that of the groups-th largest of the groups' largest logits.
  // Where there are fewer groups, one that every logit but -inf reaches, which weighs nothing.
  OUTRIDER_DEVICE i32 floor_of(i64 most) const {
    if (most > groups()) return kLeastFinite;
    const i32 key = kth_largest_key(
        [&](const auto& visit) {
          for (i64 g = thread_index(); g < groups(); g += thread_count()) visit(top_of_group(g));
        },
        most);
    return key > kLeastFinite ? key : kLeastFinite;
  }
};

// The candidates of a row: a list of them, or where it cannot hold them, every logit from `floor` on.
struct Candidates {
  Candidate* list;  // [kMostCandidates]
  i64 count;
  i32 floor;

  OUTRIDER_DEVICE bool listed() const { return count <= kMostCandidates; }
};

OUTRIDER_DEVICE Candidates every_token(Candidate* list) { return {list, kMostCandidates + 1, kLeastFinite}; }

// Lists the tokens whose order key is `floor` or more; of those that weigh nothing, only where the `faint` count. In
// any order.
OUTRIDER_DEVICE Candidates find_candidates(const Row& row, i32 floor, double heat, bool faint, Candidate* list) {
  OUTRIDER_SHARED u32 seen;
  if (thread_index() == 0) seen = 0;
  barrier();
  row.each_token(0, row.groups(), floor, [&](i64 token, float logit) {
    const u64 own = weighed(logit, row.top, heat);
    if (own == 0 && !faint) return;
    const u32 place = count_up(&seen);
    if (place < kMostCandidates) list[place] = {own, static_cast<i32>(token), logit};
  });
  barrier();
  const Candidates found = {list, static_cast<i64>(seen), floor};
  barrier();  // before anyone counts again
  return found;
}

// Calls `visit` with every candidate of this thread: its logit, and its weight at the temperature `heat`.
template <typename Visit>
OUTRIDER_DEVICE void each_candidate(const Row& row, const Candidates& candidates, double heat, const Visit& visit) {
  if (candidates.listed()) {
    for (i64 i = thread_index(); i < candidates.count; i += thread_count()) {
      visit(candidates.list[i].logit, candidates.list[i].weight);
    }
  } else {
    row.each_token(0, row.groups(), candidates.floor,
                   [&](i64, float logit) { visit(logit, weighed(logit, row.top, heat)); });
  }
}

}  // namespace outrider
