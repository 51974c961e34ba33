// The distribution of one row of logits after its filters, for any vocabulary size.
// Allocates only when a row is longer than any before it on this thread.
#pragma once

#include "../choice.h"
#include "../race.h"

namespace outrider {

enum class RowFault { kNone, kNan, kAllMasked };

// Rows are handled in blocks whose largest logit and sum of weights are kept: most passes skip most blocks by them.
constexpr i64 kBlock = 64;

// What the filters leave of a row, in id order; greedy leaves the argmax alone. The memory is this thread's scratch: it
// may be changed, and stands until the next row is filtered.
struct Survivors {
  const i64* ids;  // [size]; nullptr: place i is token i
  u64* weights;    // [size]; in a block whose sum is 0, what was filtered out still stands
  u64* block_sum;  // of the weights, block by block
  i64 size;
  u64 total;  // of all weights, more than 0
};

// Fills `survivors`, unless the row has a fault. `sampling` is valid (see settings_fault).
RowFault filter(const float* logits, i64 vocabulary, const Sampling& sampling, Survivors& survivors);

// Puts the id that a row chooses into `token`, unless the row has a fault: who wins the race among the survivors.
RowFault choose(const float* logits, i64 vocabulary, const Sampling& sampling, const RaceKey& key, i64& token);

// The weight of a token of the vocabulary.
u64 weight_of(const Survivors& survivors, i64 token);

// What is wrong with a slot's settings as the end of a sentence, or nullptr.
const char* settings_fault(const Sampling& sampling);

// Writes the weights of a row before filters. False, and nothing is written, when it holds NaN or only -inf.
bool row_weights(const float* logits, i64 vocabulary, double temperature, u64* weights);

}  // namespace outrider
