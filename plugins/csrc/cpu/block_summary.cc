// BlockSummary on the CPU: the tokens that are new since the last call, of all heads of layers that see every token.
#include <algorithm>
#include <string>
#include <vector>

#include "../onnxruntime/slot_numbers.h"
#include "gil.h"
#include "op.h"
#include "partial_layout.h"
#include "refuse.h"

namespace outrider {

namespace {

constexpr i64 kStrip = 16;  // blocks whose summaries are written together: neighbours, of each element

class BlockSummary {
 public:
  static constexpr const char* kOp = "BlockSummary";

  explicit BlockSummary(const Binding& bound)
      : layout_(bound_layout(bound)),
        kv_(bound.input<char>("kv")),
        dtype_(bound.dtype("kv")),
        key_max_(bound.output<float>("key_max")),
        key_min_(bound.output<float>("key_min")),
        layer_windows_(bound.input<i64>("layer_windows")),
        row_(bound.input<i64>("row")),
        covered_(bound.input<i64>("covered")),
        summarised_(bound.input<i64>("summarised")),
        rows_(bound.size("R")),
        layers_(bound.size("layers")),
        heads_(bound.size("heads")),
        capacity_(bound.size("capacity")),
        head_dim_(bound.size("head_dim")),
        blocks_(bound.size("blocks")) {
    if (bound.size("planes") != 2 * layers_) refuse(kOp, "kv must have two planes for each layer.");
    slot_size_ = dtype_ == "int8" ? engine::slot_size<engine::Int8>(head_dim_) : head_dim_;
    if (bound.size("slot_size") != slot_size_)
      refuse(kOp, "a slot of kv must have " + std::to_string(slot_size_) + " elements of " + dtype_ + " for " +
                      std::to_string(head_dim_) + " numbers.");
    high_.resize(static_cast<size_t>(kStrip * head_dim_));
    low_.resize(high_.size());
  }

  void call() {
    check_value(kOp, "row", 0, row_[0], 0, rows_ - 1);
    check_value(kOp, "covered", 0, covered_[0], 0, capacity_);
    const i64 end = layout_.candidates(covered_[0]);
    check_value(kOp, "summarised", 0, summarised_[0], 0, blocks_);
    if (end > blocks_) refuse(kOp, "there is room for " + std::to_string(blocks_) + " blocks, not " + std::to_string(end) + ".");
    for (i64 i = 0; i < layers_; ++i) check_value(kOp, "layer_windows", i, layer_windows_[i], 0, kMostKeys);
    const i64 first = summarised_[0];
    if (first >= end) return;
    const GilReleasedIfLong released((end - first) * layout_.block_size * layers_ * heads_ * head_dim_ * 4);
    if (dtype_ == "float32") return summarise<float>(first, end);
    if (dtype_ == "float16") return summarise<engine::Half>(first, end);
    if (dtype_ == "int8") return summarise<engine::Int8>(first, end);
    summarise<engine::BFloat16>(first, end);
  }

 private:
  template <class Key>
  void summarise(i64 first, i64 end) {
    for (i64 of = 0; of < layers_ * heads_; ++of) {
      const i64 layer = of / heads_, head = of % heads_;
      if (layer_windows_[layer] > 0) continue;  // its blocks are not scored
      const i64 plane = (2 * layer * rows_ + row_[0]) * heads_ + head;
      const Key* keys = reinterpret_cast<const Key*>(kv_) + plane * capacity_ * slot_size_;
      const i64 summaries = (row_[0] * layers_ * heads_ + of) * head_dim_ * blocks_;
      float *most = key_max_ + summaries, *least = key_min_ + summaries;
      for (i64 start = first; start < end; start += kStrip) {
        const i64 count = std::min(kStrip, end - start);
        for (i64 b = 0; b < count; ++b)
          extremes(keys + layout_.first(start + b) * slot_size_, high_.data() + b * head_dim_,
                   low_.data() + b * head_dim_);
        for (i64 d = 0; d < head_dim_; ++d)
          for (i64 b = 0; b < count; ++b) {
            most[d * blocks_ + start + b] = high_[b * head_dim_ + d];
            least[d * blocks_ + start + b] = low_[b * head_dim_ + d];
          }
      }
    }
  }

  // Of a block's keys, element by element. NaN stays.
  template <class Key>
  void extremes(const Key* keys, float* __restrict high, float* __restrict low) const {
    const engine::SlotNumbers<Key> first(keys, head_dim_);
    for (i64 d = 0; d < head_dim_; ++d) high[d] = low[d] = first[d];
    for (i64 t = 1; t < layout_.block_size; ++t) {
      const engine::SlotNumbers<Key> numbers(keys + t * slot_size_, head_dim_);
      for (i64 d = 0; d < head_dim_; ++d) {
        const float key = numbers[d];
        const bool none = key != key;
        high[d] = none | (key > high[d]) ? key : high[d];
        low[d] = none | (key < low[d]) ? key : low[d];
      }
    }
  }

  PartialLayout layout_;
  const char* kv_;
  std::string dtype_;
  float* key_max_;
  float* key_min_;
  const i64* layer_windows_;
  const i64* row_;
  const i64* covered_;
  const i64* summarised_;
  i64 rows_, layers_, heads_, capacity_, head_dim_, blocks_, slot_size_;
  std::vector<float> high_, low_;  // of a strip's blocks, `[kStrip, head_dim]`
};

const Registration registered(define_op<BlockSummary>);

}  // namespace

}  // namespace outrider
