// BlockSummary on the CPU: what is new since the last call, of all heads of layers that see every token.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../onnxruntime/slot_numbers.h"
#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "partial_layout.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "BlockSummary";
constexpr i64 kStrip = 16;  // blocks whose summaries are written together: neighbours, of each element

class BlockSummary {
 public:
  BlockSummary(nb::object kv, nb::object layer_windows, nb::object row, nb::object covered, nb::object summarised,
               nb::object key_max, nb::object key_min, i64 block_size, i64 sink_blocks, i64 window_blocks)
      : layout_{block_size, sink_blocks, window_blocks} {
    check_layout(kOp, layout_);
    Binder binder(kOp);
    kv_ = binder.movable("kv", kv, {"planes", "R", "heads", "capacity", "slot_size"});
    dtype_ = binder.dtype();
    const std::initializer_list<Dim> summary = {"R", "layers", "heads", "head_dim", "blocks"};
    key_max_ = binder.output<float>("key_max", key_max, summary);
    key_min_ = binder.output<float>("key_min", key_min, summary);
    layer_windows_ = binder.input<i64>("layer_windows", layer_windows, {"layers"});
    row_ = binder.input<i64>("row", row, {1});
    covered_ = binder.input<i64>("covered", covered, {1});
    summarised_ = binder.input<i64>("summarised", summarised, {1});
    layers_ = binder.size_of("layers");
    if (binder.size_of("planes") != 2 * layers_) refuse(kOp, "kv must have two planes for each layer.");
    rows_ = binder.size_of("R");
    heads_ = binder.size_of("heads");
    capacity_ = binder.size_of("capacity");
    head_dim_ = binder.size_of("head_dim");
    slot_size_ = dtype_ == "int8" ? engine::slot_size<engine::Int8>(head_dim_) : head_dim_;
    if (binder.size_of("slot_size") != slot_size_)
      refuse(kOp, "a slot of kv must have " + std::to_string(slot_size_) + " elements of " + dtype_ + " for " +
                      std::to_string(head_dim_) + " numbers.");
    blocks_ = binder.size_of("blocks");
    arrays_ = binder.take_arrays();
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
      if (layer_windows_[layer] > 0) continue;  // nobody scores its blocks
      const Key* keys = static_cast<const Key*>(kv_) + ((2 * layer * rows_ + row_[0]) * heads_ + head) * capacity_ * slot_size_;
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

  // Of a block's keys, element by element. What is no number stays.
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
  const void* kv_;
  std::string dtype_;
  float* key_max_;
  float* key_min_;
  const i64* layer_windows_;
  const i64* row_;
  const i64* covered_;
  const i64* summarised_;
  i64 rows_, layers_, heads_, capacity_, head_dim_, slot_size_, blocks_;
  std::vector<float> high_, low_;  // of a strip's blocks, `[kStrip, head_dim]`
  std::vector<nb::object> arrays_;
};

}  // namespace

void register_block_summary(nb::module_& module) {
  nb::class_<BlockSummary>(module, "BlockSummary")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, i64, i64,
                    i64>(),
           nb::arg("kv"), nb::arg("layer_windows"), nb::arg("row"), nb::arg("covered"), nb::arg("summarised"),
           nb::arg("key_max"), nb::arg("key_min"), nb::arg("block_size"), nb::arg("sink_blocks"), nb::arg("window_blocks"))
      .def("__call__", &BlockSummary::call);
}

}  // namespace outrider
