// The choice of one token from one row of logits, for any vocabulary size. Allocates only when a row is longer than any
// before it on this thread.
#pragma once

#include "../choice.h"

namespace outrider {

enum class ChoiceFault { kNone, kNan, kAllMasked };

struct Choice {
  i64 token;
  ChoiceFault fault;
};

// `sampling` is valid (see settings_fault); `uniform53` is ignored when greedy.
Choice choose(const float* logits, i64 vocabulary, const Sampling& sampling, u64 uniform53);

// What is wrong with a slot's settings as the end of a sentence, or nullptr.
const char* settings_fault(const Sampling& sampling);

// Writes the weights of a row before filters. False, and nothing is written, when it holds NaN or only -inf.
bool row_weights(const float* logits, i64 vocabulary, double temperature, u64* weights);

}  // namespace outrider
