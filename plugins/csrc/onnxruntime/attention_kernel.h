// Attention over visible keys alone, written once for all instruction sets.
//
// A query's output depends on the query and on the keys and values that it sees, in their order, and on nothing else:
// neither on the queries beside it, nor on where the keys lie, nor on what lies between them. So a token comes out bit
// for bit the same alone, in a prefill chunk, as a node of a tree or in a branch among branches. What makes it so:
//   - a score is a sum over the head's dimensions in one fixed order, whichever query and key it belongs to;
//   - scores are kept without gaps, so that the sum of their weights goes by their rank among the visible;
//   - an output is summed key by key.
//
// `Lanes` is a vector of floats of one instruction set: lanes_*.h.
#pragma once

#include <type_traits>

#include "onnxruntime/kernels.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// Writes the stretches of keys that at least one token sees, ascending; returns their number, at most the view's keys.
template <class Lanes, class Cached>
std::int64_t find_stretches(const Tile<Cached>& tile, Stretch* stretches) {
  std::int64_t count = 0;
  const std::uint32_t everyone = (1u << tile.tokens) - 1;
  std::uint32_t seen = 0;
  std::int64_t first = 0;
  const auto turn = [&](std::int64_t key, std::uint32_t now) {
    if (now == seen) return;
    if (seen != 0) stretches[count++] = {first, key - first, seen};
    seen = now;
    first = key;
  };
  constexpr std::uint32_t kFull = Lanes::kWidth == 32 ? ~0u : (1u << Lanes::kWidth) - 1;
  std::int64_t key = 0;
  for (; key + Lanes::kWidth <= tile.view; key += Lanes::kWidth) {
    std::uint32_t visible[kRows];
    std::uint32_t any = 0, all = kFull;
    for (int t = 0; t < tile.tokens; ++t) {
      visible[t] = Lanes::zeros(tile.bias[t] + key);
      any |= visible[t];
      all &= visible[t];
    }
    if (all == kFull || any == 0) {
      turn(key, any == 0 ? 0 : everyone);
      continue;
    }
    for (int lane = 0; lane < Lanes::kWidth; ++lane) {
      std::uint32_t now = 0;
      for (int t = 0; t < tile.tokens; ++t) now |= (visible[t] >> lane & 1u) << t;
      turn(key + lane, now);
    }
  }
  for (; key < tile.view; ++key) {
    std::uint32_t now = 0;
    for (int t = 0; t < tile.tokens; ++t) now |= static_cast<std::uint32_t>(tile.bias[t][key] == 0.0f) << t;
    turn(key, now);
  }
  turn(tile.view, 0);
  return count;
}

// scores[r][j] = scale * query[r] . keys[j] for j < count.
template <class Lanes, int Rows, class Cached>
void score(const Cached* keys, std::int64_t count, const float* const* query, int head_dim, float scale,
           float* const* scores) {
  if constexpr (Rows > Lanes::kScored) {
    score<Lanes, Lanes::kScored>(keys, count, query, head_dim, scale, scores);
    score<Lanes, Rows - Lanes::kScored>(keys, count, query + Lanes::kScored, head_dim, scale, scores + Lanes::kScored);
    return;
  }
  constexpr int kKeys = 4;
  for (std::int64_t j = 0; j < count; j += kKeys) {
    const int left = count - j < kKeys ? static_cast<int>(count - j) : kKeys;
    const Cached* key[kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = keys + (j + (i < left ? i : left - 1)) * head_dim;
    typename Lanes::Vector sums[Rows][kKeys];
    for (int r = 0; r < Rows; ++r)
      for (int i = 0; i < kKeys; ++i) sums[r][i] = Lanes::zero();
    for (int d = 0; d < head_dim; d += Lanes::kWidth) {
      typename Lanes::Vector k[kKeys];
      for (int i = 0; i < kKeys; ++i) k[i] = Lanes::load(key[i] + d);
      for (int r = 0; r < Rows; ++r) {
        const auto q = Lanes::load(query[r] + d);
        for (int i = 0; i < kKeys; ++i) sums[r][i] = Lanes::fma(q, k[i], sums[r][i]);
      }
    }
    if (left == kKeys) {
      Lanes::sum_block(sums, scale, scores, j);
      continue;
    }
    for (int r = 0; r < Rows; ++r) {
      float four[kKeys];
      Lanes::sum_each(sums[r], scale, four);
      for (int i = 0; i < left; ++i) scores[r][j + i] = four[i];
    }
  }
}

// out[r][d] += sum over j of weights[r][j] * values[j][d], key after key.
template <class Lanes, int Rows, int Vectors, class Cached>
void weigh_slab(const Cached* values, std::int64_t count, const float* const* weights, int head_dim, int d,
                float* const* out) {
  typename Lanes::Vector sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Lanes::load(out[r] + d + v * Lanes::kWidth);
  for (std::int64_t j = 0; j < count; ++j) {
    const Cached* value = values + j * head_dim + d;
    typename Lanes::Vector x[Vectors];
    for (int v = 0; v < Vectors; ++v) x[v] = Lanes::load(value + v * Lanes::kWidth);
    for (int r = 0; r < Rows; ++r) {
      const auto weight = Lanes::broadcast(weights[r][j]);
      for (int v = 0; v < Vectors; ++v) sums[r][v] = Lanes::fma(weight, x[v], sums[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) Lanes::store(out[r] + d + v * Lanes::kWidth, sums[r][v]);
}

template <class Lanes, int Rows, class Cached>
void weigh(const Cached* values, std::int64_t count, const float* const* weights, int head_dim, float* const* out) {
  constexpr int kSlab = Lanes::kSlab * Lanes::kWidth;
  int d = 0;
  for (; d + kSlab <= head_dim; d += kSlab)
    weigh_slab<Lanes, Rows, Lanes::kSlab>(values, count, weights, head_dim, d, out);
  for (; d < head_dim; d += Lanes::kWidth) weigh_slab<Lanes, Rows, 1>(values, count, weights, head_dim, d, out);
}

// Scores become weights exp(score - highest); returns their sum. The memory is padded to whole vectors.
template <class Lanes>
float soften(float* scores, std::int64_t count) {
  const std::int64_t padded = (count + Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  for (std::int64_t j = count; j < padded; ++j) scores[j] = kMinusInfinity;
  auto highest = Lanes::load(scores);
  for (std::int64_t j = Lanes::kWidth; j < padded; j += Lanes::kWidth)
    highest = Lanes::max(highest, Lanes::load(scores + j));
  const auto top = Lanes::broadcast(Lanes::highest(highest));
  auto sum = Lanes::zero();
  for (std::int64_t j = 0; j < padded; j += Lanes::kWidth) {
    const auto weight = Lanes::exp(Lanes::sub(Lanes::load(scores + j), top));
    Lanes::store(scores + j, weight);
    sum = Lanes::add(sum, weight);
  }
  typename Lanes::Vector sums[4] = {sum, sum, sum, sum};
  float total[4];
  Lanes::sum_each(sums, 1.0f, total);
  return total[0];
}

// Calls body(rows, first) for all of a tile's rows, four by four, `rows` as a constant.
template <class Body>
void by_fours(int rows, const Body& body) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) body(std::integral_constant<int, 4>(), r);
  switch (rows - r) {
    case 3: return body(std::integral_constant<int, 3>(), r);
    case 2: return body(std::integral_constant<int, 2>(), r);
    case 1: return body(std::integral_constant<int, 1>(), r);
  }
}

// Rows that all see a stretch take it four by four, and a block of keys at a time, which then stays in the fastest
// cache; other rows take it one by one.
template <class Lanes, class Cached>
void attend(const Tile<Cached>& tile, Scratch& scratch) {
  constexpr std::int64_t kBlock = 64;
  Stretch* stretches = scratch.stretches(tile.view);
  const std::int64_t stretch_count = find_stretches<Lanes>(tile, stretches);
  const std::uint32_t everyone = (1u << tile.tokens) - 1;
  const std::int64_t stride = (tile.view + 2 * Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  float* scores = scratch.scores(stride * tile.rows);
  float* end[kRows];
  for (int r = 0; r < tile.rows; ++r) end[r] = scores + r * stride;

  for (const Stretch* stretch = stretches; stretch != stretches + stretch_count; ++stretch) {
    const Cached* keys = tile.keys + stretch->first * tile.head_dim;
    if (stretch->seen == everyone) {
      for (std::int64_t first = 0; first < stretch->count; first += kBlock) {
        const std::int64_t count = stretch->count - first < kBlock ? stretch->count - first : kBlock;
        by_fours(tile.rows, [&](auto rows, int r) {
          score<Lanes, rows()>(keys + first * tile.head_dim, count, tile.query + r, tile.head_dim, tile.scale, end + r);
        });
        for (int r = 0; r < tile.rows; ++r) end[r] += count;
      }
      continue;
    }
    for (int r = 0; r < tile.rows; ++r) {
      if ((stretch->seen >> tile.token_of_row[r] & 1u) == 0) continue;
      score<Lanes, 1>(keys, stretch->count, tile.query + r, tile.head_dim, tile.scale, end + r);
      end[r] += stretch->count;
    }
  }

  float sums[kRows];
  const float* next[kRows];
  for (int r = 0; r < tile.rows; ++r) {
    float* start = scores + r * stride;
    sums[r] = end[r] == start ? 1.0f : soften<Lanes>(start, end[r] - start);
    next[r] = start;
    for (int d = 0; d < tile.head_dim; ++d) tile.out[r][d] = 0.0f;
  }

  for (const Stretch* stretch = stretches; stretch != stretches + stretch_count; ++stretch) {
    const Cached* values = tile.values + stretch->first * tile.head_dim;
    if (stretch->seen == everyone) {
      for (std::int64_t first = 0; first < stretch->count; first += kBlock) {
        const std::int64_t count = stretch->count - first < kBlock ? stretch->count - first : kBlock;
        by_fours(tile.rows, [&](auto rows, int r) {
          weigh<Lanes, rows()>(values + first * tile.head_dim, count, next + r, tile.head_dim, tile.out + r);
        });
        for (int r = 0; r < tile.rows; ++r) next[r] += count;
      }
      continue;
    }
    for (int r = 0; r < tile.rows; ++r) {
      if ((stretch->seen >> tile.token_of_row[r] & 1u) == 0) continue;
      weigh<Lanes, 1>(values, stretch->count, next + r, tile.head_dim, tile.out + r);
      next[r] += stretch->count;
    }
  }
  for (int r = 0; r < tile.rows; ++r)
    for (int d = 0; d < tile.head_dim; ++d) tile.out[r][d] /= sums[r];
}

template <class Lanes>
AttentionKernels attention_of() {
  return {&attend<Lanes, float>, &attend<Lanes, Half>, &attend<Lanes, BFloat16>};
}

}  // namespace
}  // namespace outrider::engine
