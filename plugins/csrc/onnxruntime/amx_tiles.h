// Instructions on tiles of AMX: eight registers of up to 16 rows of up to 64 bytes, which an instruction multiplies.
//
// The operations clobber memory where they read or write it, which the compiler's own intrinsics leave out. Tests on
// machines without AMX give the same functions in plain C++ (tests/plugins/kernel_driver).
#pragma once

#include <cstdint>

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// Rows of each tile, and bytes of a row; both 0 for unused tiles.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "as LDTILECFG reads them");

}  // namespace
}  // namespace outrider::engine

#if defined(OUTRIDER_EMULATED_AMX)

#include "emulated_tiles.h"

#else

namespace outrider::engine {
namespace {

// Shapes are a thread's. Nothing else is legal before them.
inline void tiles_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

// After it a switch of threads need not keep the tiles.
inline void tiles_release() { asm volatile("tilerelease"); }

template <int To>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(To));
}

// Row i is at from + i * stride bytes.
template <int To>
void tile_load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(To) : "memory");
}

template <int From>
void tile_store(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(From) : "memory");
}

// to[m][n] += sum over k and i < 4 of a[m][4 * k + i] * b[k][4 * n + i]: int32 += int8 * int8.
template <int To, int A, int B>
void tile_multiply_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(A), "i"(B));
}

// The same with b of uint8.
template <int To, int A, int B>
void tile_multiply_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(To), "i"(A), "i"(B));
}

}  // namespace
}  // namespace outrider::engine

#endif
