// Operations of a warp: 32 neighbouring threads of a block, its lanes. Kernels that use them run in whole warps.
//
// All lanes of a warp call the same collectives: `warp_barrier`, `shuffle`, `shuffle_xor`, `multiply_*`. What lanes
// wrote before a `warp_barrier`, all of them see after it; the other collectives order no memory.
//
// A matrix product C += A B, C of [16, 8], has its matrices in registers of all lanes. Of lane 4 g + t, bytes and
// halves in a register from the lowest bits on (PTX ISA, "Matrix Fragments for mma.m16n8k16", "... mma.m16n8k32"):
//
//     C     sums[0], sums[1]   C[g, 2 t], C[g, 2 t + 1]
//           sums[2], sums[3]   C[g + 8, 2 t], C[g + 8, 2 t + 1]
//     of bytes: A [16, 32], B [32, 8]
//           a[0], a[1]         A[g, 4 t .. 4 t + 3], A[g + 8, 4 t .. 4 t + 3]
//           a[2], a[3]         A[g, 16 + 4 t .. 19 + 4 t], A[g + 8, 16 + 4 t .. 19 + 4 t]
//           b[0], b[1]         B[4 t .. 4 t + 3, g], B[16 + 4 t .. 19 + 4 t, g]
//     of halves: A [16, 16], B [16, 8]
//           a[0], a[1]         A[g, 2 t .. 2 t + 1], A[g + 8, 2 t .. 2 t + 1]
//           a[2], a[3]         A[g, 8 + 2 t .. 9 + 2 t], A[g + 8, 8 + 2 t .. 9 + 2 t]
//           b[0], b[1]         B[2 t .. 2 t + 1, g], B[8 + 2 t .. 9 + 2 t, g]
//
// A GPU adds up floats in an order of its own, and rounds as it likes: their last bits are its own too. Sums of bytes
// are exact, and wrap around. Matrix products need compute capability 8.0.
#pragma once

#include "block.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace outrider {

constexpr u32 kAllLanes = 0xffffffffu;

OUTRIDER_DEVICE i64 lane_index() { return threadIdx.x % 32; }
OUTRIDER_DEVICE void warp_barrier() { __syncwarp(); }

// The `value` of `lane`: u32, i32 or float.
template <typename T>
OUTRIDER_DEVICE T shuffle(T value, int lane) {
  static_assert(sizeof(T) == 4);
  return __shfl_sync(kAllLanes, value, lane);
}

// The `value` of the lane whose number differs from this one's in the bits of `mask`.
template <typename T>
OUTRIDER_DEVICE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// Signed bytes: each sum begins with `from`.
OUTRIDER_DEVICE void multiply_bytes(i32 (&sums)[4], i32 from, const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from));
}

// float16 by float16.
OUTRIDER_DEVICE void multiply_halves(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// bfloat16 by bfloat16.
OUTRIDER_DEVICE void multiply_bfloats(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace outrider

#else

#include "emulated_warp.h"

#endif
