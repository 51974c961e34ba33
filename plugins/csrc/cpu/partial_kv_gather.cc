// PartialKvGather on the CPU: a copy for each block of each head that is not there already.
#include <algorithm>
#include <cstring>
#include <string>

#include "gil.h"
#include "op.h"
#include "partial_layout.h"
#include "refuse.h"

namespace outrider {

namespace {

class PartialKvGather {
 public:
  static constexpr const char* kOp = "PartialKvGather";

  explicit PartialKvGather(const Binding& bound)
      : layout_(bound_layout(bound)),
        kv_(bound.input<char>("kv")),
        partial_(bound.output<char>("partial_kv")),
        row_(bound.input<i64>("row")),
        selected_(bound.input<i64>("selected")),
        covered_(bound.input<i64>("covered")),
        resident_(bound.output<i64>("resident")),
        slot_bytes_(bound.size("slot_size") * bound.item_size("kv")),
        rows_(bound.size("R")),
        layers_(bound.size("layers")),
        heads_(bound.size("heads")),
        capacity_(bound.size("capacity")),
        room_(bound.size("partial_capacity")),
        retrieval_(bound.size("retrieval")) {
    if (bound.size("planes") != 2 * layers_) refuse(kOp, "kv must have two planes for each layer.");
  }

  void call() {
    check_value(kOp, "row", 0, row_[0], 0, rows_ - 1);
    check_value(kOp, "covered", 0, covered_[0], layout_.first(0), capacity_);
    const i64 candidates = layout_.candidates(covered_[0]);
    const i64 count = std::find(selected_, selected_ + retrieval_, i64{-1}) - selected_;
    for (i64 i = 0; i < layers_ * heads_ * retrieval_; ++i) {
      const bool chosen = i % retrieval_ < count;
      check_value(kOp, "selected", i, selected_[i], chosen ? 0 : -1, chosen ? candidates - 1 : -1);
    }
    const i64 window = layout_.first(candidates), filled = layout_.first(count) + covered_[0] - window;
    if (filled > room_)
      refuse(kOp, std::to_string(filled) + " tokens exceed the partial cache's " + std::to_string(room_) + " slots.");
    const GilReleasedIfLong released(2 * layers_ * heads_ * filled * slot_bytes_);
    const i64 block = layout_.block_size;
    for (i64 of = 0; of < layers_ * heads_; ++of) {
      const i64* wanted = selected_ + of * retrieval_;
      i64* there = resident_ + (row_[0] * layers_ * heads_ + of) * retrieval_;
      for (i64 plane = 2 * (of / heads_); plane <= 2 * (of / heads_) + 1; ++plane) {
        const i64 head = (plane * rows_ + row_[0]) * heads_ + of % heads_;
        const char* from = kv_ + head * capacity_ * slot_bytes_;
        char* to = partial_ + head * room_ * slot_bytes_;
        copy(from, 0, to, 0, layout_.sink());
        for (i64 i = 0; i < count; ++i)
          if (there[i] != wanted[i]) copy(from, layout_.first(wanted[i]), to, layout_.first(i), block);
        copy(from, window, to, layout_.first(count), covered_[0] - window);
      }
      std::copy_n(wanted, count, there);
      std::fill(there + count, there + retrieval_, i64{-1});
    }
  }

 private:
  void copy(const char* from, i64 first, char* to, i64 at, i64 slots) const {
    std::memcpy(to + at * slot_bytes_, from + first * slot_bytes_, static_cast<size_t>(slots * slot_bytes_));
  }

  PartialLayout layout_;
  const char* kv_;
  char* partial_;
  const i64 *row_, *selected_, *covered_;
  i64* resident_;
  i64 slot_bytes_, rows_, layers_, heads_, capacity_, room_, retrieval_;
};

const Registration registered(define_op<PartialKvGather>);

}  // namespace

}  // namespace outrider
