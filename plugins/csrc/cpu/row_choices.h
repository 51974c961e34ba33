// The choices of a step: what is drawn at a place of `logit_indices`, with the settings and the race of its token's
// branch.
#pragma once

#include "../sample.h"
#include "choose.h"
#include "op.h"

namespace outrider {

class RowChoices {
 public:
  RowChoices(const Binding& bound, i64 purpose);

  // Refuses indices and settings that cannot be used.
  void check(i64 new_tokens, i64 count) const;
  // The token chosen at a place below the checked `count`.
  i64 at(i64 place) const;
  // What it is drawn from. Scratch of this thread, until the next place is asked for.
  Survivors survivors(i64 place) const;
  // The race, and the uniform number, of the token after a place.
  RaceKey race(i64 place, u32 purpose) const;
  u64 uniform(i64 place, u32 purpose) const;

  const i64* logit_indices() const { return logit_indices_; }
  i64 branch(i64 place) const { return branch_[logit_indices_[place]]; }
  bool fills_up(i64 place) const { return branch(place) == kNoBranch; }
  Sampling sampling(i64 place) const { return sampling_of(slots_.sampling, branch(place)); }
  i64 vocabulary() const { return vocabulary_; }
  i64 bytes(i64 count) const { return count * vocabulary_ * static_cast<i64>(sizeof(float)); }

 private:
  void refuse_fault(i64 place, RowFault fault) const;

  const char* op_;
  const float* logits_;
  const i64* logit_indices_;
  const i64* positions_;
  const i64* branch_;
  SamplingSlots slots_;
  u32 purpose_;
  i64 vocabulary_;
  i64 branches_;
};

}  // namespace outrider
