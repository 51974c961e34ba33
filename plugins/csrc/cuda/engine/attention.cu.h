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

constexpr i32 kLeast = static_cast<i32>(0xff800000u);  // minus infinity, as bits
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
    if (thread_index() < 32) {
      float squares = 0.0f, sum = 0.0f;
      for (i64 d = lane_index() % 8; d < shape.size; d += 8) squares += from[d] * from[d];
      for (int i = 0; i < 8; ++i) sum += shuffle(squares, i);
      if (lane_index() == 0) factor = 1.0f / root(sum / static_cast<float>(shape.size) + shape.epsilon);
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

constexpr int kTileBytes = 16384;  // of values that a block has in shared memory at once: in attention_bytes, too
constexpr int kAttending = 256;    // threads of a block
constexpr int kOwnPieces = kTileBytes / 16 / kAttending;  // of a tile, 16 bytes each, that a thread loads

OUTRIDER_DEVICE int thread() { return static_cast<int>(thread_index()); }

// The chunk of keys that a block attends to, with `group` query heads of one key/value head of one token.
struct Chunk {
  const char *keys, *values;  // those of the row and key/value head
  const i32* slots;           // [count], shared
  const float* query;         // [group, size], shared
  float* weights;             // [group, kChunk], shared: scores, then weights
  int count, group, size;
  float scale, softcap;
};

// Scores of kHeads neighbouring heads with one key: sixteen lanes each.
template <int kType, int kHeads>
OUTRIDER_DEVICE void score_heads(const Chunk& chunk, int first_head, int j) {
  const float* query = chunk.query + first_head * chunk.size;
  const char* key = chunk.keys + i64{chunk.slots[j]} * chunk.size * kElementBytes<kType>;
  float lanes[kHeads][kLanes] = {};
  const auto add_eight = [&](int d, int lane) {  // numbers d to d + 7, of which the first is the lane's
    float numbers[8];
    load_eight<kType>(key + d * kElementBytes<kType>, numbers);
    for (int h = 0; h < kHeads; ++h) {
      for (int l = 0; l < 8; l += 4) {
        const Quad asked = load_quad(query + h * chunk.size + d + l);
        for (int i = 0; i < 4; ++i) {
          float& own = lanes[h][lane + l + i];
          own = fused(asked.value[i], numbers[l + i], own);
        }
      }
    }
  };
  OUTRIDER_UNROLL(4)
  for (int d = 0; d + kLanes <= chunk.size; d += kLanes) {
    add_eight(d, 0);
    add_eight(d + 8, 8);
  }
  if (chunk.size % kLanes != 0) add_eight(chunk.size / kLanes * kLanes, 0);
  for (int h = 0; h < kHeads; ++h) {
    const float score = sum_of_lanes(lanes[h]) * chunk.scale;
    chunk.weights[(first_head + h) * kChunk + j] = chunk.softcap != 0.0f ? lane_capped(score, chunk.softcap) : score;
  }
}

// Scores of all heads, a thread for each key: four heads at a time, so that a key is read once for four.
template <int kType>
OUTRIDER_DEVICE void score(const Chunk& chunk) {
  for (int j = thread(); j < kChunk; j += kAttending) {
    int g = 0;
    if (j >= chunk.count) {
      for (; g < chunk.group; ++g) chunk.weights[g * kChunk + j] = float_of(kLeast);
    }
    for (; g + 4 <= chunk.group; g += 4) score_heads<kType, 4>(chunk, g, j);
    for (; g + 2 <= chunk.group; g += 2) score_heads<kType, 2>(chunk, g, j);
    for (; g < chunk.group; ++g) score_heads<kType, 1>(chunk, g, j);
  }
}

// Values of a chunk, which come to shared memory in tiles of some keys: while one is added up, the next is on its way.
template <int kType>
struct Values {
  const Chunk& chunk;
  char* tile;  // kTileBytes of shared memory
  int pieces;  // of 16 bytes, of a key's values
  int keys;    // of a tile: a multiple of four, and four at least, of heads of up to 1024 numbers
  Bytes16 coming[kOwnPieces] = {};

  OUTRIDER_DEVICE Values(const Chunk& of, char* shared)
      : chunk(of), tile(shared), pieces(of.size * kElementBytes<kType> / 16), keys(kTileBytes / 16 / pieces / 4 * 4) {}

  // Begin to load the tile whose first key is `start`.
  OUTRIDER_DEVICE void fetch(int start) {
    for (int own = 0; own < kOwnPieces; ++own) {
      const int piece = thread() + own * kAttending, key = piece / pieces;
      if (key >= keys || start + key >= chunk.count) break;
      coming[own] = load_bytes16(chunk.values + (i64{chunk.slots[start + key]} * pieces + piece % pieces) * 16);
    }
  }

  OUTRIDER_DEVICE void arrive() const {
    barrier();  // before anyone writes again
    for (int own = 0; own < kOwnPieces; ++own) {
      const int piece = thread() + own * kAttending;
      if (piece < keys * pieces) reinterpret_cast<Bytes16*>(tile)[piece] = coming[own];
    }
    barrier();
  }

  // Adds to kNumbers neighbouring numbers of a head, four or one, what the keys of the tile give, which begins with the key
  // `start`.
  template <int kNumbers>
  OUTRIDER_DEVICE void add_keys(int head, int d, int start, float (&sums)[kNumbers]) const {
    const float* weights = chunk.weights + head * kChunk + start;
    const int here = chunk.count - start < keys ? chunk.count - start : keys;
    const auto add = [&](float weight, int key) {
      float numbers[kNumbers];
      if constexpr (kNumbers == 4) {
        load_four<kType>(tile + (key * chunk.size + d) * kElementBytes<kType>, numbers);
      } else {
        numbers[0] = element_at(tile, key * chunk.size + d, kType);
      }
      for (int i = 0; i < kNumbers; ++i) sums[i] = fused(weight, numbers[i], sums[i]);
    };
    int key = 0;
    OUTRIDER_UNROLL(4)
    for (; key + 4 <= here; key += 4) {
      const Quad four = load_quad(weights + key);
      for (int i = 0; i < 4; ++i) add(four.value[i], key + i);
    }
    for (; key < here; ++key) add(weights[key], key);
  }
};

OUTRIDER_DEVICE float of_warp_highest(float value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// What a chunk leaves of a head: its highest score, the sum of its weights, its weighted values.
struct Partial {
  float* first;  // [heads of the key/value head, chunks, 2 + size]
  i64 chunks, size;
  OUTRIDER_DEVICE float* of(i64 head, i64 chunk) const { return first + (head * chunks + chunk) * (2 + size); }
};

// Weighted values of a chunk, which is the token's `own`th: a thread has kNumbers neighbouring ones of a head.
template <int kType, int kNumbers>
OUTRIDER_DEVICE void add_values(const Chunk& chunk, Values<kType>& values, const Partial& partial, i64 own) {
  const int of_head = chunk.size / kNumbers;
  for (int round = 0; round < chunk.group * of_head; round += kAttending) {
    const int head = (round + thread()) / of_head, d = (round + thread()) % of_head * kNumbers;
    const bool has = head < chunk.group;
    float sums[kNumbers] = {};
    if (round > 0) values.fetch(0);
    for (int start = 0; start < chunk.count; start += values.keys) {
      values.arrive();
      if (start + values.keys < chunk.count) values.fetch(start + values.keys);
      if (has) values.template add_keys<kNumbers>(head, d, start, sums);
    }
    for (int i = 0; has && i < kNumbers; ++i) partial.of(head, own)[2 + d + i] = sums[i];
  }
}

// Scores, weights and their sums, and weighted values of a chunk, which is the token's `own`th.
template <int kType>
OUTRIDER_DEVICE void attend_to(const Chunk& chunk, float* highest, char* tile, const Partial& partial, i64 own) {
  score<kType>(chunk);
  barrier();
  Values<kType> values(chunk, tile);
  values.fetch(0);
  const int warp = thread() / 32, lane = thread() % 32;
  for (int g = warp; g < chunk.group; g += kAttending / 32) {
    const float* scores = chunk.weights + g * kChunk;
    float most = scores[0];
    for (int j = lane; j < chunk.count; j += 32) most = scores[j] > most ? scores[j] : most;
    most = of_warp_highest(most);
    if (lane == 0) highest[g] = most;
  }
  barrier();
  for (int i = thread(); i < chunk.group * kChunk; i += kAttending) {
    chunk.weights[i] = lane_exp(chunk.weights[i] - highest[i / kChunk]);
  }
  barrier();
  for (int g = warp; g < chunk.group; g += kAttending / 32) {
    float sum = 0.0f;
    OUTRIDER_UNROLL(16)
    for (int j = lane % kLanes; j < kChunk; j += kLanes) sum = sum + chunk.weights[g * kChunk + j];
    sum = sum + shuffle_xor(sum, 2);  // sum_of_lanes, in its order
    sum = sum + shuffle_xor(sum, 1);
    sum = sum + shuffle_xor(sum, 8);
    sum = sum + shuffle_xor(sum, 4);
    if (lane == 0) {
      partial.of(g, own)[0] = highest[g];
      partial.of(g, own)[1] = sum;
    }
  }
  if (chunk.group * chunk.size <= kAttending) {
    add_values<kType, 1>(chunk, values, partial, own);
  } else {
    add_values<kType, 4>(chunk, values, partial, own);
  }
}

// Puts the chunks of the heads of one key/value head together: what each is multiplied by takes the place of its highest
// score. `sinks`, the scores of a key without a value, may be null.
struct Together {
  Partial partial;
  i64 chunks;  // that have keys
  const float* sinks;
  float* sink;  // [group], shared: its weight

  OUTRIDER_DEVICE void weigh(i64 group) const {
    for (i64 g = thread_index() / 32; g < group; g += thread_count() / 32) {
      if (chunks == 0) break;
      float most = float_of(kLeast);
      for (i64 c = lane_index(); c < chunks; c += 32) {
        const float other = *partial.of(g, c);
        most = other > most ? other : most;
      }
      most = of_warp_highest(most);
      if (sinks != nullptr && sinks[g] > most) most = sinks[g];
      for (i64 c = lane_index(); c < chunks; c += 32) {
        float* const highest = partial.of(g, c);
        *highest = lane_exp(*highest - most);
      }
      if (lane_index() == 0) sink[g] = sinks == nullptr ? 0.0f : lane_exp(sinks[g] - most);
    }
    barrier();
  }

  OUTRIDER_DEVICE float number(i64 g, i64 d) const {
    if (chunks == 0) return 0.0f;
    float total = 0.0f, sum = 0.0f;
    OUTRIDER_UNROLL(8)
    for (i64 c = 0; c < chunks; ++c) {
      const float *of_chunk = partial.of(g, c), factor = of_chunk[0];
      total = fused(of_chunk[1], factor, total);
      sum = fused(of_chunk[2 + d], factor, sum);
    }
    if (sinks != nullptr) total = total + sink[g];
    return sum / total;
  }
};

// A block attends with `at_once` query heads of one key/value head of one token, a divisor of those that it has, over one
// chunk of keys, and leaves what it finds in partial[token - first_token, head, chunk]. The last block of these heads to
// finish, by counters[token - first_token, head / at_once], combines the chunks. Blocks of 256 threads; heads have a multiple
// of 8 numbers, and of 32 where they are left in another form than float32. `sinks` may be null.
OUTRIDER_KERNEL OUTRIDER_FIT(kAttending, 1)
outrider_attend(const float* queries, const char* keys, const char* values, const i64* row_splits, const i32* lists,
                const i32* counts, const float* sinks, float* partial, u32* counters, char* out, float* out_scales,
                i32* out_sums, i64 rows, i64 heads, i64 kv_heads, i64 size, i64 capacity, i64 view, i64 chunks,
                i64 first_token, i64 window, i64 element, i64 scale, i64 softcap, i64 form, i64 at_once) {
  // Divided as 32 bits, which a GPU does several times faster.
  const u32 block = static_cast<u32>(block_index()), of_head = static_cast<u32>(chunks);
  const u32 parts = static_cast<u32>(heads) / static_cast<u32>(at_once), of_kv_head = parts / static_cast<u32>(kv_heads);
  const u32 part = block / of_head % parts;
  const i64 own = block % of_head, kv_head = part / of_kv_head, token = first_token + block / of_head / parts;
  const i64 all = counts[token];
  const i64 begin = window_begin(all, window) + own * kChunk;
  if (begin >= all && own > 0) return;
  const i64 seen = all - window_begin(all, window), own_chunks = (seen + kChunk - 1) / kChunk;
  const int count = static_cast<int>(all - begin < kChunk ? all - begin : kChunk);
  const int group = static_cast<int>(at_once);
  const i64 first_head = token * heads + part * group;
  char* tile = dynamic_shared();
  float* weights = reinterpret_cast<float*>(tile + kTileBytes);  // [group, kChunk]
  float* query = weights + group * kChunk;                       // [group, size]
  float* highest = query + group * size;                         // [group]
  i32* slots = reinterpret_cast<i32*>(highest + group);          // [kChunk]
  for (i64 i = thread_index(); i < group * size; i += thread_count()) query[i] = queries[first_head * size + i];
  for (i64 j = thread_index(); j < count; j += thread_count()) slots[j] = lists[token * view + begin + j];
  barrier();
  const i64 bytes = size * (element == kFloat32 ? 4 : 2);
  const i64 cache = (row_of(row_splits, rows, token) * kv_heads + kv_head) * capacity * bytes;
  const Chunk chunk = {keys + cache, values + cache, slots, query, weights, count,
                       group, static_cast<int>(size),
                       float_of(static_cast<i32>(scale)), float_of(static_cast<i32>(softcap))};
  const Partial left = {partial + (first_head - first_token * heads) * chunks * (2 + size), chunks, size};
  if (element == kFloat32) {
    attend_to<kFloat32>(chunk, highest, tile, left, own);
  } else if (element == kFloat16) {
    attend_to<kFloat16>(chunk, highest, tile, left, own);
  } else {
    attend_to<kBFloat16>(chunk, highest, tile, left, own);
  }
  if (!last_to_finish(counters + (token - first_token) * parts + part, own_chunks > 0 ? own_chunks : 1)) return;
  const Together together = {left, own_chunks, sinks == nullptr ? nullptr : sinks + part * group, highest};
  together.weigh(group);
  for (int i = thread(); i < group * chunk.size; i += kAttending) {
    const float found = together.number(i / chunk.size, i % chunk.size);
    const i64 at = first_head * size + i;
    if (form == kFloat32) {
      reinterpret_cast<float*>(out)[at] = found;
    } else {
      keep_block({out, out_scales, out_sums, form}, at / kBlock, found);
    }
  }
}

}  // namespace outrider
