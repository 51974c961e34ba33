// Attention over visible keys alone, written once for all instruction sets.
//
// A query's output depends on the query and on the keys and values that it sees, in their order, and on nothing else:
// neither on the queries beside it, nor on where the keys lie, nor on what lies between them. So a token comes out bit
// for bit the same alone, in a prefill chunk, as a node of a tree or in a branch among branches. This follows from:
//   - a score is a sum over the head's dimensions in one fixed order, whichever query and key it belongs to;
//   - scores are kept without gaps, so that all that follows goes by the keys' rank among the visible;
//   - each kChunk ranks are a chunk, which is summed by itself: a weight is exp(score - the chunk's highest), weights
//     are summed in lanes by rank, and an output is summed key by key, from 0;
//   - chunks are summed in ascending order by fused multiply-adds, each times exp(its highest score - the highest of
//     all, a sink's too). A sink's weight is added last, and then an output is divided by the sum of the weights.
// Until then chunks are independent, so that a kernel that splits a query's keys among many workers can give these bits
// too. The instruction set changes nothing either: attention_tile.h.
//
// `Lanes` is a vector of floats of one instruction set: lanes_*.h.
#pragma once

#include <type_traits>

#if defined(_MSC_VER)
#include <intrin.h>
#endif

#include "onnxruntime/kernels.h"
#include "onnxruntime/tanh.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

inline int lowest_bit(std::uint32_t bits) {  // of some
#if defined(_MSC_VER)
  unsigned long at;
  _BitScanForward(&at, bits);
  return static_cast<int>(at);
#else
  return __builtin_ctz(bits);
#endif
}

inline int count_bits(std::uint32_t bits) {  // of the lowest 16; not every processor has an instruction for it
  bits -= bits >> 1 & 0x5555u;
  bits = (bits & 0x3333u) + (bits >> 2 & 0x3333u);
  bits = (bits + (bits >> 4)) & 0x0f0fu;
  return static_cast<int>((bits + (bits >> 8)) & 0x1fu);
}

// The first of the last `window` keys that a token sees; 0 where it sees fewer.
template <class Lanes>
std::int64_t window_start(const float* bias, std::int64_t view, std::int64_t window) {
  std::int64_t key = view;
  while (key % Lanes::kWidth != 0) {
    --key;
    if (bias[key] == 0.0f && --window == 0) return key;
  }
  while (key > 0) {
    key -= Lanes::kWidth;
    std::uint32_t visible = Lanes::zeros(bias + key);
    std::int64_t count = count_bits(visible);
    if (count < window) {
      window -= count;
      continue;
    }
    for (; count > window; --count) visible &= visible - 1;
    return key + lowest_bit(visible);
  }
  return 0;
}

// Says which keys a tile attends over, each token's in ascending order; returns how many pieces it takes.
//
// Keys that all tokens see come in whole vectors. The others are put on lists, one for each token: the ends of chains,
// and the tokens of branches that grow side by side. With a window, keys before a token's first are hidden from it, and
// those before all tokens' first are not looked at again.
template <class Lanes, class Cached>
std::int64_t find_pieces(const Tile<Cached>& tile, Scratch& scratch) {
  std::int64_t count = 0;
  std::int32_t* lists = scratch.lists.room(tile.tokens * tile.most());
  std::int64_t from[kRows], to[kRows];  // of each token's list, the part that no piece has yet
  std::int64_t start[kRows];            // of each token's window
  std::int64_t key = tile.view;
  for (int t = 0; t < tile.tokens; ++t) {
    from[t] = to[t] = t * tile.most();
    start[t] = tile.window == 0 ? 0 : window_start<Lanes>(tile.bias[t], tile.view, tile.window);
    if (start[t] < key) key = start[t];
  }
  key -= key % Lanes::kWidth;
  const auto close_lists = [&] {
    Piece* pieces = scratch.pieces.room(count + tile.tokens);
    for (int t = 0; t < tile.tokens; ++t) {
      if (from[t] == to[t]) continue;
      pieces[count++] = {from[t], to[t] - from[t], t};
      from[t] = to[t];
    }
  };

  std::int64_t shared = 0;  // number of keys before the current one that all tokens see and no piece has
  const auto close_shared = [&](std::int64_t key) {
    if (shared == 0) return;
    close_lists();
    scratch.pieces.room(count + 1)[count] = {key - shared, shared, kEveryone};
    ++count;
    shared = 0;
  };
  const auto list = [&](int t, std::int64_t key, std::uint32_t visible) {
    for (; visible != 0; visible &= visible - 1)
      lists[to[t]++] = static_cast<std::int32_t>(key) + lowest_bit(visible);
  };
  constexpr std::uint32_t kFull = static_cast<std::uint32_t>((std::uint64_t{1} << Lanes::kWidth) - 1);
  for (; key + Lanes::kWidth <= tile.view; key += Lanes::kWidth) {
    std::uint32_t visible[kRows];
    std::uint32_t all = kFull;
    for (int t = 0; t < tile.tokens; ++t) {
      visible[t] = Lanes::zeros(tile.bias[t] + key);
      if (start[t] > key) visible[t] &= start[t] - key < Lanes::kWidth ? kFull << (start[t] - key) : 0;
      all &= visible[t];
    }
    if (all == kFull) {
      shared += Lanes::kWidth;
      continue;
    }
    close_shared(key);
    for (int t = 0; t < tile.tokens; ++t) list(t, key, visible[t]);
  }
  close_shared(key);
  for (; key < tile.view; ++key)
    for (int t = 0; t < tile.tokens; ++t) list(t, key, key >= start[t] && tile.bias[t][key] == 0.0f ? 1 : 0);
  close_lists();
  return count;
}

// A key or value in its slot, as vectors of floats, which `Whole` or `Part` reads.
template <class Lanes, class Cached>
struct Slot {
  const Cached* first;
  Slot() = default;
  Slot(const Cached* slot, int /*head_dim*/) : first(slot) {}
  template <class Access>
  typename Lanes::Vector at(const Access& access, int d) const {
    return access.load(first + d);
  }
};

template <class Lanes>
struct Slot<Lanes, Int8> {
  const Int8* first;
  typename Lanes::Vector scale;
  Slot() = default;
  Slot(const Int8* slot, int head_dim) : first(slot), scale(Lanes::broadcast(scale_of(slot, head_dim))) {}
  template <class Access>
  typename Lanes::Vector at(const Access& access, int d) const {
    return Lanes::mul(access.load(first + d), scale);
  }
};

// Keys or values that follow one another, or that a list names: called with j, they give the j-th one.
template <class Lanes, class Cached>
struct Neighbours {
  const Cached* first;
  int head_dim;
  Slot<Lanes, Cached> operator()(std::int64_t j) const { return {first + j * slot_size<Cached>(head_dim), head_dim}; }
};

template <class Lanes, class Cached>
struct Listed {
  const Cached* all;
  const std::int32_t* list;
  int head_dim;
  Slot<Lanes, Cached> operator()(std::int64_t j) const {
    return {all + list[j] * slot_size<Cached>(head_dim), head_dim};
  }
};

// A vector of a head's dimensions in memory: all its lanes, or the first `count`, the others being zeros.
template <class Lanes>
struct Whole {
  template <class T>
  typename Lanes::Vector load(const T* from) const {
    return Lanes::load(from);
  }
  void store(float* to, typename Lanes::Vector x) const { Lanes::store(to, x); }
};

template <class Lanes>
struct Part {
  int count;
  template <class T>
  typename Lanes::Vector load(const T* from) const {
    T padded[Lanes::kWidth] = {};
    for (int i = 0; i < count; ++i) padded[i] = from[i];
    return Lanes::load(padded);
  }
  void store(float* to, typename Lanes::Vector x) const {
    float padded[Lanes::kWidth];
    Lanes::store(padded, x);
    for (int i = 0; i < count; ++i) to[i] = padded[i];
  }
};

// scores[r][j] = scale * query[r] . keys(j) for j < count.
template <class Lanes, int Rows, class Keys>
void score(const Keys& keys, std::int64_t count, const float* const* query, int head_dim, float scale,
           float* const* scores) {
  if constexpr (Rows > Lanes::kScored) {
    score<Lanes, Lanes::kScored>(keys, count, query, head_dim, scale, scores);
    score<Lanes, Rows - Lanes::kScored>(keys, count, query + Lanes::kScored, head_dim, scale, scores + Lanes::kScored);
    return;
  }
  constexpr int kKeys = 4;
  for (std::int64_t j = 0; j < count; j += kKeys) {
    const int left = count - j < kKeys ? static_cast<int>(count - j) : kKeys;
    decltype(keys(0)) key[kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = keys(j + (i < left ? i : left - 1));
    typename Lanes::Vector sums[Rows][kKeys];
    for (int r = 0; r < Rows; ++r)
      for (int i = 0; i < kKeys; ++i) sums[r][i] = Lanes::zero();
    const auto add = [&](int d, const auto& access) {
      typename Lanes::Vector k[kKeys];
      for (int i = 0; i < kKeys; ++i) k[i] = key[i].at(access, d);
      for (int r = 0; r < Rows; ++r) {
        const auto q = access.load(query[r] + d);
        for (int i = 0; i < kKeys; ++i) sums[r][i] = Lanes::fma(q, k[i], sums[r][i]);
      }
    };
    int d = 0;
    for (; d + Lanes::kWidth <= head_dim; d += Lanes::kWidth) add(d, Whole<Lanes>());
    if (d < head_dim) add(d, Part<Lanes>{head_dim - d});
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

// Calls body(i), i a constant, for i < Count.
template <int Count, class Body>
void times(const Body& body) {
  if constexpr (Count > 1) times<Count - 1>(body);
  body(std::integral_constant<int, Count - 1>());
}

// out[r][d] += sum over from <= j < to of weights[r][j] * values(j)[d], key after key, for `Vectors` vectors of d.
// With constant indices, in a function of its own, GCC keeps the sums and all pointers in registers.
template <class Lanes, int Rows, int Vectors, class Values, class Access>
[[gnu::noinline]] void weigh_slab(const Values& values, std::int64_t from, std::int64_t to, const float* const* weights,
                                  int d, const Access& access, float* const* out) {
  typename Lanes::Vector sums[Rows][Vectors];
  const auto each = [](const auto& body) {
    times<Rows>([&](auto r) { times<Vectors>([&](auto v) { body(r, v); }); });
  };
  each([&](auto r, auto v) { sums[r][v] = access.load(out[r] + d + v * Lanes::kWidth); });
  for (std::int64_t j = from; j < to; ++j) {
    const auto value = values(j);
    typename Lanes::Vector x[Vectors];
    times<Vectors>([&](auto v) { x[v] = value.at(access, d + v * Lanes::kWidth); });
    times<Rows>([&](auto r) {
      const auto weight = Lanes::broadcast(weights[r][j]);
      times<Vectors>([&](auto v) { sums[r][v] = Lanes::fma(weight, x[v], sums[r][v]); });
    });
  }
  each([&](auto r, auto v) { access.store(out[r] + d + v * Lanes::kWidth, sums[r][v]); });
}

template <class Lanes, int Rows, class Values>
void weigh(const Values& values, std::int64_t from, std::int64_t to, const float* const* weights, int head_dim,
           float* const* out) {
  constexpr int kVectors = Lanes::kSlab < 4 / Rows ? 4 / Rows : Lanes::kSlab;  // few rows leave room for more
  constexpr int kSlab = kVectors * Lanes::kWidth;
  int d = 0;
  for (; d + kSlab <= head_dim; d += kSlab)
    weigh_slab<Lanes, Rows, kVectors>(values, from, to, weights, d, Whole<Lanes>(), out);
  for (; d + Lanes::kWidth <= head_dim; d += Lanes::kWidth)
    weigh_slab<Lanes, Rows, 1>(values, from, to, weights, d, Whole<Lanes>(), out);
  if (d < head_dim) weigh_slab<Lanes, Rows, 1>(values, from, to, weights, d, Part<Lanes>{head_dim - d}, out);
}

// out[d] += of_chunk[d] * factor, and of_chunk[d] = 0 for the next chunk.
template <class Lanes>
void fold(float* of_chunk, float factor, int head_dim, float* out) {
  const auto add = [&](int d, const auto& access) {
    access.store(out + d, Lanes::fma(access.load(of_chunk + d), Lanes::broadcast(factor), access.load(out + d)));
    access.store(of_chunk + d, Lanes::zero());
  };
  int d = 0;
  for (; d + Lanes::kWidth <= head_dim; d += Lanes::kWidth) add(d, Whole<Lanes>());
  if (d < head_dim) add(d, Part<Lanes>{head_dim - d});
}

// Scores become at most `cap` in size. The memory is padded to whole vectors.
template <class Lanes>
void cap_scores(float* scores, std::int64_t count, float cap) {
  const std::int64_t padded = (count + Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  for (std::int64_t j = count; j < padded; ++j) scores[j] = 0.0f;
  for (std::int64_t j = 0; j < padded; j += Lanes::kWidth)
    Lanes::store(scores + j, capped<Lanes>(Lanes::load(scores + j), Lanes::broadcast(cap)));
}

// Scores of a chunk become weights exp(score - highest), and `sum` their sum; returns the highest. The memory is padded
// to whole vectors.
template <class Lanes>
float soften_chunk(float* scores, std::int64_t count, float& sum) {
  const std::int64_t padded = (count + Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  for (std::int64_t j = count; j < padded; ++j) scores[j] = kMinusInfinity;
  auto highest = Lanes::load(scores);
  for (std::int64_t j = Lanes::kWidth; j < padded; j += Lanes::kWidth)
    highest = Lanes::max(highest, Lanes::load(scores + j));
  const float most = Lanes::highest(highest);
  const auto top = Lanes::broadcast(most);
  auto weights = Lanes::zero();
  for (std::int64_t j = 0; j < padded; j += Lanes::kWidth) {
    const auto weight = Lanes::exp(Lanes::sub(Lanes::load(scores + j), top));
    Lanes::store(scores + j, weight);
    weights = Lanes::add(weights, weight);
  }
  typename Lanes::Vector four[4] = {weights, weights, weights, weights};
  float total[4];
  Lanes::sum_each(four, 1.0f, total);
  sum = total[0];
  return most;
}

// Scores become weights, chunk by chunk, and factors[c] the factor of chunk c: exp(its highest score - the
// highest of all). Returns the sum of all weights, the sink's with them, which is the score of a key without a value,
// where `sink` is not null. `sums` is scratch, a float for each chunk. Scores and factors are padded to whole vectors.
template <class Lanes>
float soften(float* scores, std::int64_t count, const float* sink, float* factors, float* sums) {
  float most = sink == nullptr ? kMinusInfinity : *sink;
  std::int64_t chunks = 0;
  for (std::int64_t first = 0; first < count; first += kChunk, ++chunks) {
    const std::int64_t left = count - first;
    const float highest = soften_chunk<Lanes>(scores + first, left < kChunk ? left : kChunk, sums[chunks]);
    if (highest > most) most = highest;
    factors[chunks] = highest;
  }
  const auto top = Lanes::broadcast(most);
  for (std::int64_t c = chunks; c % Lanes::kWidth != 0; ++c) factors[c] = kMinusInfinity;
  for (std::int64_t c = 0; c < chunks; c += Lanes::kWidth)
    Lanes::store(factors + c, Lanes::exp(Lanes::sub(Lanes::load(factors + c), top)));
  auto sum = Lanes::zero();
  for (std::int64_t c = 0; c < chunks; ++c)
    sum = Lanes::fma(Lanes::broadcast(sums[c]), Lanes::broadcast(factors[c]), sum);
  if (sink != nullptr) sum = Lanes::add(sum, Lanes::exp(Lanes::sub(Lanes::broadcast(*sink), top)));
  float total[Lanes::kWidth];
  Lanes::store(total, sum);
  return total[0];
}

// Calls body(rows, r) for `count` rows from `first` on, four by four: `rows` of them, a constant, from r on.
template <class Body>
void by_fours(int first, int count, const Body& body) {
  int r = first;
  const int end = first + count;
  for (; r + 4 <= end; r += 4) body(std::integral_constant<int, 4>(), r);
  switch (end - r) {
    case 3: return body(std::integral_constant<int, 3>(), r);
    case 2: return body(std::integral_constant<int, 2>(), r);
    case 1: return body(std::integral_constant<int, 1>(), r);
  }
}

// Calls body(rows, r, vectors, count) for every piece, `vectors` being those of its keys in `kv_cache`, and all rows that
// see it; then moves the rows' cursors by as many. Keys that all see come a block at a time, which then stays in the
// fastest cache.
template <class Lanes, class Cached, class Score, class Body>
void over_pieces(const Tile<Cached>& tile, Scratch& scratch, std::int64_t pieces, const Cached* kv_cache, Score** cursors,
                 const Body& body) {
  constexpr std::int64_t kBlock = 64;
  const int heads = tile.rows / tile.tokens;
  const auto step = [&](int first, int rows, const auto& vectors, std::int64_t count) {
    by_fours(first, rows, [&](auto constant, int r) { body(constant, r, vectors, count); });
    for (int r = first; r < first + rows; ++r) cursors[r] += count;
  };
  const Piece* piece = scratch.pieces.room(pieces);
  for (const Piece* end = piece + pieces; piece != end; ++piece) {
    if (piece->token != kEveryone) {
      const Listed<Lanes, Cached> vectors{kv_cache, scratch.lists.room(0) + piece->first, tile.head_dim};
      step(piece->token * heads, heads, vectors, piece->count);
      continue;
    }
    for (std::int64_t done = 0; done < piece->count; done += kBlock) {
      const Neighbours<Lanes, Cached> vectors{kv_cache + (piece->first + done) * slot_size<Cached>(tile.head_dim),
                                              tile.head_dim};
      step(0, tile.rows, vectors, piece->count - done < kBlock ? piece->count - done : kBlock);
    }
  }
}

template <class Lanes, class Cached>
void attend(const Tile<Cached>& tile, Scratch& scratch) {
  const std::int64_t pieces = find_pieces<Lanes>(tile, scratch);
  const std::int64_t stride = (tile.most() + 2 * Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  float* scores = scratch.scores.room(stride * tile.rows);
  float* end[kRows];
  for (int r = 0; r < tile.rows; ++r) end[r] = scores + r * stride;
  over_pieces<Lanes>(tile, scratch, pieces, tile.keys, end, [&](auto rows, int r, const auto& keys, std::int64_t count) {
    score<Lanes, rows()>(keys, count, tile.query + r, tile.head_dim, tile.scale, end + r);
  });

  const std::int64_t chunks = (tile.most() + kChunk - 1) / kChunk;
  const std::int64_t factor_stride = (chunks + Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  float* factors = scratch.factors.room(factor_stride * tile.rows);
  float* of_chunks = scratch.of_chunks.room(std::int64_t{tile.head_dim} * tile.rows);
  float sums[kRows];
  float* of_chunk[kRows];         // the output of the chunk at hand,
  const float* factor[kRows];     // its factor,
  const float* chunk_end[kRows];  // and the end of its weights
  const float* next[kRows];
  for (int r = 0; r < tile.rows; ++r) {
    float* start = scores + r * stride;
    const std::int64_t count = end[r] - start;
    if (tile.softcap != 0.0f) cap_scores<Lanes>(start, count, tile.softcap);
    const float* sink = tile.sinks == nullptr ? nullptr : tile.sinks + r;
    float* row_factors = factors + r * factor_stride;
    sums[r] = count == 0 ? 1.0f : soften<Lanes>(start, count, sink, row_factors, scratch.sums.room(chunks));
    of_chunk[r] = of_chunks + r * tile.head_dim;
    factor[r] = row_factors;
    chunk_end[r] = count < kChunk ? end[r] : start + kChunk;
    next[r] = start;
    for (int d = 0; d < tile.head_dim; ++d) of_chunk[r][d] = tile.out[r][d] = 0.0f;
  }
  over_pieces<Lanes>(tile, scratch, pieces, tile.values, next, [&](auto rows, int r, const auto& values, std::int64_t count) {
    for (std::int64_t from = 0, to; from < count; from = to) {
      to = count;  // or where a row's chunk ends first: rows may be at different ranks
      for (int i = r; i < r + rows(); ++i)
        if (chunk_end[i] - next[i] < to) to = chunk_end[i] - next[i];
      weigh<Lanes, rows()>(values, from, to, next + r, tile.head_dim, of_chunk + r);
      for (int i = r; i < r + rows(); ++i) {
        if (next[i] + to != chunk_end[i]) continue;
        fold<Lanes>(of_chunk[i], *factor[i]++, tile.head_dim, tile.out[i]);
        chunk_end[i] = end[i] - chunk_end[i] < kChunk ? end[i] : chunk_end[i] + kChunk;
      }
    }
  });
  for (int r = 0; r < tile.rows; ++r)
    for (int d = 0; d < tile.head_dim; ++d) tile.out[r][d] /= sums[r];
}

template <class Lanes>
AttentionKernels attention_of() {
  return {&attend<Lanes, float>, &attend<Lanes, Half>, &attend<Lanes, Int8>};
}

}  // namespace
}  // namespace outrider::engine
