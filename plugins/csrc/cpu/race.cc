#include "race.h"

#include <limits>

#include "clones.h"

namespace outrider {

namespace {

constexpr int kQuads = kBlock / kRacers;
constexpr i32 kNobodyYet = 0x7f800000;  // the bits of infinity

// The words of a block of ids, lane by lane: word w of quad q at [w * kQuads + q]. `race_block` of each quad, side by
// side, so that compilers find the vectors in it. Returns the largest word.
OUTRIDER_CLONES u32 words_of(const RaceKey& key, u32 first_quad, u32* words) {
  u32 a[kQuads], b[kQuads], c[kQuads], d[kQuads];
  for (int q = 0; q < kQuads; ++q) {
    a[q] = first_quad + static_cast<u32>(q);
    b[q] = key.words.word[2];
    c[q] = key.words.word[3];
    d[q] = 0;
  }
  u32 key0 = key.words.word[0], key1 = key.words.word[1];
  for (int round = 0; round < kRaceRounds; ++round) {
    for (int q = 0; q < kQuads; ++q) {
      const u64 product0 = u64{kPhilox0} * a[q], product1 = u64{kPhilox1} * c[q];
      a[q] = static_cast<u32>(product1 >> 32) ^ b[q] ^ key0;
      b[q] = static_cast<u32>(product1);
      c[q] = static_cast<u32>(product0 >> 32) ^ d[q] ^ key1;
      d[q] = static_cast<u32>(product0);
    }
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  u32 largest = 0;
  for (int q = 0; q < kQuads; ++q) {
    words[q] = a[q];
    words[kQuads + q] = b[q];
    words[2 * kQuads + q] = c[q];
    words[3 * kQuads + q] = d[q];
    const u32 ab = a[q] > b[q] ? a[q] : b[q], cd = c[q] > d[q] ? c[q] : d[q];
    largest = ab > largest ? ab : largest;
    largest = cd > largest ? cd : largest;
  }
  return largest;
}

// Whether an id whose word is at most `largest` may have a time below `best`, if its weight is at most `weight`: noise
// is never below (2^32 - word - 1/2) / 2^32 but for rounding.
bool may_win(u32 largest, double weight, i32 best) {
  const double least = (static_cast<double>(~largest) + 0.5) * 0x1p-32;
  return least * (1.0 - 0x1p-18) < static_cast<double>(float_of(best)) * weight;
}

}  // namespace

i64 raced(const Survivors& survivors, const RaceKey& key) {
  i32 best = kNobodyYet;  // bits of the least time: those of positive floats order as the floats do
  i64 winner = 0;
  u32 words[kBlock];
  for (i64 start = 0; start < survivors.size; start += kBlock) {
    const i64 end = start + kBlock < survivors.size ? start + kBlock : survivors.size;
    const u64 sum = survivors.block_sum[start / kBlock];
    if (sum == 0) continue;
    const bool together = survivors.ids == nullptr;
    if (together && !may_win(words_of(key, static_cast<u32>(start / kRacers), words), double_from(sum), best)) continue;
    for (i64 place = start; place < end; ++place) {
      if (survivors.weights[place] == 0) continue;
      const i64 id = together ? place : survivors.ids[place];
      const u32 word = together ? words[(place % kRacers) * kQuads + (place - start) / kRacers]
                                : race_block(key, static_cast<u32>(id / kRacers)).word[id % kRacers];
      const i32 time = bits_of(race_time(word, survivors.weights[place]));
      if (time < best) {
        best = time;
        winner = id;
      }
    }
  }
  return winner;
}

}  // namespace outrider
