// Uniform numbers by counter: a draw is a function of (seed, stream, position, purpose), in any order of calls.
//
// Philox4x32-10 of Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11).
#pragma once

#include "portable.h"

namespace outrider {

struct PhiloxBlock {
  u32 word[4];
};

constexpr u32 kPhilox0 = 0xD2511F53u, kPhilox1 = 0xCD9E8D57u;          // multipliers
constexpr u32 kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // of the key, a round

template <int Rounds>
OUTRIDER_HD inline PhiloxBlock philox4x32(PhiloxBlock counter, u32 key0, u32 key1) {
  for (int round = 0; round < Rounds; ++round) {
    const u64 product0 = u64{kPhilox0} * counter.word[0];
    const u64 product1 = u64{kPhilox1} * counter.word[2];
    counter = {{static_cast<u32>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<u32>(product1),
                static_cast<u32>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<u32>(product0)}};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

// Keeps the kinds of draws apart (plugins.schema.Purpose).
constexpr u32 kForTarget = 0;
constexpr u32 kForDraft = 1;
constexpr u32 kForRejection = 2;

// Four random words of a position.
OUTRIDER_HD inline PhiloxBlock position_block(u64 seed, i64 stream, i64 position, u32 purpose) {
  const u64 stream_bits = static_cast<u64>(stream);
  const PhiloxBlock counter = {{static_cast<u32>(static_cast<u64>(position)), static_cast<u32>(stream_bits),
                                static_cast<u32>(stream_bits >> 32), purpose}};
  return philox4x32<10>(counter, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
}

// The integer u in [0, 2^53) that stands for u / 2^53.
OUTRIDER_HD inline u64 uniform53(u64 seed, i64 stream, i64 position, u32 purpose) {
  const PhiloxBlock block = position_block(seed, stream, position, purpose);
  return (static_cast<u64>(block.word[0] >> 5) << 26) | (block.word[1] >> 6);
}

// The draw as a float64 in [0, 1), exactly.
OUTRIDER_HD inline double draw_f64(u64 draw) { return static_cast<double>(draw) * 0x1p-53; }

}  // namespace outrider
