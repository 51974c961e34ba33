#include "row_choices.h"

namespace outrider {

RowChoices::RowChoices(const Binding& bound, i64 purpose)
    : op_(bound.op()),
      logits_(bound.input<float>("logits")),
      logit_indices_(bound.input<i64>("logit_indices")),
      positions_(bound.input<i64>("positions")),
      branch_(bound.input<i64>("branch")),
      slots_{bound.input<double>("sampling"), bound.input<u64>("seed"), bound.input<i64>("stream")},
      purpose_(static_cast<u32>(purpose)),
      vocabulary_(bound.size("V")),
      branches_(bound.size("B")) {
  if (vocabulary_ < 1 || vocabulary_ > kMostVocabulary) {
    refuse(op_, "the vocabulary (last size of tensor 'logits') is " + std::to_string(vocabulary_) +
                    "; it must be in 1.." + std::to_string(kMostVocabulary) + ".");
  }
  if (purpose < kForTarget || purpose > kForRejection) {
    refuse(op_, "attribute purpose is " + std::to_string(purpose) +
                   "; it must be 0 (target), 1 (draft) or 2 (rejection), see plugins.schema.Purpose.");
  }
}

void RowChoices::check(i64 new_tokens, i64 count) const {
  for (i64 place = 0; place < count; ++place) {
    const i64 row = logit_indices_[place];
    check_value(op_, "logit_indices", place, row, 0, new_tokens - 1);
    if (fills_up(place)) continue;
    const i64 branch = branch_[row];
    check_value(op_, "branch", row, branch, 0, branches_ - 1);
    if (const char* fault = settings_fault(sampling(place))) {
      refuse(op_, "the sampling settings of branch " + std::to_string(branch) + " cannot be used: " + fault + ".");
    }
  }
}

i64 RowChoices::at(i64 place) const {
  i64 token = 0;
  const float* row = logits_ + place * vocabulary_;
  refuse_fault(place, choose(row, vocabulary_, sampling(place), race(place, purpose_), token));
  return token;
}

Survivors RowChoices::survivors(i64 place) const {
  Survivors left;
  refuse_fault(place, filter(logits_ + place * vocabulary_, vocabulary_, sampling(place), left));
  return left;
}

void RowChoices::refuse_fault(i64 place, RowFault fault) const {
  if (fault == RowFault::kNone) return;
  refuse(op_, "row " + std::to_string(place) + " of logits (new token " + std::to_string(logit_indices_[place]) +
                  ", branch " + std::to_string(branch(place)) + ") " +
                  (fault == RowFault::kNan ? "contains NaN" : "is -inf for every token") + ": no token can be chosen.");
}

RaceKey RowChoices::race(i64 place, u32 purpose) const {
  return next_race(slots_, branch(place), positions_[logit_indices_[place]], purpose);
}

u64 RowChoices::uniform(i64 place, u32 purpose) const {
  return next_uniform(slots_, branch(place), positions_[logit_indices_[place]], purpose);
}

}  // namespace outrider
