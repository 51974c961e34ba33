// ChainAccept on the CPU. The target's distribution is worked out at visited nodes only; the drafter's probabilities
// are all looked at before the walk: nothing may be written when one of them cannot be used.
#include "../chain_accept.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "clones.h"
#include "gil.h"
#include "op.h"
#include "race.h"
#include "row_arrays.h"
#include "row_choices.h"
#include "tree_walk.h"

namespace outrider {

namespace nb = nanobind;

namespace {

OUTRIDER_CLONES u32 largest_fault_key(const float* q, i64 size) {
  u32 largest = 0;
  for (i64 i = 0; i < size; ++i) {
    const u32 key = fault_key(q[i]);
    largest = key > largest ? key : largest;
  }
  return largest;
}

// Turns the weights of p into those of max(0, p - q), in place. `total` may become 0: then nothing is left.
OUTRIDER_CLONES void take_away(const float* q, Survivors& p) {
  const double scale = probability_scale(p.total);
  p.total = 0;
  for (i64 start = 0; start < p.size; start += kBlock) {
    u64& block_sum = p.block_sum[start / kBlock];
    if (block_sum == 0) continue;
    const i64 size = p.size - start < kBlock ? p.size - start : kBlock;
    u64* weights = p.weights + start;
    const float* q_of_block = q + start;
    float gathered[kBlock];
    if (p.ids) {
      for (i64 i = 0; i < size; ++i) gathered[i] = q[p.ids[start + i]];
      q_of_block = gathered;
    }
    u64 sum = 0;
    for (i64 i = 0; i < size; ++i) {
      weights[i] = residual(target_probability(weights[i], scale), draft_probability(q_of_block[i]));
      sum += weights[i];
    }
    block_sum = sum;
    p.total += sum;
  }
}

class ChainAccept {
 public:
  static constexpr const char* kOp = "ChainAccept";

  explicit ChainAccept(const Binding& bound)
      : choices_(bound, kForTarget),
        walk_(bound),
        draft_probs_(bound.input<float>("draft_probs")),
        skip_sample_adjustment_(bound.input<i64>("skip_sample_adjustment")),
        by_rejection_(bound.input<i64>("by_rejection")),
        trials_(bound.output<double>("trials")) {}

  void call(i64 new_tokens, i64 count) {
    choices_.check(new_tokens, count);
    const Trees trees = walk_.trees(choices_.logit_indices(), count, new_tokens);
    const GilReleasedIfLong released(2 * choices_.bytes(count));
    for (i64 place = 0; place < count; ++place) {
      if (choices_.fills_up(place)) continue;
      const i64 branch = choices_.branch(place);
      check_value(kOp, "skip_sample_adjustment", branch, skip_sample_adjustment_[branch], 0, 1);
      check_value(kOp, "by_rejection", branch, by_rejection_[branch], 0, 1);
      const i64 parent = parent_place(trees, place);
      if (parent >= 0 && by_rejection_[choices_.branch(parent)] != 0) check_drafted(trees, place, parent);
    }
    std::fill_n(trials_, 2 * count, std::numeric_limits<double>::quiet_NaN());
    walk_.run(trees, new_tokens, [&](i64 node, i64 end) -> Visit {
      if (by_rejection_[choices_.branch(node)] != 0) return weigh(trees, node, end);
      const i64 token = choices_.at(node);
      return {token, child_holding(trees, node, end, token)};
    });
  }

 private:
  void check_drafted(const Trees& chains, i64 place, i64 parent) const {
    const i64 row = chains.logit_indices[place];
    if (parent != place - 1) {
      refuse(kOp, "the parent of new token " + std::to_string(row) + " is new token " +
                      std::to_string(chains.parent[row]) + ", but in a chain it is the row before it in logit_indices, " +
                      std::to_string(chains.logit_indices[place - 1]) + "; TreeAccept takes trees that branch.");
    }
    check_value(kOp, "token_ids", row, chains.token_ids[row], 0, choices_.vocabulary() - 1);
    const float* q = draft_probs(place);
    if (largest_fault_key(q, choices_.vocabulary()) < kLeastFault) return;
    const float* fault = std::find_if_not(q, q + choices_.vocabulary(), can_be_probability);
    refuse(kOp, "draft_probs[" + std::to_string(place) + ", " + std::to_string(fault - q) + "] is " +
                    std::to_string(*fault) + "; a probability is finite and at least 0.");
  }

  // The rule of arXiv 2211.17192: accept the drafted token when r q <= p, else replace it. A chain's next node is its child.
  Visit weigh(const Trees& chains, i64 node, i64 end) const {
    const i64 drafted = node + 1;
    if (drafted == end) return {choices_.at(node), kNothing};  // the bonus
    const i64 token = chains.token_ids[chains.logit_indices[drafted]];
    const float* q = draft_probs(drafted);
    Survivors p = choices_.survivors(node);
    const u64 p_token = target_probability(weight_of(p, token), probability_scale(p.total));
    const u64 r = choices_.uniform(node, kForRejection);
    const u64 q_token = draft_probability(q[token]);
    trials_[2 * drafted] = draw_f64(r);
    trials_[2 * drafted + 1] = p_token ? static_cast<double>(p_token) / static_cast<double>(q_token) : 0.0;
    if (accepts(r, p_token, q_token)) return {token, drafted};
    if (skip_sample_adjustment_[choices_.branch(node)] == 0) {
      take_away(q, p);
      if (p.total != 0) return {raced(p, choices_.race(node, kForTarget)), kNothing};
    }
    return {choices_.at(node), kNothing};
  }

  const float* draft_probs(i64 place) const { return draft_probs_ + place * choices_.vocabulary(); }

  RowChoices choices_;
  TreeWalk walk_;
  const float* draft_probs_;
  const i64* skip_sample_adjustment_;
  const i64* by_rejection_;
  double* trials_;
};

// The rule's parts by themselves, for tests.
void residual_weights(InputRow<u64> weights, InputRow<float> draft_probs, OutputRow<u64> out) {
  const i64 vocabulary = static_cast<i64>(weights.size());
  if (draft_probs.size() != weights.size() || out.size() != weights.size()) {
    refuse("residual", "the rows differ in length.");
  }
  const u64* from = weights.data();
  const float* q = draft_probs.data();
  u64* to = out.data();
  std::vector<u64> block_sum(static_cast<size_t>(vocabulary / kBlock + 1));
  u64 total = 0;
  for (i64 i = 0; i < vocabulary; ++i) {
    to[i] = from[i];
    block_sum[i / kBlock] += from[i];
    total += from[i];
  }
  Survivors p = {nullptr, to, block_sum.data(), vocabulary, total};
  take_away(q, p);
}

void define_rule_parts(nb::module_& module) {
  module.def("residual", &residual_weights, nb::arg("weights").noconvert(), nb::arg("draft_probs").noconvert(),
             nb::arg("out").noconvert());
  module.def("accepts", &accepts, nb::arg("r"), nb::arg("p"), nb::arg("q"));
}

const Registration registered(define_op<ChainAccept>), registered_parts(define_rule_parts);

}  // namespace

}  // namespace outrider
