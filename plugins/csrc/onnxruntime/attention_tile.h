// A piece of attention that one thread does alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "onnxruntime/kv_slots.h"

namespace outrider::engine {

constexpr int kRows = 24;  // queries of a tile, and tokens that they belong to, at most

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Every instruction set computes in this many lanes, in any number of vectors, and sums them in one order, so that all
// have the same bits. In each quarter of four lanes: (0 + 2) + (1 + 3). Of quarters: (0 + 2) + (1 + 3).
constexpr int kLanes = 16;

// Attention sums the keys that a query sees in chunks of this size, by rank, and then the chunks: attention_kernel.h.
// A multiple of kLanes.
constexpr std::int64_t kChunk = 256;

// exp(x) = 2^n * p(r), n the integer nearest to x * kLog2E, r = x - n * kLn2High - n * kLn2Low: each a fused
// multiply-add, and so is each term of the polynomial p.
constexpr float kExpLowest = -87.0f;  // exp(x) below it is 0: a little above the least normal number
constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr int kExpTerms = 7;
constexpr float kExpTaylor[kExpTerms] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// Keys that a tile attends over: `count` neighbours from key `first` on, which all tokens see, or `count` entries of
// the lists from entry `first` on, which name keys that `token` sees.
struct Piece {
  std::int64_t first;
  std::int64_t count;
  std::int32_t token;
};

constexpr std::int32_t kEveryone = -1;

// Memory of a thread, which only grows, and begins where a cache line does: the widest vectors are read from one.
// Nothing of it is inline: the kernels are built for instruction sets that a machine may lack, and a linker keeps one
// copy of an inline function, whichever it meets first.
template <class T>
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  // Room for `count`; earlier contents stay.
  T* room(std::int64_t count);

 private:
  T* first_ = nullptr;
  std::int64_t count_ = 0;
};

struct Scratch {
  Memory<Piece> pieces;
  Memory<std::int32_t> lists;
  Memory<float> scores;
  Memory<float> factors;    // of each row's chunks
  Memory<float> sums;       // of the weights of one row's chunks
  Memory<float> of_chunks;  // of each row, the output of the chunk at hand
};

// The queries of a few neighbouring tokens and of a few heads that share one key/value head; a token's are neighbours.
// `Cached` is the type of the KV cache.
template <class Cached>
struct Tile {
  int tokens;
  int rows;
  const float* bias[kRows];  // of each token: `view` floats; a key is visible where it is 0
  const float* query[kRows];   // head_dim floats each
  float* out[kRows];           // head_dim floats each
  const Cached* keys;          // [view, slot_size]
  const Cached* values;        // [view, slot_size]
  const float* sinks;          // of each row; null: none
  std::int64_t view;
  std::int64_t window;         // only the last `window` keys that a token sees count; 0: all
  int head_dim;
  float scale, softcap;        // softcap 0: scores are not capped

  // Keys that count for one token, at most.
  std::int64_t most() const { return window == 0 || window > view ? view : window; }
};

}  // namespace outrider::engine
