// Sample, TreeAccept and ChainAccept: a block works out what each node would commit, and the last one to finish walks.
//
// Nodes that the walk does not come to are worked out in vain, but at the same time. So a fault stays with its node until
// the walk tells it: one of a row of logits where it comes to that node, an index fault of any node at once.
#pragma once

#include "../chain_accept.h"
#include "../sample.h"
#include "../tree_accept.h"
#include "row_choice.h"

namespace outrider {

constexpr i64 kNobody = -1;
constexpr u64 kNotANumber = 0x7ff8000000000000ull;  // the bits of a double

// What stands in place of the token of a node at fault: a number below kNobody.
OUTRIDER_DEVICE i64 in_place_of_token(i64 fault) { return kNobody - fault; }

OUTRIDER_DEVICE i64 fault_of(i64 chosen) {
  return in_place_of_token(kIndexFault) <= chosen && chosen < kNobody ? kNobody - chosen : kNoFault;
}

// A step's rows with logits, and how their branches choose. `scratch` `[count, vocabulary]` holds weights.
struct ChoiceStep {
  const float* logits;
  const i64* logit_indices;
  const i64* positions;
  const i64* branch;
  SamplingSlots slots;
  u64* scratch;
  i64 vocabulary;
  i64 branches;
};

OUTRIDER_DEVICE bool knows(const ChoiceStep& step, i64 place) {
  const i64 b = step.branch[step.logit_indices[place]];
  return b >= 0 && b < step.branches;
}

OUTRIDER_DEVICE FilteredRow filtered(const ChoiceStep& step, i64 place) {
  if (!knows(step, place)) return {nullptr, step.vocabulary, 0, 0, kIndexFault};
  const Sampling sampling = sampling_of(step.slots, step.branch[step.logit_indices[place]]);
  return filter_row(step.logits + place * step.vocabulary, step.vocabulary, sampling,
                    step.scratch + place * step.vocabulary);
}

OUTRIDER_DEVICE RaceKey race_of(const ChoiceStep& step, i64 place, u32 purpose) {
  const i64 row = step.logit_indices[place];
  return next_race(step.slots, step.branch[row], step.positions[row], purpose);
}

OUTRIDER_DEVICE u64 uniform_of(const ChoiceStep& step, i64 place, u32 purpose) {
  const i64 row = step.logit_indices[place];
  return next_uniform(step.slots, step.branch[row], step.positions[row], purpose);
}

OUTRIDER_KERNEL outrider_sample(const float* logits, const i64* logit_indices, const i64* positions, const i64* branch,
                                const double* temperature, const i64* top_k, const double* top_p,
                                const double* min_p, const i64* filter_order, const u64* seed, const i64* stream, i64* committed,
                                u64* scratch, i64* status, i64 vocabulary, i64 branches, i64 purpose) {
  const SamplingSlots slots = {temperature, top_k, top_p, min_p, filter_order, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, scratch, vocabulary, branches};
  const i64 place = block_index();
  const FilteredRow row = filtered(step, place);
  if (row.fault != kNoFault) {
    if (thread_index() == 0) *status = row.fault;
    return;
  }
  const i64 token = draw_token(row, race_of(step, place, static_cast<u32>(purpose)));
  if (thread_index() == 0) committed[place] = token;
}

struct Outputs {
  i64* committed;
  i64* accepted_count;
  i64* kept_indices;
  i64* kept_count;
  i64* status;
};

// The fault that a step has wherever its walk goes. Every thread of a block calls.
OUTRIDER_DEVICE i64 fault_of_step(const volatile i64* chosen, i64 count) {
  i64 own = kNoFault;
  for (i64 i = thread_index(); i < count; i += thread_count()) {
    if (fault_of(chosen[i]) == kIndexFault) own = kIndexFault;
  }
  return fold(own, Largest());
}

// Thread 0 of one block. `chosen` holds each node's token, or its fault, and `next` the place of the child to go on at, or
// kNobody. They were written by other blocks of this launch: read past this multiprocessor's own cache. `fault` is the
// step's; the first one that the walk comes to is told where that has none.
OUTRIDER_DEVICE void walk(const Trees& trees, const volatile i64* chosen, const volatile i64* next, const Outputs& out,
                          i64 new_tokens, i64 most_trees, i64 fault) {
  for (i64 i = 0; i < trees.count; ++i) out.committed[i] = kNobody;
  for (i64 i = 0; i < most_trees; ++i) out.accepted_count[i] = 0;
  i64 tree = 0;
  i64 kept = 0;
  i64 row = 0;    // rows before it are told
  i64 place = 0;  // the first whose row is not below `row`
  for (i64 root = 0; root < trees.count && tree < most_trees; ++tree) {
    i64 end = root + 1;
    while (end < trees.count && parent_place(trees, end) >= 0) ++end;
    i64 tokens = 0;
    for (i64 node = root; node != kNobody; node = next[node]) {
      for (; row <= trees.logit_indices[node]; ++row) {  // pending rows, nodes passed over, and the node itself
        const bool drafted = place < trees.count && trees.logit_indices[place] == row;
        if (!drafted || place == node) out.kept_indices[kept++] = row;
        if (drafted) ++place;
      }
      const i64 token = chosen[node];
      if (fault == kNoFault) fault = fault_of(token);
      out.committed[root + tokens++] = token < 0 ? kNobody : token;
    }
    out.accepted_count[tree] = tokens;
    root = end;
  }
  for (; row < new_tokens; ++row) {
    const bool drafted = place < trees.count && trees.logit_indices[place] == row;
    if (!drafted) out.kept_indices[kept++] = row;
    if (drafted) ++place;
  }
  out.kept_count[0] = kept;
  for (i64 i = kept; i < new_tokens; ++i) out.kept_indices[i] = kNobody;
  if (fault != kNoFault) *out.status = fault;
}

OUTRIDER_DEVICE i64 end_of_tree(const Trees& trees, i64 place) {
  i64 end = place + 1;
  while (end < trees.count && parent_place(trees, end) >= 0) ++end;
  return end;
}

OUTRIDER_KERNEL outrider_tree_accept(const float* logits, const i64* logit_indices, const i64* positions, const i64* branch,
                                     const double* temperature, const i64* top_k, const double* top_p,
                                     const double* min_p, const i64* filter_order, const u64* seed, const i64* stream, const i64* token_ids,
                                     const i64* parent, i64* committed, i64* accepted_count, i64* kept_indices,
                                     i64* kept_count, u64* scratch, i64* status, i64* chosen, i64* next, u32* counter,
                                     i64 vocabulary, i64 branches, i64 most_trees, i64 new_tokens, i64 purpose) {
  const SamplingSlots slots = {temperature, top_k, top_p, min_p, filter_order, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, scratch, vocabulary, branches};
  const Trees trees = {logit_indices, block_count(), parent, token_ids};
  const i64 place = block_index();
  const FilteredRow row = filtered(step, place);
  i64 token = in_place_of_token(row.fault);
  if (row.fault == kNoFault) token = draw_token(row, race_of(step, place, static_cast<u32>(purpose)));
  if (thread_index() == 0) {
    chosen[place] = token;
    next[place] = token < 0 ? kNobody : child_holding(trees, place, end_of_tree(trees, place), token);
  }
  if (!last_to_finish(counter)) return;
  const i64 of_step = fault_of_step(chosen, trees.count);
  if (thread_index() == 0) {
    const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
    walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
  }
}

// Of every drafted node that the walk came to, r and p / q, which its parent's block weighed; NaN elsewhere.
OUTRIDER_DEVICE void tell_trials(const Trees& trees, const volatile i64* next, const volatile double* weighed,
                                 double* trials) {
  for (i64 i = 0; i < 2 * trees.count; ++i) trials[i] = double_of(kNotANumber);
  for (i64 root = 0; root < trees.count; root = end_of_tree(trees, root)) {
    for (i64 node = root; node != kNobody; node = next[node]) {
      const i64 drafted = node + 1;
      if (drafted >= trees.count || parent_place(trees, drafted) != node) continue;
      trials[2 * drafted] = weighed[2 * node];
      trials[2 * drafted + 1] = weighed[2 * node + 1];
    }
  }
}

OUTRIDER_KERNEL outrider_chain_accept(const float* logits, const i64* logit_indices, const i64* positions,
                                      const i64* branch, const double* temperature, const i64* top_k,
                                      const double* top_p, const double* min_p, const i64* filter_order, const u64* seed, const i64* stream,
                                      const i64* token_ids, const i64* parent, const float* draft_probs,
                                      const i64* skip_sample_adjustment, const i64* by_rejection, i64* committed,
                                      i64* accepted_count, i64* kept_indices, i64* kept_count, double* trials,
                                      u64* scratch, i64* status,
                                      i64* chosen, i64* next, double* weighed, u32* counter, i64 vocabulary,
                                      i64 branches, i64 most_trees, i64 new_tokens) {
  const SamplingSlots slots = {temperature, top_k, top_p, min_p, filter_order, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, scratch, vocabulary, branches};
  const Trees trees = {logit_indices, block_count(), parent, token_ids};
  const i64 place = block_index();
  const FilteredRow row = filtered(step, place);
  const i64 drafted = place + 1;
  // By the other rule, a node's child is the one that holds the target's choice, and nothing is weighed.
  const bool weighs = row.fault != kIndexFault && by_rejection[branch[logit_indices[place]]] != 0;
  const bool has_child = weighs && drafted < trees.count && parent_place(trees, drafted) == place;
  const float* q = draft_probs + drafted * vocabulary;  // the child's
  const i64 proposed = has_child ? token_ids[logit_indices[drafted]] : kNobody;
  i64 fault = row.fault;
  if (has_child) {
    bool faulty = proposed < 0 || proposed >= vocabulary;
    for (i64 i = thread_index(); i < vocabulary; i += thread_count()) faulty = faulty || !can_be_probability(q[i]);
    if (fold(static_cast<i64>(faulty), Largest()) != 0) fault = kIndexFault;
  }
  i64 token = in_place_of_token(fault);
  i64 follows = kNobody;
  double ratio = 0.0;
  const u64 r = fault == kNoFault ? uniform_of(step, place, kForRejection) : 0;
  if (fault == kNoFault && !has_child) {
    token = draw_token(row, race_of(step, place, kForTarget));  // the bonus, or the choice
    if (!weighs) follows = child_holding(trees, place, end_of_tree(trees, place), token);
  } else if (fault == kNoFault) {
    const double scale = probability_scale(row.total);
    const u64 own = row.weights ? row.weights[proposed] : proposed == row.best ? row.total : 0;
    const u64 p = target_probability(own, scale);
    const u64 q_own = draft_probability(q[proposed]);
    ratio = p ? static_cast<double>(p) / static_cast<double>(q_own) : 0.0;
    const RaceKey race = race_of(step, place, kForTarget);
    if (accepts(r, p, q_own)) {
      token = proposed;
      follows = drafted;
    } else {
      token = draw_token(row, race);  // where nothing is left, or nothing is to be adjusted
      if (skip_sample_adjustment[branch[logit_indices[place]]] == 0) {
        u64* rest = step.scratch + place * vocabulary;
        u64 own_total = 0;
        for (i64 i = thread_index(); i < vocabulary; i += thread_count()) {
          const u64 mass = row.weights ? row.weights[i] : i == row.best ? row.total : 0;
          rest[i] = residual(target_probability(mass, scale), draft_probability(q[i]));
          own_total += rest[i];
        }
        const u64 total = fold(own_total, Sum());  // and a barrier: all of the rest stands
        if (total != 0) token = winner(rest, vocabulary, race);
      }
    }
  }
  if (thread_index() == 0) {
    chosen[place] = token;
    next[place] = follows;
    weighed[2 * place] = has_child ? draw_f64(r) : double_of(kNotANumber);
    weighed[2 * place + 1] = has_child ? ratio : double_of(kNotANumber);
  }
  if (!last_to_finish(counter)) return;
  const i64 of_step = fault_of_step(chosen, trees.count);
  if (thread_index() == 0) {
    const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
    walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
    tell_trials(trees, next, weighed, trials);
  }
}

}  // namespace outrider
