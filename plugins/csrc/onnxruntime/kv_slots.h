// The contents of a KV cache's slot for one head, by the cache's type, as in plans/kv_slots.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace outrider::engine {

// A 16-bit float.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
// An integer, or one of the bytes of the scale that stands after a head's integers.
struct Int8 {
  std::int8_t value;
};

namespace {  // each instruction set has its own copy

// Elements of the slot of a head.
template <class Cached>
constexpr std::int64_t slot_size(std::int64_t head_dim) {
  return std::is_same_v<Cached, Int8> ? head_dim + static_cast<std::int64_t>(sizeof(float)) : head_dim;
}

inline float scale_of(const Int8* slot, std::int64_t head_dim) {
  float scale;
  std::memcpy(&scale, slot + head_dim, sizeof scale);
  return scale;
}

}  // namespace
}  // namespace outrider::engine
