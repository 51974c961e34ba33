#include "choose.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "clones.h"
#include "race.h"

namespace outrider {

namespace {

constexpr i32 kKeyOfInfinity = 0x7f800000;
constexpr i32 kKeyOfMinusInfinity = ~kKeyOfInfinity;

struct Scratch {
  std::vector<i32> block_top;   // order_key of each block's largest logit
  std::vector<u64> block_sum;   // sum of each block's weights
  std::vector<u64> weights;     // one per token of the row, or per survivor of top-k
  std::vector<i32> keys;        // top-k: what is selected from
  std::vector<i64> ids;         // top-k: survivors, in id order
  std::vector<float> logits;    // top-k: their logits
  std::vector<u64> candidates;  // top-p: weights that may be the cut
};

thread_local Scratch scratch;

template <typename T>
T* grown(std::vector<T>& storage, i64 size) {
  if (storage.size() < static_cast<size_t>(size)) storage.resize(static_cast<size_t>(size));
  return storage.data();
}

i64 blocks_of(i64 size) { return (size + kBlock - 1) / kBlock; }

struct Extremes {
  i32 top;          // order_key of the largest logit
  i32 largest_abs;  // bits of the largest |logit|; above infinity's when there is a NaN
};

OUTRIDER_CLONES Extremes scan(const float* logits, i64 size, i32* block_top) {
  Extremes all = {std::numeric_limits<i32>::min(), 0};
  for (i64 start = 0; start < size; start += kBlock) {
    const i64 end = start + kBlock < size ? start + kBlock : size;
    i32 top = std::numeric_limits<i32>::min();
    i32 largest_abs = all.largest_abs;
    for (i64 i = start; i < end; ++i) {
      const i32 key = order_key(logits[i]);
      const i32 abs = bits_of(logits[i]) & 0x7fffffff;
      top = key > top ? key : top;
      largest_abs = abs > largest_abs ? abs : largest_abs;
    }
    block_top[start / kBlock] = top;
    all.top = top > all.top ? top : all.top;
    all.largest_abs = largest_abs;
  }
  return all;
}

RowFault fault_of(const Extremes& extremes) {
  if (extremes.largest_abs > kKeyOfInfinity) return RowFault::kNan;
  return extremes.top == kKeyOfMinusInfinity ? RowFault::kAllMasked : RowFault::kNone;
}

i64 first_with_key(const float* logits, i64 size, const i32* block_top, i32 key) {
  i64 i = (std::find(block_top, block_top + blocks_of(size), key) - block_top) * kBlock;
  while (order_key(logits[i]) != key) ++i;
  return i;
}

// Top-k, ties kept: writes the survivors to scratch.ids and scratch.logits in id order and returns how many they are.
i64 keep_top_k(const float* logits, i64 size, const i32* block_top, i64 k) {
  const i64 blocks = blocks_of(size);
  i32* keys = grown(scratch.keys, size);
  // k blocks have a logit of at least the k-th largest block maximum, so the cut is no lower than that.
  i32 bound = std::numeric_limits<i32>::min();
  if (k <= blocks) {
    std::copy(block_top, block_top + blocks, keys);
    std::nth_element(keys, keys + (k - 1), keys + blocks, std::greater<>());
    bound = keys[k - 1];
  }
  i64* ids = grown(scratch.ids, size);
  i64 candidates = 0;
  for (i64 block = 0; block < blocks; ++block) {
    if (block_top[block] < bound) continue;
    const i64 end = std::min(size, (block + 1) * kBlock);
    for (i64 i = block * kBlock; i < end; ++i) {
      const i32 key = order_key(logits[i]);
      ids[candidates] = i;
      keys[candidates] = key;
      candidates += key >= bound ? 1 : 0;
    }
  }
  std::nth_element(keys, keys + (k - 1), keys + candidates, std::greater<>());
  const i32 cut = keys[k - 1];
  float* kept_logits = grown(scratch.logits, size);
  i64 kept = 0;
  for (i64 c = 0; c < candidates; ++c) {
    const i64 id = ids[c];
    ids[kept] = id;
    kept_logits[kept] = logits[id];
    kept += order_key(logits[id]) >= cut ? 1 : 0;
  }
  return kept;
}

// Writes each token's weight and each block's sum; returns the sum of all.
OUTRIDER_CLONES u64 weigh(const float* logits, i64 size, const i32* block_top, float top, double temperature,
                          u64* weights, u64* block_sum) {
  u64 total = 0;
  for (i64 start = 0; start < size; start += kBlock) {
    const i64 end = start + kBlock < size ? start + kBlock : size;
    const i64 block = start / kBlock;
    u64 sum = 0;
    if (weighs_nothing(scaled_gap(logit_of(block_top[block]), top, temperature))) {
      for (i64 i = start; i < end; ++i) weights[i] = 0;
    } else {
      for (i64 i = start; i < end; ++i) {
        weights[i] = weight(logits[i], top, temperature);
        sum += weights[i];
      }
    }
    block_sum[block] = sum;
    total += sum;
  }
  return total;
}

// Top-p looks for its cut among buckets of weights: an eighth of an octave each, by exponent and leading mantissa bits.
constexpr int kBucketShift = 52 - 3;
constexpr i64 kFirstBucket = i64{1023} << 3;
constexpr i64 kBuckets = 40 * 8 + 1;  // weights 1 .. 2^40

i64 bucket_of(u64 weight) {
  return static_cast<i64>(bits_of(static_cast<double>(weight)) >> kBucketShift) - kFirstBucket;
}

// The largest weight c such that the weights of at least c add up to `need` or more.
u64 nucleus_cut(const u64* weights, i64 size, const u64* block_sum, u64 total, u64 need) {
  // Weights below `floor` add up to no more than total - need: the cut is not among them.
  const u64 floor = std::max<u64>(1, (total - need) / static_cast<u64>(size));
  u64* candidates = grown(scratch.candidates, size);
  i64 count = 0;
  for (i64 block = 0; block < blocks_of(size); ++block) {
    if (block_sum[block] < floor) continue;
    const i64 end = std::min(size, (block + 1) * kBlock);
    for (i64 i = block * kBlock; i < end; ++i) {
      candidates[count] = weights[i];
      count += weights[i] >= floor ? 1 : 0;
    }
  }

  u64 bucket_sum[kBuckets] = {};
  for (i64 c = 0; c < count; ++c) bucket_sum[bucket_of(candidates[c])] += candidates[c];
  i64 bucket = kBuckets - 1;  // never empty: it holds the largest weight, 2^40
  u64 above = 0;
  while (above + bucket_sum[bucket] < need) above += bucket_sum[bucket--];
  u64* low = candidates;
  u64* high = std::partition(low, low + count, [bucket](u64 weight) { return bucket_of(weight) == bucket; });

  // Halve the bucket until the one is left at which the sum from the largest down reaches `need`.
  while (high - low > 1) {
    u64* middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, std::greater<>());
    u64 sum = above;
    for (const u64* w = low; w < middle; ++w) sum += *w;
    if (sum >= need) {
      high = middle;
    } else {
      above = sum;
      low = middle;
    }
  }
  return *low;
}

// Drops the weights below `cut` and returns the sum of the others.
OUTRIDER_CLONES u64 keep_from(u64 cut, i64 size, u64* weights, u64* block_sum) {
  u64 total = 0;
  for (i64 start = 0; start < size; start += kBlock) {
    const i64 block = start / kBlock;
    u64 sum = 0;
    if (block_sum[block] >= cut) {
      const i64 end = start + kBlock < size ? start + kBlock : size;
      for (i64 i = start; i < end; ++i) {
        weights[i] = weights[i] >= cut ? weights[i] : 0;
        sum += weights[i];
      }
    }
    block_sum[block] = sum;
    total += sum;
  }
  return total;
}

// Temperature last: weighs again, at the temperature, what keep_from left.
OUTRIDER_CLONES u64 reweigh(const float* logits, i64 size, float top, double temperature, u64* weights,
                            u64* block_sum) {
  u64 total = 0;
  for (i64 start = 0; start < size; start += kBlock) {
    const i64 block = start / kBlock;
    u64 sum = 0;
    if (block_sum[block] != 0) {
      const i64 end = start + kBlock < size ? start + kBlock : size;
      for (i64 i = start; i < end; ++i) {
        const u64 again = weight(logits[i], top, temperature);
        weights[i] = weights[i] != 0 ? again : 0;
        sum += weights[i];
      }
    }
    block_sum[block] = sum;
    total += sum;
  }
  return total;
}

// Of a row whose largest logit is `top`.
OUTRIDER_CLONES Spread spread_of(const float* logits, i64 size, float top) {
  Spread spread = {0, 0, 0};
  for (i64 i = 0; i < size; ++i) {
    if (logits[i] != -std::numeric_limits<float>::infinity()) add_distance(spread, logits[i], top);
  }
  return spread;
}

// The least weight that min-p and top-n-sigma leave of a row, at the temperature at which weights are cut.
u64 least_weight(const float* logits, i64 size, float top, const Sampling& sampling, double temperature) {
  const u64 share = least_share(sampling.min_p);
  if (sampling.top_n_sigma == 0.0) return share;
  return std::max(share, sigma_cut(sampling.top_n_sigma, spread_of(logits, size, top), temperature));
}

bool cuts_by_weight(const Sampling& sampling) { return sampling.min_p > 0.0 || sampling.top_n_sigma > 0.0; }

Survivors only(i64 token) {
  constexpr u64 all = static_cast<u64>(kWeightOne);
  i64* ids = grown(scratch.ids, 1);
  u64* weights = grown(scratch.weights, 1);
  u64* block_sum = grown(scratch.block_sum, 1);
  ids[0] = token;
  weights[0] = block_sum[0] = all;
  return {ids, weights, block_sum, 1, all};
}

}  // namespace

RowFault filter(const float* logits, i64 vocabulary, const Sampling& sampling, Survivors& survivors) {
  i64 size = vocabulary;
  i32* block_top = grown(scratch.block_top, blocks_of(size));
  const Extremes extremes = scan(logits, size, block_top);
  if (const RowFault fault = fault_of(extremes); fault != RowFault::kNone) return fault;
  if (sampling.temperature == 0.0) {
    survivors = only(first_with_key(logits, size, block_top, extremes.top));
    return RowFault::kNone;
  }

  const float top = logit_of(extremes.top);
  const bool cuts = sampling.top_p < 1.0 || cuts_by_weight(sampling);
  const bool cut_at_one = cuts && sampling.filter_order == kTemperatureLast;
  const double first_temperature = cut_at_one ? 1.0 : sampling.temperature;
  const u64 least = least_weight(logits, size, top, sampling, first_temperature);
  const i64* ids = nullptr;
  if (sampling.top_k > 0 && sampling.top_k < size) {
    size = keep_top_k(logits, size, block_top, static_cast<i64>(sampling.top_k));
    ids = scratch.ids.data();
    logits = scratch.logits.data();
    scan(logits, size, block_top);
  }

  u64* weights = grown(scratch.weights, size);
  u64* block_sum = grown(scratch.block_sum, blocks_of(size));
  u64 total = weigh(logits, size, block_top, top, first_temperature, weights, block_sum);
  if (cuts) {
    u64 cut = least;
    if (sampling.top_p < 1.0) {
      cut = std::max(cut, nucleus_cut(weights, size, block_sum, total, nucleus_need(sampling.top_p, total)));
    }
    total = keep_from(std::max<u64>(cut, 1), size, weights, block_sum);
    if (cut_at_one) total = reweigh(logits, size, top, sampling.temperature, weights, block_sum);
  }
  survivors = {ids, weights, block_sum, size, total};
  return RowFault::kNone;
}

RowFault choose(const float* logits, i64 vocabulary, const Sampling& sampling, const RaceKey& key, i64& token) {
  const bool limited = sampling.top_k > 0 && sampling.top_k < vocabulary;
  const bool reweighs = cuts_by_weight(sampling) && sampling.filter_order == kTemperatureLast;
  if (sampling.temperature == 0.0 || limited || sampling.top_p < 1.0 || reweighs) {
    Survivors left;
    const RowFault fault = filter(logits, vocabulary, sampling, left);
    if (fault == RowFault::kNone) token = raced(left, key);
    return fault;
  }
  i32* block_top = grown(scratch.block_top, blocks_of(vocabulary));
  const Extremes extremes = scan(logits, vocabulary, block_top);
  if (const RowFault fault = fault_of(extremes); fault != RowFault::kNone) return fault;
  const float top = logit_of(extremes.top);
  const u64 least = least_weight(logits, vocabulary, top, sampling, sampling.temperature);
  token = raced_row(logits, vocabulary, block_top, top, sampling.temperature, least, key,
                    grown(scratch.block_sum, blocks_of(vocabulary)));
  return RowFault::kNone;
}

u64 weight_of(const Survivors& survivors, i64 token) {
  i64 place = token;
  if (survivors.ids) {
    const i64* end = survivors.ids + survivors.size;
    const i64* found = std::lower_bound(survivors.ids, end, token);
    if (found == end || *found != token) return 0;
    place = found - survivors.ids;
  }
  return survivors.block_sum[place / kBlock] == 0 ? 0 : survivors.weights[place];
}

const char* settings_fault(const Sampling& sampling) {
  if (!(sampling.temperature >= 0.0 && std::isfinite(sampling.temperature))) {
    return "temperature must be finite and at least 0 (0 is greedy)";
  }
  if (!(sampling.top_k >= 0.0 && sampling.top_k == std::floor(sampling.top_k))) {
    return "top_k must be a whole number, at least 0 (0 is off)";
  }
  if (!(sampling.top_p >= 0.0 && sampling.top_p <= 1.0)) return "top_p must be in 0..1 (1 is off)";
  if (!(sampling.min_p >= 0.0 && sampling.min_p <= 1.0)) return "min_p must be in 0..1 (0 is off)";
  if (!(sampling.top_n_sigma >= 0.0 && std::isfinite(sampling.top_n_sigma))) {
    return "top_n_sigma must be finite and at least 0 (0 is off)";
  }
  if (sampling.filter_order != kTemperatureFirst && sampling.filter_order != kTemperatureLast) {
    return "filter_order must be 0 (temperature first) or 1 (temperature last)";
  }
  return nullptr;
}

bool row_weights(const float* logits, i64 vocabulary, double temperature, u64* weights) {
  i32* block_top = grown(scratch.block_top, blocks_of(vocabulary));
  const Extremes extremes = scan(logits, vocabulary, block_top);
  if (fault_of(extremes) != RowFault::kNone) return false;
  u64* block_sum = grown(scratch.block_sum, blocks_of(vocabulary));
  weigh(logits, vocabulary, block_top, logit_of(extremes.top), temperature, weights, block_sum);
  return true;
}

}  // namespace outrider
