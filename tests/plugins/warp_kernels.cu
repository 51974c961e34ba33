// Kernels of tests alone: each asks its warp, or its block, for one thing (csrc/cuda/warp.h, block.h, half.h).
#include "element.h"
#include "warp.h"

namespace outrider {

OUTRIDER_DEVICE i64 own_place() { return block_index() * thread_count() + thread_index(); }

// to[place] = the lane's number, and what other lanes have.
OUTRIDER_KERNEL shuffles(const u32* words, const i32* integers, const float* floats, const i32* lanes, const i32* mask,
                         i64* own, u32* words_of, i32* integers_of, float* floats_of, u32* words_across,
                         i32* integers_across, float* floats_across) {
  follow();
  const i64 i = own_place();
  own[i] = lane_index();
  words_of[i] = shuffle(words[i], lanes[i]);
  integers_of[i] = shuffle(integers[i], lanes[i]);
  floats_of[i] = shuffle(floats[i], lanes[i]);
  words_across[i] = shuffle_xor(words[i], *mask);
  integers_across[i] = shuffle_xor(integers[i], *mask);
  floats_across[i] = shuffle_xor(floats[i], *mask);
}

// c[warp] += a[warp] b[warp], of a [16, k], b [8, k] (turned), c [16, 8]; `kWords` hold the elements of a row.
template <int kWords, typename T, typename Multiply>
OUTRIDER_DEVICE void products(const u32* a, const u32* b, T* c, const Multiply& multiply) {
  const i64 warp = own_place() / 32, group = lane_index() / 4, in_group = lane_index() % 4;
  const u32* rows = a + (warp * 16 + group) * kWords + in_group;
  const u32* columns = b + (warp * 8 + group) * kWords + in_group;
  T* results = c + (warp * 16 + group) * 8 + 2 * in_group;
  const u32 left[4] = {rows[0], rows[8 * kWords], rows[4], rows[8 * kWords + 4]};
  const u32 right[2] = {columns[0], columns[4]};
  T sums[4] = {results[0], results[1], results[8 * 8], results[8 * 8 + 1]};
  multiply(sums, left, right);
  results[0] = sums[0];
  results[1] = sums[1];
  results[8 * 8] = sums[2];
  results[8 * 8 + 1] = sums[3];
}

OUTRIDER_KERNEL products_of_bytes(const u32* a, const u32* b, i32* c) {
  follow();
  products<8>(a, b, c, [](i32(&sums)[4], const u32(&left)[4], const u32(&right)[2]) {
    i32 found[4];
    multiply_bytes(found, sums[0], left, right);
    const u32 from = static_cast<u32>(sums[0]);
    for (int i = 0; i < 4; ++i) sums[i] = static_cast<i32>(static_cast<u32>(found[i]) - from + static_cast<u32>(sums[i]));
  });
}

OUTRIDER_KERNEL products_of_halves(const u32* a, const u32* b, float* c) {
  follow();
  products<8>(a, b, c, [](float(&sums)[4], const u32(&left)[4], const u32(&right)[2]) {
    multiply_halves(sums, left, right);
  });
}

OUTRIDER_KERNEL products_of_bfloats(const u32* a, const u32* b, float* c) {
  follow();
  products<8>(a, b, c, [](float(&sums)[4], const u32(&left)[4], const u32(&right)[2]) {
    multiply_bfloats(sums, left, right);
  });
}

OUTRIDER_KERNEL widened(const unsigned short* bits, float* halves, float* bfloats) {
  follow();
  const i64 i = own_place();
  halves[i] = float_of_half(bits[i]);
  bfloats[i] = float_of_bfloat(bits[i]);
}

OUTRIDER_KERNEL narrowed(const float* values, unsigned short* halves, unsigned short* bfloats) {
  follow();
  const i64 i = own_place();
  halves[i] = static_cast<unsigned short>(half_of(values[i]));
  bfloats[i] = static_cast<unsigned short>(bfloat_of(values[i]));
}

// Sixteen bytes of each thread, which it keeps in parts of kBytes, go to the thread before it.
template <typename Part, typename Wait>
OUTRIDER_DEVICE void hand_on(const char* from, u32* to, const Wait& wait) {
  constexpr int kParts = 16 / sizeof(Part);
  const i64 own = thread_index(), next = (own + 1) % thread_count();
  const Bytes16 bytes = load_bytes16(from + 16 * own_place());
  Part* kept = reinterpret_cast<Part*>(dynamic_shared()) + kParts * own;
  for (int i = 0; i < kParts; ++i) {
    const int bit = 8 * i * static_cast<int>(sizeof(Part));
    kept[i] = static_cast<Part>(bytes.word[bit / 32] >> bit % 32);
  }
  wait();
  const Bytes16 others = load_bytes16(dynamic_shared() + 16 * next);
  for (int i = 0; i < 4; ++i) to[4 * own_place() + i] = others.word[i];
}

OUTRIDER_KERNEL bytes_without_barrier(const char* from, u32* to) {
  follow();
  hand_on<unsigned char>(from, to, [] {});
}
OUTRIDER_KERNEL bytes_after_shuffle(const char* from, u32* to) {
  follow();
  hand_on<unsigned char>(from, to, [&] { to[4 * own_place()] = shuffle(1u, 0); });
}
OUTRIDER_KERNEL bytes_after_warp_barrier(const char* from, u32* to) {
  follow();
  hand_on<unsigned char>(from, to, [] { warp_barrier(); });
}
OUTRIDER_KERNEL bytes_after_barrier(const char* from, u32* to) {
  follow();
  hand_on<unsigned char>(from, to, [] { barrier(); });
}
OUTRIDER_KERNEL words_without_barrier(const char* from, u32* to) {
  follow();
  hand_on<u32>(from, to, [] {});
}
OUTRIDER_KERNEL words_after_warp_barrier(const char* from, u32* to) {
  follow();
  hand_on<u32>(from, to, [] { warp_barrier(); });
}

// A lane writes again what its neighbour reads: after a barrier of the warp, or not.
template <typename Wait>
OUTRIDER_DEVICE void write_again(u32* to, const Wait& wait) {
  u32* kept = reinterpret_cast<u32*>(dynamic_shared());
  const i64 own = thread_index();
  kept[own] = static_cast<u32>(own);
  warp_barrier();
  const u32 other = kept[own ^ 1];
  wait();
  kept[own] = other + 100;
  warp_barrier();
  to[own_place()] = kept[own ^ 1];
}

OUTRIDER_KERNEL again_after_warp_barrier(u32* to) {
  follow();
  write_again(to, [] { warp_barrier(); });
}
OUTRIDER_KERNEL again_without_barrier(u32* to) {
  follow();
  write_again(to, [] {});
}

OUTRIDER_KERNEL halves_of_a_warp_wait_for_others(u32* to) {
  follow();
  if (lane_index() < 16) {
    warp_barrier();
    to[own_place()] = 1;
  } else {
    to[own_place()] = shuffle(2u, 0);
  }
}

// The contents that blocks find in dynamic shared memory, and a byte that may lie after it.
OUTRIDER_KERNEL found_there(u32* to, const i64* place) {
  follow();
  const u32* kept = reinterpret_cast<const u32*>(dynamic_shared());
  to[own_place()] = kept[thread_index()];
  barrier();
  if (thread_index() == 0) dynamic_shared()[*place] = 1;
}

}  // namespace outrider
