// What PTX instructions calculate, where C++ has no operator that does the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "half.h"

namespace ptx {

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// An operand as an instruction's type reads it: the lower bits of a register that is wider.
template <typename To, typename From>
To as(From from) {
  if constexpr (sizeof(To) == sizeof(From)) {
    return bits_as<To>(from);
  } else {
    static_assert(std::is_integral_v<From>);
    static_assert(std::is_integral_v<To>);
    return static_cast<To>(from);
  }
}

// A result in its register: extended by its sign where the register is wider.
template <typename Register, typename Value>
void set(Register& to, Value value) {
  if constexpr (sizeof(Register) == sizeof(Value)) {
    to = bits_as<Register>(value);
  } else {
    static_assert(std::is_integral_v<Value>);
    to = static_cast<Register>(value);
  }
}

template <typename T>
bool unordered(T a, T b) {
  return a != a || b != b;
}

template <typename T>
bool differ(T a, T b) {
  return a < b || a > b;
}

template <typename T>
T quotient(T a, T b) {
  return b != 0 ? static_cast<T>(a / b) : static_cast<T>(-1);  // PTX does not say what else it is
}

template <typename T>
T remainder(T a, T b) {
  return b != 0 ? static_cast<T>(a % b) : a;
}

template <typename T>
T least(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a != a ? b : b != b ? a : a < b ? a : b;
  return a < b ? a : b;
}

template <typename T>
T largest(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a != a ? b : b != b ? a : a > b ? a : b;
  return a > b ? a : b;
}

template <typename T>
T shifted_left(T a, uint32_t by) {
  return by >= sizeof(T) * 8 ? T{0} : static_cast<T>(a << by);
}

template <typename T>
T shifted_right(T a, uint32_t by) {
  if (by >= sizeof(T) * 8) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> by);
}

template <typename T>
T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (sizeof(T) * 8));
}

template <typename T>
T with_field(T field, T into, uint32_t position, uint32_t length) {
  const T mask = length >= sizeof(T) * 8 ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
  return static_cast<T>((into & ~shifted_left(mask, position)) | shifted_left(static_cast<T>(field & mask), position));
}

// Bytes of b and a, chosen by the four digits of `selector`; the highest bit of a digit spreads the byte's sign.
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15;
    uint32_t byte = both >> (8 * (digit & 7)) & 255;
    if (digit & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Towards zero, and to the nearest end of the range from beyond it.
template <typename To, typename From>
To truncated(From from) {
  if (from != from) return 0;
  const From whole = std::trunc(from);
  if (whole <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (whole >= std::ldexp(From{1}, sizeof(To) * 8 - (std::is_signed_v<To> ? 1 : 0))) return std::numeric_limits<To>::max();
  return static_cast<To>(whole);
}

// As a GPU converts, where every NaN becomes the same.
inline float float_of_half(uint16_t bits) {
  const float value = outrider::float_of_half(bits);
  return value != value ? bits_as<float>(0x7fffffffu) : value;
}

inline uint32_t half_of(float value) { return value != value ? 0x7fffu : outrider::half_of(value); }

inline uint32_t bfloat_of(float value) { return value != value ? 0x7fffu : outrider::bfloat_of(value); }

}  // namespace ptx
