// One attention op of an engine on the CPU: append the new keys and values, then attend over the visible ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {

struct Shape {
  int heads, kv_heads, head_dim;
  float scale, epsilon;
  float softcap = 0.0f;      // scores become softcap * tanh(score / softcap); 0: they stay
  std::int64_t window = 0;   // only the last `window` keys that a query sees count; 0: all
  bool asks = true;  // whether the queries' results are read
};

// New tokens of all rows lie one after another. Pointers may be null where it says so.
struct Inputs {
  std::int64_t tokens, rows, places, view, capacity;  // N, R, S, T and slots of the KV cache
  const float *query, *key, *value;
  std::int64_t query_stride, key_stride, value_stride;  // elements from token to token
  const float* bias;                                  // [R, 1, S, T]: 0 where a key is visible
  const std::int64_t* past_length;                    // [R]
  const std::int64_t* row_splits;                     // [R + 1]; null: one row has all tokens
  const std::int64_t* positions;                      // [N]; null: nothing is rotated
  const float *cos, *sin;                             // [positions, rotated / 2]
  int rotated;                                        // numbers of a head that are rotated, by halves; the first
  std::int64_t position_limit;
  const float *query_norm, *key_norm;                 // [head_dim] each; null: no norm
  const float* sinks;                                 // [heads]: the score of a key without a value; null: none
};

struct Outputs {
  float* out;                        // [N, heads * head_dim]
  void *key_cache, *value_cache;     // [R, kv_heads, capacity, slot_size], with the earlier tokens' KV
  float* queries;                    // [N, heads * head_dim], normed and rotated; null: not wanted
};

// `run` calls `body(state, i)` for i < count, on `threads` threads, and returns when all are done.
struct Parallel {
  void (*run)(const void* on, void (*body)(void*, std::size_t), std::size_t count, void* state);
  const void* on;
  int threads;
};

// Null, or the fault of the inputs; nothing is written then. `Cached` is the type of the KV cache.
template <class Cached>
const char* branch_attention(const Shape& shape, const Inputs& in, const Outputs& out, const Parallel& parallel);

}  // namespace outrider::engine
