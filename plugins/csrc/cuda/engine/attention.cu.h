// Attention over visible keys alone, its work split over keys: what the CPU's kernel gives, to the bit
// (onnxruntime/attention_kernel.h).
//
// A query's output depends on the keys and values that it sees, in their order, and on nothing else. So each token gets a
// list of the slots that it sees; its keys are dealt out to blocks by their rank in that list, never by their slot.
#pragma once

#include "../fold.h"
#include "../../rows.h"
#include "form.h"

namespace outrider {

constexpr int kChunk = 256;  // keys whose weights and values are summed by themselves; a thread scores one

// A block lists the slots that one token sees, ascending: lists[token, view], counts[token].
OUTRIDER_KERNEL outrider_visible(const float* bias, const i64* row_splits, i32* lists, i32* counts, i64 rows, i64 places,
                                 i64 view) {
  const i64 token = block_index();
  const i64 row = row_of(row_splits, rows, token);
  const float* line = bias + (row * places + token - row_splits[row]) * view;
  const Stretch own = own_stretch(view);
  u64 seen = 0;
  for (i64 t = own.begin; t < own.end; ++t) seen += line[t] == 0.0f;
  i64 rank = static_cast<i64>(sum_before(seen));
  for (i64 t = own.begin; t < own.end; ++t) {
    if (line[t] == 0.0f) lists[token * view + rank++] = static_cast<i32>(t);
  }
  if (thread_index() == thread_count() - 1) counts[token] = static_cast<i32>(rank);
}

struct HeadShape {
  i64 size;           // numbers of a head
  i64 rotated;        // of these, the first so many are rotated
  float epsilon;
};

// One head of one token, normed and rotated: prepare in onnxruntime/branch_attention.cc. `head` is the block's.
OUTRIDER_DEVICE void prepare_head(const HeadShape& shape, const float* from, const float* norm, const float* cos,
                                  const float* sin, float* head) {
  OUTRIDER_SHARED float factor;
  if (norm != nullptr) {
    if (thread_index() == 0) {
      float partial[8] = {};
      for (i64 d = 0; d < shape.size; ++d) partial[d % 8] += from[d] * from[d];
      float sum = 0.0f;
      for (int i = 0; i < 8; ++i) sum += partial[i];
      factor = 1.0f / root(sum / static_cast<float>(shape.size) + shape.epsilon);
    }
    barrier();
  }
  const auto normed = [&](i64 d) { return norm == nullptr ? from[d] : from[d] * factor * norm[d]; };
  const i64 half = cos == nullptr ? 0 : shape.rotated / 2;
  for (i64 d = thread_index(); d < shape.size; d += thread_count()) {
    if (d < half) {
      head[d] = normed(d) * cos[d] - normed(d + half) * sin[d];
    } else if (d < 2 * half) {
      head[d] = normed(d) * cos[d - half] + normed(d - half) * sin[d - half];
    } else {
      head[d] = normed(d);
    }
  }
}

// A block makes one head of one token ready: a query for attention, or a key with its value, which it appends. Heads are
// those of queries, then those of keys. Tokens lie strides apart; the first query, key and value lie at places of a token's
// numbers, which may be the same packed ones. Norms and rotations may be null.
OUTRIDER_KERNEL outrider_append(const float* query, const float* key, const float* value, const i64* row_splits,
                                const i64* past_length, const i64* positions, const float* cos, const float* sin,
                                const float* query_norm, const float* key_norm, float* queries, char* keys, char* values,
                                i64 rows, i64 heads, i64 kv_heads, i64 size, i64 rotated, i64 capacity, i64 query_stride,
                                i64 kv_stride, i64 query_place, i64 key_place, i64 value_place, i64 element,
                                i64 epsilon, i64 limit) {
  OUTRIDER_SHARED float ready[1024];
  const i64 token = block_index() / (heads + kv_heads);
  const i64 head = block_index() % (heads + kv_heads);
  const HeadShape shape = {size, rotated, float_of(static_cast<i32>(epsilon))};
  // What an engine before it wrote may be anything: the tables have `limit` positions.
  const i64 position = cos != nullptr && positions[token] >= 0 && positions[token] < limit ? positions[token] : 0;
  const float* own_cos = cos == nullptr ? nullptr : cos + position * (rotated / 2);
  const float* own_sin = sin == nullptr ? nullptr : sin + position * (rotated / 2);
  if (head < heads) {
    prepare_head(shape, query + token * query_stride + query_place + head * size, query_norm, own_cos, own_sin,
                 queries + (token * heads + head) * size);
    return;
  }
  const i64 h = head - heads;
  // Behind it, each thread reads of `ready` what it wrote.
  prepare_head(shape, key + token * kv_stride + key_place + h * size, key_norm, own_cos, own_sin, ready);
  const i64 row = row_of(row_splits, rows, token);
  const i64 slot = past_length[row] + token - row_splits[row];
  if (slot < 0 || slot >= capacity) return;  // what an engine before it wrote may be anything
  const i64 first = ((row * kv_heads + h) * capacity + slot) * size;
  for (i64 d = thread_index(); d < size; d += thread_count()) {
    keep_element(keys, first + d, element, ready[d]);
    keep_element(values, first + d, element, value[token * kv_stride + value_place + h * size + d]);
  }
}

// The first rank of a token's list that counts: the last `window` keys do; 0: all.
OUTRIDER_DEVICE i64 window_begin(i64 count, i64 window) { return window != 0 && window < count ? count - window : 0; }

// What a chunk of keys leaves of one head: its highest score, the sum of its weights, and its weighted values.
struct Partial {
  const volatile float* from;  // [chunks, 2 + size]; other blocks write them: read past this multiprocessor's own cache
  i64 size;
  OUTRIDER_DEVICE float highest(i64 chunk) const { return from[chunk * (2 + size)]; }
  OUTRIDER_DEVICE float sum(i64 chunk) const { return from[chunk * (2 + size) + 1]; }
  OUTRIDER_DEVICE float value(i64 chunk, i64 d) const { return from[chunk * (2 + size) + 2 + d]; }
};

// One number of a head, of all its chunks. `sink`, the score of a key without a value, may be null.
OUTRIDER_DEVICE float put_together(const Partial& partial, i64 chunks, i64 d, const float* sink) {
  if (chunks == 0) return 0.0f;
  float most = partial.highest(0);
  for (i64 c = 1; c < chunks; ++c) most = partial.highest(c) > most ? partial.highest(c) : most;
  if (sink != nullptr && *sink > most) most = *sink;
  float total = 0.0f, sum = 0.0f;
  for (i64 c = 0; c < chunks; ++c) {
    const float factor = lane_exp(partial.highest(c) - most);
    total = fused(partial.sum(c), factor, total);
    sum = fused(partial.value(c, d), factor, sum);
  }
  if (sink != nullptr) total = total + lane_exp(*sink - most);
  return sum / total;
}

// A block attends with the query heads of one key/value head of one token over one chunk of keys, and leaves what it finds in
// partial[token - first_token, head, chunk]. The last block of a token and key/value head to finish, as counters[token -
// first_token, kv_head] tells, puts the chunks together. Blocks have whole warps; other forms than float32 want heads of a
// multiple of 32 numbers. `sinks` may be null.
OUTRIDER_KERNEL outrider_attend(const float* queries, const char* keys, const char* values, const i64* row_splits,
                                const i32* lists, const i32* counts, const float* sinks, float* partial, u32* counters,
                                char* out, float* out_scales, i32* out_sums, i64 rows, i64 heads, i64 kv_heads, i64 size,
                                i64 capacity, i64 view, i64 chunks, i64 first_token, i64 window, i64 element, i64 scale,
                                i64 softcap, i64 form) {
  const i64 chunk = block_index() % chunks;
  const i64 kv_head = block_index() / chunks % kv_heads;
  const i64 token = first_token + block_index() / chunks / kv_heads;
  const i64 all = counts[token];
  const i64 begin = window_begin(all, window) + chunk * kChunk;
  if (begin >= all && chunk > 0) return;
  const i64 seen = all - window_begin(all, window), own_chunks = (seen + kChunk - 1) / kChunk;
  const i64 count = all - begin < kChunk ? all - begin : kChunk;
  const i64 group = heads / kv_heads;
  float* weights = reinterpret_cast<float*>(dynamic_shared());                 // [group, kChunk]
  float* query = weights + group * kChunk;                                     // [group, size]
  float* highest = query + group * size;                                       // [group]
  i32* slots = reinterpret_cast<i32*>(highest + group);                        // [kChunk]
  const i64 row = row_of(row_splits, rows, token);
  const i64 cache = (row * kv_heads + kv_head) * capacity;
  const i64 own_queries = (token * heads + kv_head * group) * size;
  for (i64 i = thread_index(); i < group * size; i += thread_count()) query[i] = queries[own_queries + i];
  for (i64 j = thread_index(); j < count; j += thread_count()) slots[j] = lists[token * view + begin + j];
  barrier();

  const float factor = float_of(static_cast<i32>(scale)), cap = float_of(static_cast<i32>(softcap));
  for (i64 j = thread_index(); j < kChunk; j += thread_count()) {
    const i64 first = j < count ? (cache + slots[j]) * size : 0;
    for (i64 g = 0; g < group; ++g) {
      float score = float_of(static_cast<i32>(0xff800000u));
      if (j < count) {
        float lanes[kLanes] = {};
        for (i64 d = 0; d < size; d += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            if (d + l < size) lanes[l] = fused(query[g * size + d + l], element_at(keys, first + d + l, element), lanes[l]);
          }
        }
        score = sum_of_lanes(lanes) * factor;
        if (cap != 0.0f) score = lane_capped(score, cap);
      }
      weights[g * kChunk + j] = score;
    }
  }
  barrier();
  const i64 warp = thread_index() / 32, warps = thread_count() / 32, lane = lane_index();
  for (i64 g = warp; g < group; g += warps) {
    float most = weights[g * kChunk];
    for (i64 j = lane; j < count; j += 32) most = weights[g * kChunk + j] > most ? weights[g * kChunk + j] : most;
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other = shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    if (lane == 0) highest[g] = most;
  }
  barrier();
  for (i64 i = thread_index(); i < group * kChunk; i += thread_count()) {
    weights[i] = lane_exp(weights[i] - highest[i / kChunk]);
  }
  barrier();
  const i64 stride = 2 + size;
  const auto of_head = [&](i64 g) {
    return partial + (((token - first_token) * heads + kv_head * group + g) * chunks + chunk) * stride;
  };
  for (i64 g = warp; g < group; g += warps) {
    float sum = 0.0f;
    for (i64 j = lane % kLanes; j < kChunk; j += kLanes) sum = sum + weights[g * kChunk + j];
    sum = sum + shuffle_xor(sum, 2);  // sum_of_lanes, in its order
    sum = sum + shuffle_xor(sum, 1);
    sum = sum + shuffle_xor(sum, 8);
    sum = sum + shuffle_xor(sum, 4);
    if (lane == 0) {
      of_head(g)[0] = highest[g];
      of_head(g)[1] = sum;
    }
  }
  for (i64 i = thread_index(); i < group * size; i += thread_count()) {
    const i64 g = i / size, d = i % size;
    float sum = 0.0f;
    for (i64 j = 0; j < count; ++j) {
      sum = fused(weights[g * kChunk + j], element_at(values, (cache + slots[j]) * size + d, element), sum);
    }
    of_head(g)[2 + d] = sum;
  }
  if (!last_to_finish(counters + (token - first_token) * kv_heads + kv_head, own_chunks > 0 ? own_chunks : 1)) return;
  for (i64 i = thread_index(); i < group * size; i += thread_count()) {
    const i64 head = kv_head * group + i / size;
    const float found = put_together({of_head(i / size) - chunk * stride, size}, own_chunks, i % size,
                                     sinks == nullptr ? nullptr : sinks + head);
    const i64 at = (token * heads + kv_head * group) * size + i;
    if (form == kFloat32) {
      reinterpret_cast<float*>(out)[at] = found;
    } else {
      keep_block({out, out_scales, out_sums, form}, at / kBlock, found);
    }
  }
}

}  // namespace outrider
