// The winner of an exponential race among the survivors of a row's filters, and the race's parameters.
#pragma once

#include "../race.h"
#include "choose.h"

namespace outrider {

// The id with the least noise over weight; of equals the lowest. Some weight is more than 0.
i64 raced(const Survivors& survivors, const RaceKey& key);

// The same of a row's logits that nothing filters but the least weight: most blocks are never weighed. `block_top` holds
// the order_key of each block's largest logit, `bounds` is scratch for as many.
i64 raced_row(const float* logits, i64 size, const i32* block_top, float top, double temperature, u64 least_weight,
              const RaceKey& key, u64* bounds);

// The noise of every id of a vocabulary.
void all_noise(const RaceKey& key, i64 vocabulary, float* noise);

}  // namespace outrider
