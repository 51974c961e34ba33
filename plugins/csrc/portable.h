// What the shared headers need from their surroundings, which may be a host compiler, nvcc, or NVRTC (no standard headers).
//
// Results must not depend on who compiled them: build with floating-point contraction off
// (`-ffp-contract=off`; NVRTC and nvcc: `--fmad=false`).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define OUTRIDER_HD __host__ __device__
#else
#define OUTRIDER_HD
#endif

#if !defined(__CUDACC_RTC__)
#include <cmath>
#include <cstring>
#endif

#if defined(__FAST_MATH__)
#error "outrider's ops promise the same bits everywhere: build them without -ffast-math"
#endif

namespace outrider {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "the ops assume 32-bit int and 64-bit long long");

// Rounded to the nearest, as IEEE 754 has it.
OUTRIDER_HD inline double square_root(double value) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

OUTRIDER_HD inline u64 bits_of(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<u64>(__double_as_longlong(value));
#else
  u64 bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

OUTRIDER_HD inline double double_of(u64 bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<i64>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

OUTRIDER_HD inline i32 bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(value);
#else
  i32 bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

OUTRIDER_HD inline float float_of(i32 bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

}  // namespace outrider
