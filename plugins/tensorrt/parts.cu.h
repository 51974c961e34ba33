// What plugins add to the kernels: choices, acceptance and tree growth without a counter, and guards.
//
// A builder times kernels on any contents of memory. Where a guard holds, the kernel stays within its tensors and ends.
// A guard is false for all threads of a block or for none.
#pragma once

#include "accept.cu.h"
#include "bim_mask.cu.h"
#include "kv_gather.cu.h"
#include "tree_expand.cu.h"

namespace outrider {

OUTRIDER_DEVICE bool within(i64 index, i64 size) { return 0 <= index && index < size; }

// Of BimMask: the splits of row `r`, and where its tokens are appended.
OUTRIDER_DEVICE bool row_fits(const i64* row_splits, const i64* past_length, i64 r, i64 new_tokens) {
  return 0 <= row_splits[r] && row_splits[r] <= row_splits[r + 1] && row_splits[r + 1] <= new_tokens &&
         0 <= past_length[r];
}

// Whether every thread of the block holds so. Every thread calls.
OUTRIDER_DEVICE bool everywhere(bool holds) { return fold(static_cast<i64>(!holds), Largest()) == 0; }

// Of acceptance: rows of the step, ascending. Every thread calls.
OUTRIDER_DEVICE bool rows_ascend(const i64* logit_indices, i64 count, i64 new_tokens) {
  bool holds = true;
  for (i64 i = thread_index(); i < count; i += thread_count()) {
    holds = holds && within(logit_indices[i], new_tokens) && (i == 0 || logit_indices[i - 1] < logit_indices[i]);
  }
  return everywhere(holds);
}

// Of a walk: from every place it goes to a later one, or nowhere. Every thread calls.
OUTRIDER_DEVICE bool steps_forward(const i64* next, i64 count) {
  bool holds = true;
  for (i64 i = thread_index(); i < count; i += thread_count()) {
    holds = holds && (next[i] == kNobody || (next[i] > i && next[i] < count));
  }
  return everywhere(holds);
}

// Of KvGather: the splits of all rows, and the slots that row `r` moves from and to.
OUTRIDER_DEVICE bool moves_fit(const i64* source_count, const i64* row_splits, const i64* source_base,
                               const i64* destination, i64 rows, i64 r, i64 new_tokens, i64 capacity) {
  bool holds = source_count[0] <= new_tokens && row_splits[0] == 0;
  for (i64 i = 0; i < rows; ++i) holds = holds && row_splits[i] <= row_splits[i + 1];
  return holds && row_splits[rows] <= new_tokens && within(source_base[r], capacity + 1) &&
         within(destination[r], capacity + 1);
}

// A counter that no block of the launch fills: the walk is another launch.
OUTRIDER_DEVICE u32* never_full() {
  OUTRIDER_SHARED u32 counter;
  if (thread_index() == 0) counter = static_cast<u32>(block_count());
  barrier();
  return &counter;
}

OUTRIDER_KERNEL outrider_row_shares(const float* logits, const i64* logit_indices, const i64* positions,
                                    const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                    u64* shares, i64 vocabulary, i64 branches, i64 purpose) {
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, nullptr, vocabulary, branches};
  tell_part(step, own_part(vocabulary), static_cast<u32>(purpose), nullptr, shares);
}

OUTRIDER_KERNEL outrider_chain_shares(const float* logits, const i64* logit_indices, const i64* positions,
                                      const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                      const i64* parent, const float* draft_probs, const i64* by_rejection, u64* shares,
                                      i64 vocabulary, i64 branches) {
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, nullptr, vocabulary, branches};
  const Trees trees = {logit_indices, rows_of_launch(vocabulary), parent, nullptr};
  const Part part = own_part(vocabulary);
  const float* drafted = weighed_against(step, trees, {draft_probs, nullptr, by_rejection}, part.place);
  tell_part(step, part, kForTarget, drafted, shares);
}

// A block for each row, of which all shares are there.
OUTRIDER_KERNEL outrider_row_choice(const float* logits, const i64* logit_indices, const i64* positions,
                                    const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                    const u64* shares, i64* committed, u64* candidates, i64* status, i64 vocabulary,
                                    i64 branches, i64 purpose) {
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  commit(step, block_index(), static_cast<u32>(purpose), committed, status);
}

OUTRIDER_KERNEL outrider_tree_choices(const float* logits, const i64* logit_indices, const i64* positions,
                                      const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                      const i64* token_ids, const i64* parent, const u64* shares, i64* chosen,
                                      i64* next, u64* candidates, i64 vocabulary, i64 branches, i64 purpose) {
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  const Trees trees = {logit_indices, block_count(), parent, token_ids};
  choose_node(step, trees, block_index(), static_cast<u32>(purpose), {chosen, next});
}

OUTRIDER_KERNEL outrider_chain_choices(const float* logits, const i64* logit_indices, const i64* positions,
                                       const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                       const i64* token_ids, const i64* parent, const float* draft_probs,
                                       const i64* skip_sample_adjustment, const i64* by_rejection, const u64* shares,
                                       i64* chosen, i64* next, double* weighed, u64* candidates, i64 vocabulary,
                                       i64 branches) {
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  const Trees trees = {logit_indices, block_count(), parent, token_ids};
  choose_link(step, trees, {draft_probs, skip_sample_adjustment, by_rejection}, block_index(), {chosen, next}, weighed);
}

OUTRIDER_KERNEL outrider_tree_walk(const i64* logit_indices, const i64* parent, const i64* chosen, const i64* next,
                                   i64* committed, i64* accepted_count, i64* kept_indices, i64* kept_count, i64* status,
                                   i64 count, i64 most_trees, i64 new_tokens) {
  const i64 of_step = fault_of_step(chosen, count);
  if (thread_index() != 0) return;
  const Trees trees = {logit_indices, count, parent, nullptr};
  const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
  walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
}

OUTRIDER_KERNEL outrider_chain_walk(const i64* logit_indices, const i64* parent, const i64* chosen, const i64* next,
                                    const double* weighed, i64* committed, i64* accepted_count, i64* kept_indices,
                                    i64* kept_count, double* trials, i64* status, i64 count, i64 most_trees,
                                    i64 new_tokens) {
  const i64 of_step = fault_of_step(chosen, count);
  if (thread_index() != 0) return;
  const Trees trees = {logit_indices, count, parent, nullptr};
  const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
  walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
  tell_trials(trees, next, weighed, trials);
}

OUTRIDER_KERNEL outrider_tree_frontier(const float* candidate_score, i64* frontier, i64 candidates, i64 top_k) {
  const i64 tree = block_index();
  choose_frontier(candidate_score + tree * candidates, candidates, top_k, frontier + tree * top_k);
}

}  // namespace outrider
