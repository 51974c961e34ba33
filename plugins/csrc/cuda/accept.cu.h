// Sample, TreeAccept and ChainAccept: blocks summarise their shares of every row, a row's last block computes what its
// node would commit, and the last of these walks.
//
// Nodes that the walk does not reach are computed in vain, but at the same time. So a fault stays with its node until
// the walk reports it: one of a row of logits where it reaches that node, an index fault of any node at once.
#pragma once

#include "../chain_accept.h"
#include "../sample.h"
#include "../tree_accept.h"
#include "row_choice.h"

namespace outrider {

constexpr i64 kNobody = -1;
constexpr u64 kNotANumber = 0x7ff8000000000000ull;  // the bits of a double

// The number in place of the token of a node at fault, below kNobody.
OUTRIDER_DEVICE i64 in_place_of_token(i64 fault) { return kNobody - fault; }

OUTRIDER_DEVICE i64 fault_of(i64 chosen) {
  return in_place_of_token(kIndexFault) <= chosen && chosen < kNobody ? kNobody - chosen : kNoFault;
}

// A step's rows with logits, and how their branches choose. `shares` and `candidates` are scratch of rows, one after
// the other: a Share for each share, and kMostCandidates of Candidate.
struct ChoiceStep {
  const float* logits;
  const i64* logit_indices;
  const i64* positions;
  const i64* branch;
  SamplingSlots slots;
  const u64* shares;
  u64* candidates;
  i64 vocabulary;
  i64 branches;

  OUTRIDER_DEVICE const float* row(i64 place) const { return logits + place * vocabulary; }
  OUTRIDER_DEVICE const Share* shares_at(i64 place) const {
    return reinterpret_cast<const Share*>(shares) + place * shares_of(vocabulary);
  }
};

OUTRIDER_DEVICE bool knows(const ChoiceStep& step, i64 place) {
  const i64 b = step.branch[step.logit_indices[place]];
  return b >= 0 && b < step.branches;
}

OUTRIDER_DEVICE bool fills_up(const ChoiceStep& step, i64 place) {
  return step.branch[step.logit_indices[place]] == kNoBranch;
}

OUTRIDER_DEVICE Sampling sampling_at(const ChoiceStep& step, i64 place) {
  return sampling_of(step.slots.sampling, step.branch[step.logit_indices[place]]);
}

OUTRIDER_DEVICE RaceKey race_of(const ChoiceStep& step, i64 place, u32 purpose) {
  const i64 row = step.logit_indices[place];
  return next_race(step.slots, step.branch[row], step.positions[row], purpose);
}

OUTRIDER_DEVICE u64 uniform_of(const ChoiceStep& step, i64 place, u32 purpose) {
  const i64 row = step.logit_indices[place];
  return next_uniform(step.slots, step.branch[row], step.positions[row], purpose);
}

// The row, of every step, and the share of it that a block of a launch summarises.
struct Part {
  i64 place;
  i64 share;
};

OUTRIDER_DEVICE Part own_part(i64 vocabulary) {
  return {block_index() / shares_of(vocabulary), block_index() % shares_of(vocabulary)};
}

OUTRIDER_DEVICE i64 rows_of_launch(i64 vocabulary) { return block_count() / shares_of(vocabulary); }

// Into the step's `shares`. `drafted` is the drafter's distribution of the row's child where it is weighed, or null.
OUTRIDER_DEVICE void tell_part(const ChoiceStep& step, const Part& part, u32 purpose, const float* drafted,
                               u64* shares) {
  if (!knows(step, part.place)) return;
  const Wanted wanted = wanted_of(sampling_at(step, part.place), step.vocabulary);
  tell_share(step.row(part.place), step.vocabulary, part.share, drafted, wanted, race_of(step, part.place, purpose),
             reinterpret_cast<Share*>(shares) + part.place * shares_of(step.vocabulary) + part.share);
}

OUTRIDER_DEVICE FilteredRow filtered(const ChoiceStep& step, i64 place) {
  if (!knows(step, place)) {
    FilteredRow unknown = {};
    unknown.fault = kIndexFault;
    return unknown;
  }
  return filter_row(step.row(place), step.vocabulary, step.shares_at(place), sampling_at(step, place),
                    reinterpret_cast<Candidate*>(step.candidates) + place * kMostCandidates);
}

// The token that a row chooses, or the number in its place; kNobody of one that fills up the step. Every thread calls
// and gets it.
OUTRIDER_DEVICE i64 choose(const ChoiceStep& step, i64 place, u32 purpose) {
  if (fills_up(step, place)) return kNobody;
  const FilteredRow row = filtered(step, place);
  return row.fault == kNoFault ? draw_token(row, race_of(step, place, purpose)) : in_place_of_token(row.fault);
}

OUTRIDER_DEVICE void commit(const ChoiceStep& step, i64 place, u32 purpose, i64* committed, i64* status) {
  const i64 token = choose(step, place, purpose);
  if (thread_index() != 0) return;
  if (fault_of(token) == kNoFault) {
    committed[place] = token;
  } else {
    *status = fault_of(token);
  }
}

OUTRIDER_KERNEL outrider_sample(const float* logits, const i64* logit_indices, const i64* positions, const i64* branch,
                                const double* sampling, const u64* seed, const i64* stream, i64* committed, u64* shares,
                                u64* candidates, i64* status, u32* arrived, i64 vocabulary, i64 branches, i64 purpose) {
  follow();
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  const Part part = own_part(vocabulary);
  tell_part(step, part, static_cast<u32>(purpose), nullptr, shares);
  if (!last_to_finish(arrived + part.place, shares_of(vocabulary))) return;
  commit(step, part.place, static_cast<u32>(purpose), committed, status);
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

// Thread 0 of one block. `chosen` holds each node's token, or its fault, and `next` the place of the child to continue
// at, or kNobody. Other blocks of this launch wrote them: they are read past this multiprocessor's own
// cache. `fault` is the step's; where it has none, the first one that the walk reaches is reported.
OUTRIDER_DEVICE void walk(const Trees& trees, const volatile i64* chosen, const volatile i64* next, const Outputs& out,
                          i64 new_tokens, i64 most_trees, i64 fault) {
  for (i64 i = 0; i < trees.count; ++i) out.committed[i] = kNobody;
  for (i64 i = 0; i < most_trees; ++i) out.accepted_count[i] = 0;
  i64 tree = 0;
  i64 kept = 0;
  i64 row = 0;    // rows before it are reported
  i64 place = 0;  // the first whose row is not below `row`
  for (i64 root = 0, end; root < trees.count && tree < most_trees; root = end) {
    end = root + 1;
    while (end < trees.count && parent_place(trees, end) >= 0) ++end;
    if (chosen[root] == kNobody) continue;  // it fills up the step
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
    out.accepted_count[tree++] = tokens;
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

// The token that each node of the step would commit, and the place of the child to continue at, or kNobody.
struct Nodes {
  i64* chosen;
  i64* next;
};

OUTRIDER_DEVICE void choose_node(const ChoiceStep& step, const Trees& trees, i64 place, u32 purpose,
                                 const Nodes& nodes) {
  const i64 token = choose(step, place, purpose);
  if (thread_index() != 0) return;
  nodes.chosen[place] = token;
  nodes.next[place] = token < 0 ? kNobody : child_holding(trees, place, end_of_tree(trees, place), token);
}

OUTRIDER_KERNEL outrider_tree_accept(const float* logits, const i64* logit_indices, const i64* positions,
                                     const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                     const i64* token_ids, const i64* parent, i64* committed, i64* accepted_count,
                                     i64* kept_indices, i64* kept_count, u64* shares, u64* candidates, i64* status,
                                     i64* chosen, i64* next, u32* arrived, u32* counter, i64 vocabulary, i64 branches,
                                     i64 most_trees, i64 new_tokens, i64 purpose) {
  follow();
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  const Trees trees = {logit_indices, rows_of_launch(vocabulary), parent, token_ids};
  const Part part = own_part(vocabulary);
  tell_part(step, part, static_cast<u32>(purpose), nullptr, shares);
  if (!last_to_finish(arrived + part.place, shares_of(vocabulary))) return;
  choose_node(step, trees, part.place, static_cast<u32>(purpose), {chosen, next});
  if (!last_to_finish(counter, trees.count)) return;
  const i64 of_step = fault_of_step(chosen, trees.count);
  if (thread_index() == 0) {
    const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
    walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
  }
}

// Drafts by sampling: a distribution for each place, and each branch's acceptance rule.
struct Drafts {
  const float* probabilities;
  const i64* skip_sample_adjustment;
  const i64* by_rejection;
};

// Whether a place's branch weighs the drafted token. By the other rule its child is the one with the target's choice.
OUTRIDER_DEVICE bool weighs(const ChoiceStep& step, const Drafts& drafts, i64 place) {
  return knows(step, place) && drafts.by_rejection[step.branch[step.logit_indices[place]]] != 0;
}

// The drafter's distribution of the child that is weighed at a place, or null.
OUTRIDER_DEVICE const float* weighed_against(const ChoiceStep& step, const Trees& trees, const Drafts& drafts,
                                             i64 place) {
  const i64 child = place + 1;
  const bool has_child = weighs(step, drafts, place) && child < trees.count && parent_place(trees, child) == place;
  return has_child ? drafts.probabilities + child * step.vocabulary : nullptr;
}

// Whether a row's shares hold an invalid probability. Every thread calls and gets it.
OUTRIDER_DEVICE bool astray(const ChoiceStep& step, i64 place) {
  const volatile Share* shares = step.shares_at(place);
  i64 own = 0;
  for (i64 s = thread_index(); s < shares_of(step.vocabulary); s += thread_count()) own |= shares[s].astray != 0 ? 1 : 0;
  return fold(own, Largest()) != 0;
}

// `weighed` gets r and p / q of the child, or NaN.
OUTRIDER_DEVICE void choose_link(const ChoiceStep& step, const Trees& trees, const Drafts& drafts, i64 place,
                                 const Nodes& nodes, double* weighed) {
  if (fills_up(step, place)) {
    if (thread_index() == 0) {
      nodes.chosen[place] = nodes.next[place] = kNobody;
      weighed[2 * place] = weighed[2 * place + 1] = double_of(kNotANumber);
    }
    return;
  }
  const FilteredRow row = filtered(step, place);
  const i64 drafted = place + 1;
  const float* q = weighed_against(step, trees, drafts, place);
  const bool has_child = q != nullptr;
  const i64 proposed = has_child ? trees.token_ids[trees.logit_indices[drafted]] : kNobody;
  i64 fault = row.fault;
  if (has_child && (astray(step, place) || proposed < 0 || proposed >= step.vocabulary)) fault = kIndexFault;
  i64 token = in_place_of_token(fault);
  i64 follows = kNobody;
  double ratio = 0.0;
  const u64 r = fault == kNoFault ? uniform_of(step, place, kForRejection) : 0;
  if (fault == kNoFault && !has_child) {
    token = draw_token(row, race_of(step, place, kForTarget));  // the bonus, or the choice
    if (!weighs(step, drafts, place)) follows = child_holding(trees, place, end_of_tree(trees, place), token);
  } else if (fault == kNoFault) {
    const double scale = probability_scale(row.total());
    const u64 p = target_probability(row.weight_at(proposed), scale);
    const u64 q_own = draft_probability(q[proposed]);
    ratio = p ? static_cast<double>(p) / static_cast<double>(q_own) : 0.0;
    const RaceKey race = race_of(step, place, kForTarget);
    if (accepts(r, p, q_own)) {
      token = proposed;
      follows = drafted;
    } else {
      u64 best = ~u64{0};
      if (drafts.skip_sample_adjustment[step.branch[step.logit_indices[place]]] == 0) {
        row.each([&](i64 id, u64 weight) {
          const u64 rest = residual(target_probability(weight, scale), draft_probability(q[id]));
          const u64 entry = rest != 0 ? finish(race, id, rest) : ~u64{0};
          best = entry < best ? entry : best;
        });
        best = fold(best, Least());
      }
      // Where nothing is left, or nothing is to be adjusted, as if nothing had been drafted.
      token = best != ~u64{0} ? static_cast<i64>(best & 0xffffffffu) : draw_token(row, race);
    }
  }
  if (thread_index() == 0) {
    nodes.chosen[place] = token;
    nodes.next[place] = follows;
    weighed[2 * place] = has_child ? draw_f64(r) : double_of(kNotANumber);
    weighed[2 * place + 1] = has_child ? ratio : double_of(kNotANumber);
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
                                      const i64* branch, const double* sampling, const u64* seed, const i64* stream,
                                      const i64* token_ids, const i64* parent, const float* draft_probs,
                                      const i64* skip_sample_adjustment, const i64* by_rejection, i64* committed,
                                      i64* accepted_count, i64* kept_indices, i64* kept_count, double* trials,
                                      u64* shares, u64* candidates, i64* status, i64* chosen, i64* next,
                                      double* weighed, u32* arrived, u32* counter, i64 vocabulary, i64 branches,
                                      i64 most_trees, i64 new_tokens) {
  follow();
  const SamplingSlots slots = {sampling, seed, stream};
  const ChoiceStep step = {logits, logit_indices, positions, branch, slots, shares, candidates, vocabulary, branches};
  const Trees trees = {logit_indices, rows_of_launch(vocabulary), parent, token_ids};
  const Drafts drafts = {draft_probs, skip_sample_adjustment, by_rejection};
  const Part part = own_part(vocabulary);
  tell_part(step, part, kForTarget, weighed_against(step, trees, drafts, part.place), shares);
  if (!last_to_finish(arrived + part.place, shares_of(vocabulary))) return;
  choose_link(step, trees, drafts, part.place, {chosen, next}, weighed);
  if (!last_to_finish(counter, trees.count)) return;
  const i64 of_step = fault_of_step(chosen, trees.count);
  if (thread_index() == 0) {
    const Outputs out = {committed, accepted_count, kept_indices, kept_count, status};
    walk(trees, chosen, next, out, new_tokens, most_trees, of_step);
    tell_trials(trees, next, weighed, trials);
  }
}

}  // namespace outrider
