#include "onnxruntime/branch_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "onnxruntime/slot_numbers.h"
#include "onnxruntime/kernels.h"

namespace outrider::engine {
namespace {

constexpr int kMaxHead = 1024;

// Multiply-adds below which waking other threads costs more than they bring.
constexpr double kAlone = 100e3;

struct TokenTile {
  std::int64_t row, first;
  int tokens;
};

// Memory of the calling thread, which only grows.
struct Workspace {
  std::vector<TokenTile> tiles;
  Memory<float> query;
};

struct Job {
  const Shape& shape;
  const Inputs& in;
  const Outputs& to;
  const AttentionKernels& kernels;
  const Workspace& space;
  std::atomic<bool>& failed;  // for want of memory: nothing may be thrown past other threads' work
  float* query;  // [N, heads, head_dim]: ready queries
  std::int64_t head_parts;

  std::int64_t row_start(std::int64_t row) const { return in.row_splits == nullptr ? 0 : in.row_splits[row]; }
};

// Tokens of a tile, at most: all that have room, as every tile reads all keys, but every thread should have one.
std::int64_t tokens_per_tile(const Shape& shape, std::int64_t tokens, int threads) {
  const std::int64_t room = std::max(1, kRows / (shape.heads / shape.kv_heads));
  return std::clamp<std::int64_t>((tokens * shape.kv_heads + threads - 1) / threads, 1, room);
}

// One head of one token: normed, and its first numbers rotated by its position, as floats.
void prepare(const Shape& shape, const Inputs& in, const float* from, const float* norm, std::int64_t token,
             float* __restrict to) {
  const int size = shape.head_dim, half = in.rotated / 2;
  float head[kMaxHead];
  std::copy_n(from, size, head);
  if (norm != nullptr) {
    float partial[8] = {};
    int d = 0;
    for (; d + 8 <= size; d += 8)
      for (int i = 0; i < 8; ++i) partial[i] += head[d + i] * head[d + i];
    for (; d < size; ++d) partial[d % 8] += head[d] * head[d];
    float sum = 0.0f;
    for (const float part : partial) sum += part;
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + shape.epsilon);
    for (d = 0; d < size; ++d) head[d] = head[d] * factor * norm[d];
  }
  if (in.positions == nullptr) {
    std::copy_n(head, size, to);
    return;
  }
  const float* cos = in.cos + in.positions[token] * half;
  const float* sin = in.sin + in.positions[token] * half;
  for (int d = 0; d < half; ++d) {
    to[d] = head[d] * cos[d] - head[d + half] * sin[d];
    to[d + half] = head[d + half] * cos[d] + head[d] * sin[d];
  }
  std::copy(head + 2 * half, head + size, to + 2 * half);
}

// The new tokens of a tile: queries made ready, keys and values appended.
template <class Cached>
void append(void* state, std::size_t index) noexcept {
  const auto& job = *static_cast<const Job*>(state);
  const Shape& shape = job.shape;
  const Inputs& in = job.in;
  const TokenTile& tile = job.space.tiles[index];
  const int size = shape.head_dim;
  float head[kMaxHead];
  for (std::int64_t token = tile.first; token < tile.first + tile.tokens; ++token) {
    const float* query = in.query + token * in.query_stride;
    const float* key = in.key + token * in.key_stride;
    const float* value = in.value + token * in.value_stride;
    for (int h = 0; shape.asks && h < shape.heads; ++h)
      prepare(shape, in, query + h * size, in.query_norm, token, job.query + (token * shape.heads + h) * size);
    const std::int64_t slot = in.past_length[tile.row] + token - job.row_start(tile.row);
    for (int h = 0; h < shape.kv_heads; ++h) {
      const std::int64_t at = ((tile.row * shape.kv_heads + h) * in.capacity + slot) * slot_size<Cached>(size);
      prepare(shape, in, key + h * size, in.key_norm, token, head);
      keep(head, size, static_cast<Cached*>(job.to.key_cache) + at);
      keep(value + h * size, size, static_cast<Cached*>(job.to.value_cache) + at);
    }
  }
}

template <class Cached>
void run(const AttentionKernels& kernels, const Tile<Cached>& tile, Scratch& scratch) {
  if constexpr (std::is_same_v<Cached, float>)
    kernels.float32(tile, scratch);
  else if constexpr (std::is_same_v<Cached, Half>)
    kernels.float16(tile, scratch);
  else
    kernels.int8(tile, scratch);
}

// One key/value head, some of the query heads that share it, and the tokens of one tile.
template <class Cached>
void attend(void* state, std::size_t index) noexcept {
  thread_local Scratch scratch;
  const auto& job = *static_cast<const Job*>(state);
  const Shape& shape = job.shape;
  const Inputs& in = job.in;
  const std::size_t tiles = job.space.tiles.size();
  const TokenTile& of = job.space.tiles[index % tiles];
  const std::int64_t kv_head = static_cast<std::int64_t>(index / tiles) / job.head_parts;
  const int group = shape.heads / shape.kv_heads;
  const int first = static_cast<int>(static_cast<std::int64_t>(index / tiles) % job.head_parts) * kRows;
  const int heads = std::min(group - first, kRows);

  Tile<Cached> tile;
  float sinks[kRows];
  tile.sinks = in.sinks == nullptr ? nullptr : sinks;
  tile.tokens = of.tokens;
  tile.rows = of.tokens * heads;
  for (int t = 0, r = 0; t < of.tokens; ++t) {
    const std::int64_t token = of.first + t, place = token - job.row_start(of.row);
    tile.bias[t] = in.bias + (of.row * in.places + place) * in.view;
    for (int h = 0; h < heads; ++h, ++r) {
      const std::int64_t at = (token * shape.heads + kv_head * group + first + h) * shape.head_dim;
      tile.query[r] = job.query + at;
      tile.out[r] = job.to.out + at;
      if (in.sinks != nullptr) sinks[r] = in.sinks[kv_head * group + first + h];
    }
  }
  const std::int64_t cache = (of.row * shape.kv_heads + kv_head) * in.capacity * slot_size<Cached>(shape.head_dim);
  tile.keys = static_cast<const Cached*>(job.to.key_cache) + cache;
  tile.values = static_cast<const Cached*>(job.to.value_cache) + cache;
  tile.view = in.view;
  tile.head_dim = shape.head_dim;
  tile.scale = shape.scale;
  tile.softcap = shape.softcap;
  tile.window = shape.window < in.view ? shape.window : 0;  // a wider one hides nothing
  try {
    run<Cached>(job.kernels, tile, scratch);
  } catch (...) {
    job.failed = true;
  }
}

const char* refusal(const Shape& shape, const Inputs& in) {
  if (in.row_splits == nullptr && in.rows != 1) return "several rows need row_splits";
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const std::int64_t first = in.row_splits == nullptr ? 0 : in.row_splits[row];
    const std::int64_t end = in.row_splits == nullptr ? in.tokens : in.row_splits[row + 1];
    const std::int64_t past = in.past_length[row], new_tokens = end - first;
    if (first < 0 || new_tokens < 0 || end > in.tokens) return "row_splits do not ascend within the new tokens";
    if (new_tokens > in.places) return "a row has more new tokens than attn_bias has places";
    if (past < 0 || past > in.capacity || new_tokens > in.capacity - past)
      return "past_length and the new tokens exceed the KV cache";
  }
  if (in.row_splits != nullptr && (in.row_splits[0] != 0 || in.row_splits[in.rows] != in.tokens))
    return "row_splits do not cover the new tokens";
  if (in.view > in.capacity) return "attn_bias is wider than the KV cache";
  if (in.positions != nullptr)
    for (std::int64_t n = 0; n < in.tokens; ++n)
      if (in.positions[n] < 0 || in.positions[n] >= in.position_limit) return "a position has no rotation";
  if (shape.head_dim > kMaxHead) return "heads are larger than 1024";
  return nullptr;
}

}  // namespace

template <class Cached>
const char* branch_attention(const Shape& shape, const Inputs& in, const Outputs& to, const Parallel& parallel) {
  if (const char* reason = refusal(shape, in)) return reason;
  thread_local Workspace space;
  const int group = shape.heads / shape.kv_heads;
  const std::int64_t size = in.tokens * shape.heads * shape.head_dim;
  float* queries = to.queries == nullptr ? space.query.room(size) : to.queries;
  std::atomic<bool> failed = false;
  Job job{shape, in, to, kernels().attention, space, failed, queries, (group + kRows - 1) / kRows};

  space.tiles.clear();
  const std::int64_t most = tokens_per_tile(shape, in.tokens, parallel.threads);
  for (std::int64_t row = 0; row < in.rows; ++row) {
    std::int64_t first = job.row_start(row);
    const std::int64_t end = in.row_splits == nullptr ? in.tokens : in.row_splits[row + 1];
    for (std::int64_t left = (end - first + most - 1) / most; left > 0; --left) {  // all of about one size
      const std::int64_t tokens = (end - first + left - 1) / left;
      space.tiles.push_back({row, first, static_cast<int>(tokens)});
      first += tokens;
    }
  }

  const auto each = [&](void (*body)(void*, std::size_t) noexcept, std::size_t count, double work) {
    if (count > 1 && work > kAlone) return parallel.run(parallel.on, body, count, &job);
    for (std::size_t i = 0; i < count; ++i) body(&job, i);
  };
  const double per_token = static_cast<double>(shape.heads) * shape.head_dim;
  each(&append<Cached>, space.tiles.size(), 8.0 * per_token * static_cast<double>(in.tokens));
  if (!shape.asks) {
    std::fill_n(to.out, size, 0.0f);
    return nullptr;
  }
  each(&attend<Cached>, space.tiles.size() * shape.kv_heads * job.head_parts,
       2.0 * per_token * static_cast<double>(in.tokens) *
           static_cast<double>(shape.window == 0 ? in.view : std::min(in.view, shape.window)));
  if (failed) throw std::bad_alloc();
  return nullptr;
}

template const char* branch_attention<float>(const Shape&, const Inputs&, const Outputs&, const Parallel&);
template const char* branch_attention<Half>(const Shape&, const Inputs&, const Outputs&, const Parallel&);
template const char* branch_attention<Int8>(const Shape&, const Inputs&, const Outputs&, const Parallel&);

}  // namespace outrider::engine
