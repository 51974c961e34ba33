// The numbers that a slot of a KV cache holds of one head.
#pragma once

#include "onnxruntime/convert.h"
#include "onnxruntime/quantize.h"

namespace outrider::engine {
namespace {

// The numbers of one head in a slot, by their index.
template <class Cached>
class SlotNumbers {
 public:
  SlotNumbers(const Cached* slot, std::int64_t head_dim) : slot_(slot) {
    if constexpr (std::is_same_v<Cached, Int8>) scale_ = scale_of(slot, head_dim);
  }
  float operator[](std::int64_t d) const {
    if constexpr (std::is_same_v<Cached, Int8>) return to_float(slot_[d]) * scale_;
    return to_float(slot_[d]);
  }

 private:
  const Cached* slot_;
  float scale_ = 1.0f;
};

// Keeps one head's numbers in a slot.
template <class Cached>
void keep(const float* numbers, std::int64_t head_dim, Cached* slot) {
  if constexpr (std::is_same_v<Cached, Int8>) {
    const float scale = quantize(numbers, head_dim, reinterpret_cast<std::int8_t*>(slot)).scale;
    std::memcpy(slot + head_dim, &scale, sizeof scale);
  } else {
    for (std::int64_t d = 0; d < head_dim; ++d) slot[d] = from_float<Cached>(numbers[d]);
  }
}

}  // namespace
}  // namespace outrider::engine
