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
  follow();
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
  i64 rotated;        // the first `rotated` numbers of a head are rotated
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
  follow();
  OUTRIDER_SHARED float ready[1024];
  const i64 token = block_index() / (heads + kv_heads);
  const i64 head = block_index() % (heads + kv_heads);
  const HeadShape shape = {size, rotated, float_of(static_cast<i32>(epsilon))};
  // An earlier engine may have written anything: the tables have `limit` positions.
  const i64 position = cos != nullptr && positions[token] >= 0 && positions[token] < limit ? positions[token] : 0;
  const float* own_cos = cos == nullptr ? nullptr : cos + position * (rotated / 2);
  const float* own_sin = sin == nullptr ? nullptr : sin + position * (rotated / 2);
  if (head < heads) {
    prepare_head(shape, query + token * query_stride + query_place + head * size, query_norm, own_cos, own_sin,
                 queries + (token * heads + head) * size);
    return;
  }
  const i64 h = head - heads;
  // After it, each thread reads of `ready` what it wrote.
  prepare_head(shape, key + token * kv_stride + key_place + h * size, key_norm, own_cos, own_sin, ready);
  const i64 row = row_of(row_splits, rows, token);
  const i64 slot = past_length[row] + token - row_splits[row];
  if (slot < 0 || slot >= capacity) return;  // an earlier engine may have written anything
  const i64 first = ((row * kv_heads + h) * capacity + slot) * size;
  for (i64 d = thread_index(); d < size; d += thread_count()) {
    keep_element(keys, first + d, element, ready[d]);
    keep_element(values, first + d, element, value[token * kv_stride + value_place + h * size + d]);
  }
}

// The first rank of a token's list that counts: the last `window` keys do; 0: all.
OUTRIDER_DEVICE i64 window_begin(i64 count, i64 window) { return window != 0 && window < count ? count - window : 0; }

constexpr int kAttending = 256;  // threads of a block, one for each key of a chunk

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

// Room in shared memory for the keys of a chunk, or for its values, as many of them at a time as fit. A key's numbers are an
// odd number of 16 bytes apart from the next one's, so that banks differ where each thread reads a key.
template <int kType>
struct Staged {
  const Chunk& chunk;
  char* room;
  int pieces, stride, keys;  // of a key: times 16 bytes, bytes; keys at a time: a multiple of four

  OUTRIDER_DEVICE Staged(const Chunk& of, char* shared, int bytes)
      : chunk(of), room(shared), pieces(of.size * kElementBytes<kType> / 16), stride((pieces | 1) * 16), keys(bytes / stride / 4 * 4) {}

  OUTRIDER_DEVICE bool whole() const { return chunk.count <= keys; }
  OUTRIDER_DEVICE int there(int first) const { return chunk.count - first < keys ? chunk.count - first : keys; }

  // Begin to copy the keys of `from`, from key `first` on.
  OUTRIDER_DEVICE void start(const char* from, int first) const {
    const int here = there(first);
    int key = thread() / pieces, piece = thread() % pieces;
    const SharedAddress to = shared_address(room);
    OUTRIDER_UNROLL(4)
    while (key < here) {
      start_copy16(to + (key * stride + piece * 16), from + (i64{chunk.slots[first + key]} * pieces + piece) * 16, true);
      key += kAttending / pieces, piece += kAttending % pieces;
      if (piece >= pieces) piece -= pieces, ++key;
    }
    close_copies();
  }

  OUTRIDER_DEVICE void arrive() const {
    wait_for_copies<0>();
    barrier();
  }

  // Scores of kHeads neighbouring heads with the key of a thread: sixteen lanes each.
  template <int kHeads>
  OUTRIDER_DEVICE void score_heads(int first_head, int first) const {
    const float* query = chunk.query + first_head * chunk.size;
    const char* key = room + thread() * stride;
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
    OUTRIDER_UNROLL(1)  // else registers do not suffice for two blocks a multiprocessor
    for (int d = 0; d + kLanes <= chunk.size; d += kLanes) {
      add_eight(d, 0);
      add_eight(d + 8, 8);
    }
    if (chunk.size % kLanes != 0) add_eight(chunk.size / kLanes * kLanes, 0);
    for (int h = 0; h < kHeads; ++h) {
      const float score = sum_of_lanes(lanes[h]) * chunk.scale;
      float& kept = chunk.weights[(first_head + h) * kChunk + first + thread()];
      kept = chunk.softcap != 0.0f ? lane_capped(score, chunk.softcap) : score;
    }
  }

  // Scores of all heads with the keys that are there, a thread for each: four heads at a time, so that a key is read once for
  // four.
  OUTRIDER_DEVICE void score(int first) const {
    if (thread() >= there(first)) return;
    int g = 0;
    for (; g + 4 <= chunk.group; g += 4) score_heads<4>(g, first);
    for (; g + 2 <= chunk.group; g += 2) score_heads<2>(g, first);
    for (; g < chunk.group; ++g) score_heads<1>(g, first);
  }

  // Adds the weighted values of the keys from `first` on to kNumbers neighbouring numbers of a head, four or one.
  template <int kNumbers>
  OUTRIDER_DEVICE void add_values(int head, int d, int first, float (&sums)[kNumbers]) const {
    const float* weights = chunk.weights + head * kChunk + first;
    const char* const own = room + d * kElementBytes<kType>;
    const auto add = [&](float weight, int key) {
      float numbers[kNumbers];
      if constexpr (kNumbers == 4) {
        load_four<kType>(own + key * stride, numbers);
      } else {
        numbers[0] = number_at<kType>(own + key * stride);
      }
      for (int i = 0; i < kNumbers; ++i) sums[i] = fused(weight, numbers[i], sums[i]);
    };
    const int here = there(first);
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

// A chunk's partial result for a head: its highest score, the sum of its weights, its weighted values.
struct Partial {
  float* first;  // [heads of the key/value head, chunks, 2 + size]
  i64 chunks, size;
  OUTRIDER_DEVICE float* of(i64 head, i64 chunk) const { return first + (head * chunks + chunk) * (2 + size); }
};

// Weighted values of a chunk, which is the token's `own`th: a thread has kNumbers neighbouring ones of a head. The first of
// them are on their way.
template <int kType, int kNumbers>
OUTRIDER_DEVICE void add_values(const Staged<kType>& staged, const Partial& partial, i64 own) {
  const Chunk& chunk = staged.chunk;
  const int of_head = chunk.size / kNumbers;
  for (int round = 0; round < chunk.group * of_head; round += kAttending) {
    const int head = (round + thread()) / of_head, d = (round + thread()) % of_head * kNumbers;
    const bool has = head < chunk.group;
    float sums[kNumbers] = {};
    for (int first = 0; first < chunk.count; first += staged.keys) {
      if (first > 0 || (round > 0 && !staged.whole())) {
        barrier();  // before anyone writes again
        staged.start(chunk.values, first);
      }
      staged.arrive();
      if (has) staged.template add_values<kNumbers>(head, d, first, sums);
    }
    for (int i = 0; has && i < kNumbers; ++i) partial.of(head, own)[2 + d + i] = sums[i];
  }
}

// Scores, weights and their sums, and weighted values of a chunk, which is the token's `own`th. `room` has as many `bytes`.
template <int kType>
OUTRIDER_DEVICE void attend_to(const Chunk& chunk, float* highest, char* room, int bytes, const Partial& partial, i64 own) {
  const Staged<kType> staged(chunk, room, bytes);
  for (int g = 0; thread() >= chunk.count && g < chunk.group; ++g) chunk.weights[g * kChunk + thread()] = float_of(kLeast);
  for (int first = 0; first < chunk.count; first += staged.keys) {
    if (first > 0) barrier();  // before anyone writes again
    staged.start(chunk.keys, first);
    staged.arrive();
    staged.score(first);
  }
  barrier();
  staged.start(chunk.values, 0);
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
    add_values<kType, 1>(staged, partial, own);
  } else {
    add_values<kType, 4>(staged, partial, own);
  }
}

// Puts the chunks of the heads of one key/value head together: each is multiplied by its factor, which comes into shared
// memory, or where these are too many, into the place of its highest score. `sinks`, the scores of a key without a value, may be
// null.
struct Together {
  Partial partial;
  i64 chunks;  // that have keys
  const float* sinks;
  float* sink;  // [group], shared: its weight
  float* factors;  // [group, chunks], shared, where they fit
  bool fits;

  OUTRIDER_DEVICE void keep_factor(i64 head, i64 chunk, float by) const {
    if (fits) {
      factors[head * chunks + chunk] = by;
    } else {
      *partial.of(head, chunk) = by;
    }
  }
  OUTRIDER_DEVICE float factor(i64 head, i64 chunk) const {
    if (fits) return factors[head * chunks + chunk];
    return *partial.of(head, chunk);
  }

  OUTRIDER_DEVICE void weigh(i64 group) const {
    for (i64 g = thread_index() / 32; g < group; g += thread_count() / 32) {
      float most = float_of(kLeast);
      for (i64 c = lane_index(); c < chunks; c += 32) {
        const float other = *partial.of(g, c);
        most = other > most ? other : most;
      }
      most = of_warp_highest(most);
      if (sinks != nullptr && sinks[g] > most) most = sinks[g];
      for (i64 c = lane_index(); c < chunks; c += 32) keep_factor(g, c, lane_exp(*partial.of(g, c) - most));
      if (lane_index() == 0) sink[g] = sinks == nullptr ? 0.0f : lane_exp(sinks[g] - most);
    }
  }

  // A chunk's partial result for one number of a head.
  struct Left {
    float weights, values;
  };
  OUTRIDER_DEVICE Left left(i64 g, i64 d, i64 c) const {
    const float* of_chunk = partial.of(g, c);
    return {of_chunk[1], of_chunk[2 + d]};
  }

  // `first` has the results of kAhead chunks, if there are that many.
  static constexpr int kAhead = 4;
  OUTRIDER_DEVICE void load(i64 g, i64 d, Left (&first)[kAhead]) const {
    for (int c = 0; c < kAhead; ++c) {
      if (c < chunks) first[c] = left(g, d, c);
    }
  }

  OUTRIDER_DEVICE float number(i64 g, i64 d, const Left (&first)[kAhead]) const {
    if (chunks == 0) return 0.0f;
    float total = 0.0f, sum = 0.0f;
    const auto add = [&](const Left& own, i64 c) {
      const float by = factor(g, c);
      total = fused(own.weights, by, total);
      sum = fused(own.values, by, sum);
    };
    for (int c = 0; c < kAhead; ++c) {
      if (c < chunks) add(first[c], c);
    }
    OUTRIDER_UNROLL(8)
    for (i64 c = kAhead; c < chunks; ++c) add(left(g, d, c), c);
    if (sinks != nullptr) total = total + sink[g];
    return sum / total;
  }
};

// A block attends with `at_once` query heads of one key/value head of one token, a divisor of those that it has, over one
// chunk of keys, and leaves the results in partial[token - first_token, head, chunk]. The last block of these heads to
// finish, by counters[token - first_token, head / at_once], combines the chunks. Blocks of 256 threads; heads have a multiple
// of 8 numbers, and of 32 where they are left in another form than float32. `sinks` may be null.
OUTRIDER_KERNEL OUTRIDER_FIT(kAttending, 2)
outrider_attend(const float* queries, const char* keys, const char* values, const i64* row_splits, const i32* lists,
                const i32* counts, const float* sinks, float* partial, u32* counters, char* out, float* out_scales,
                i32* out_sums, i64 rows, i64 heads, i64 kv_heads, i64 size, i64 capacity, i64 view, i64 chunks,
                i64 first_token, i64 window, i64 element, i64 scale, i64 softcap, i64 form, i64 at_once, i64 room) {
  follow();
  // Divided as 32 bits, which a GPU does several times faster.
  const u32 block = static_cast<u32>(block_index()), of_head = static_cast<u32>(chunks);
  const u32 parts = static_cast<u32>(heads) / static_cast<u32>(at_once), of_kv_head = parts / static_cast<u32>(kv_heads);
  const u32 part = block / of_head % parts;
  const i64 own = block % of_head, kv_head = part / of_kv_head, token = first_token + block / of_head / parts;
  const int group = static_cast<int>(at_once);
  const i64 first_head = token * heads + part * group;
  char* staged = dynamic_shared();                           // [room]
  float* weights = reinterpret_cast<float*>(staged + room);  // [group, kChunk]
  float* query = weights + group * kChunk;                   // [group, size]
  float* highest = query + group * size;                     // [group]
  i32* slots = reinterpret_cast<i32*>(highest + group);      // [kChunk]
  const i32* list = lists + token * view;
  i32 slot = 0;  // of the thread's key: without a window it is known where it stands before `counts` is
  if (window == 0 && own * kChunk + thread() < view) slot = list[own * kChunk + thread()];
  for (i64 i = thread_index(); i < group * size; i += thread_count()) query[i] = queries[first_head * size + i];
  const i64 all = counts[token], row = row_of(row_splits, rows, token);
  const i64 begin = window_begin(all, window) + own * kChunk;
  if (begin >= all && own > 0) return;
  const i64 seen = all - window_begin(all, window), own_chunks = (seen + kChunk - 1) / kChunk;
  const int count = static_cast<int>(all - begin < kChunk ? all - begin : kChunk);
  if (window != 0 && thread() < count) slot = list[begin + thread()];
  if (thread() < count) slots[thread()] = slot;
  barrier();
  const i64 bytes = size * (element == kFloat32 ? 4 : 2);
  const i64 cache = (row * kv_heads + kv_head) * capacity * bytes;
  const Chunk chunk = {keys + cache, values + cache, slots, query, weights, count,
                       group, static_cast<int>(size),
                       float_of(static_cast<i32>(scale)), float_of(static_cast<i32>(softcap))};
  const Partial left = {partial + (first_head - first_token * heads) * chunks * (2 + size), chunks, size};
  if (element == kFloat32) {
    attend_to<kFloat32>(chunk, highest, staged, static_cast<int>(room), left, own);
  } else if (element == kFloat16) {
    attend_to<kFloat16>(chunk, highest, staged, static_cast<int>(room), left, own);
  } else {
    attend_to<kBFloat16>(chunk, highest, staged, static_cast<int>(room), left, own);
  }
  if (!last_to_finish(counters + (token - first_token) * parts + part, own_chunks > 0 ? own_chunks : 1)) return;
  const Together together = {left, own_chunks, sinks == nullptr ? nullptr : sinks + part * group, highest,
                             reinterpret_cast<float*>(staged), group * own_chunks * 4 <= room};
  Together::Left first[Together::kAhead] = {};
  if (thread() < group * chunk.size) together.load(thread() / chunk.size, thread() % chunk.size, first);  // before they are needed
  together.weigh(group);
  barrier();
  for (int i = thread(); i < group * chunk.size; i += kAttending) {
    const int head = i / chunk.size, d = i % chunk.size;
    if (i != thread()) together.load(head, d, first);
    const float found = together.number(head, d, first);
    const i64 at = first_head * size + i;
    if (form == kFloat32) {
      reinterpret_cast<float*>(out)[at] = found;
    } else {
      keep_block({out, out_scales, out_sums, form}, at / kBlock, found);
    }
  }
}

}  // namespace outrider
