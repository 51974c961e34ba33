#include "race.h"

#include "clones.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define OUTRIDER_AVX2 __attribute__((target("avx2")))
#endif

namespace outrider {

namespace {

constexpr i32 kNobodyYet = 0x7f800000;  // the bits of infinity
constexpr int kQuads = kBlock / kRacers;

// Where the word of the block's id `i` lies: pairs of words of four quads side by side, as AVX2 leaves them.
constexpr i64 place_of(i64 i) {
  const i64 quad = i / kRacers, word = i % kRacers;
  return quad / 4 * 16 + word / 2 * 8 + quad % 4 * 2 + word % 2;
}

// The words of a block of ids. Returns the largest.
u32 words_of(const RaceKey& key, u32 first_quad, u32* words) {
  u32 largest = 0;
  for (int q = 0; q < kQuads; ++q) {
    const PhiloxBlock block = race_block(key, first_quad + static_cast<u32>(q));
    for (int w = 0; w < kRacers; ++w) {
      words[place_of(q * kRacers + w)] = block.word[w];
      largest = block.word[w] > largest ? block.word[w] : largest;
    }
  }
  return largest;
}

#if defined(OUTRIDER_AVX2)
// The same, of four quads at once, because compilers shuffle more than they multiply: 0.06 in place of 0.2 ms for 152k
// ids. A word stands in the lower half of 64 bits, which is what is multiplied; what gathers above is dropped at the end.
OUTRIDER_AVX2 u32 words_by_avx2(const RaceKey& key, u32 first_quad, u32* words) {
  constexpr int kVectors = kQuads / 4;
  __m256i a[kVectors], b[kVectors], c[kVectors], d[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    a[v] = _mm256_add_epi64(_mm256_set1_epi64x(first_quad + 4 * v), _mm256_setr_epi64x(0, 1, 2, 3));
    b[v] = _mm256_set1_epi64x(key.words.word[2]);
    c[v] = _mm256_set1_epi64x(key.words.word[3]);
    d[v] = _mm256_setzero_si256();
  }
  const __m256i multiplier0 = _mm256_set1_epi64x(kPhilox0), multiplier1 = _mm256_set1_epi64x(kPhilox1);
  u32 key0 = key.words.word[0], key1 = key.words.word[1];
  for (int round = 0; round < kRaceRounds; ++round) {
    const __m256i keys0 = _mm256_set1_epi64x(key0), keys1 = _mm256_set1_epi64x(key1);
    for (int v = 0; v < kVectors; ++v) {
      const __m256i product0 = _mm256_mul_epu32(a[v], multiplier0), product1 = _mm256_mul_epu32(c[v], multiplier1);
      a[v] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), b[v]), keys0);
      b[v] = product1;
      c[v] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), d[v]), keys1);
      d[v] = product0;
    }
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  __m256i largest = _mm256_setzero_si256();
  for (int v = 0; v < kVectors; ++v) {
    const __m256i first = _mm256_blend_epi32(a[v], _mm256_slli_epi64(b[v], 32), 0xaa);
    const __m256i second = _mm256_blend_epi32(c[v], _mm256_slli_epi64(d[v], 32), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * v), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 16 * v + 8), second);
    largest = _mm256_max_epu32(largest, _mm256_max_epu32(first, second));
  }
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  return static_cast<u32>(_mm_cvtsi128_si32(_mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1))));
}
#endif

using Words = u32 (*)(const RaceKey&, u32, u32*);

Words words_here() {
#if defined(OUTRIDER_AVX2)
  if (__builtin_cpu_supports("avx2")) return &words_by_avx2;
#endif
  return &words_of;
}

// Whether an id whose word is at most `largest` may have a time below `best`, if its weight is at most `weight`: noise
// is never below (2^32 - word - 1/2) / 2^32 but for rounding.
bool may_win(u32 largest, double weight, i32 best) {
  const double least = (static_cast<double>(~largest) + 0.5) * 0x1p-32;
  return least * (1.0 - 0x1p-18) <= static_cast<double>(float_of(best)) * weight;
}

const Words words_of_block = words_here();

OUTRIDER_CLONES void exponentials(const u32* words, float* noise) {
  for (int i = 0; i < kBlock; ++i) noise[i] = exponential(words[i]);
}

}  // namespace

void all_noise(const RaceKey& key, i64 vocabulary, float* noise) {
  u32 words[kBlock];
  float of_block[kBlock];
  for (i64 start = 0; start < vocabulary; start += kBlock) {
    words_of_block(key, static_cast<u32>(start / kRacers), words);
    exponentials(words, of_block);
    const i64 size = vocabulary - start < kBlock ? vocabulary - start : kBlock;
    for (i64 i = 0; i < size; ++i) noise[start + i] = of_block[place_of(i)];
  }
}

namespace {

OUTRIDER_CLONES void weigh_tops(const i32* block_top, i64 blocks, float top, double temperature, u64* bounds) {
  for (i64 i = 0; i < blocks; ++i) bounds[i] = weight(logit_of(block_top[i]), top, temperature);
}

}  // namespace

i64 raced_row(const float* logits, i64 size, const i32* block_top, float top, double temperature, u64 least_weight,
              const RaceKey& key, u64* bounds) {
  const i64 blocks = (size + kBlock - 1) / kBlock;
  weigh_tops(block_top, blocks, top, temperature, bounds);
  i64 winner = 0;
  i32 best = kNobodyYet;
  u32 words[kBlock];
  const auto race_block_at = [&](i64 block) {
    if (bounds[block] == 0 || bounds[block] < least_weight) return;
    const i64 start = block * kBlock;
    const i64 end = start + kBlock < size ? start + kBlock : size;
    const u32 largest = words_of_block(key, static_cast<u32>(start / kRacers), words);
    if (!may_win(largest, double_from(bounds[block]), best)) return;
    for (i64 id = start; id < end; ++id) {
      const u32 word = words[place_of(id - start)];
      if (!may_win(word, double_from(bounds[block]), best)) continue;
      const u64 own = weight(logits[id], top, temperature);
      if (own == 0 || own < least_weight) continue;
      const i32 time = bits_of(race_time(word, own));
      if (time < best || (time == best && id < winner)) {
        best = time;
        winner = id;
      }
    }
  };
  // The block of the likeliest token first: a fast time there leaves little to look at.
  i64 first = 0;
  while (bounds[first] != static_cast<u64>(kWeightOne)) ++first;
  race_block_at(first);
  for (i64 block = 0; block < blocks; ++block)
    if (block != first) race_block_at(block);
  return winner;
}

i64 raced(const Survivors& survivors, const RaceKey& key) {
  i32 best = kNobodyYet;  // bits of the least time: those of positive floats order as the floats do
  i64 winner = 0;
  u32 words[kBlock];
  for (i64 start = 0; start < survivors.size; start += kBlock) {
    const i64 end = start + kBlock < survivors.size ? start + kBlock : survivors.size;
    const u64 sum = survivors.block_sum[start / kBlock];
    if (sum == 0) continue;
    const bool together = survivors.ids == nullptr;
    if (together) {
      const u32 largest = words_of_block(key, static_cast<u32>(start / kRacers), words);
      if (!may_win(largest, double_from(sum), best)) continue;
    }
    for (i64 place = start; place < end; ++place) {
      if (survivors.weights[place] == 0) continue;
      const i64 id = together ? place : survivors.ids[place];
      const u32 word = together ? words[place_of(place - start)]
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
