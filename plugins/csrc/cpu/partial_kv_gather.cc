// PartialKvGather on the CPU: a copy for each block of each head that is not there already.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "partial_layout.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "PartialKvGather";

class PartialKvGather {
 public:
  PartialKvGather(nb::object kv, nb::object row, nb::object covered, nb::object selected, nb::object partial_kv, nb::object resident,
                  i64 block_size, i64 sink_blocks, i64 window_blocks)
      : layout_{block_size, sink_blocks, window_blocks} {
    check_layout(kOp, layout_);
    Binder binder(kOp);
    kv_ = static_cast<const char*>(binder.movable("kv", kv, {"planes", "R", "heads", "capacity", "slot_size"}));
    const std::string dtype = binder.dtype();
    partial_ = static_cast<char*>(
        binder.movable("partial_kv", partial_kv, {"planes", "R", "heads", "partial_capacity", "slot_size"}));
    if (binder.dtype() != dtype) throw nb::type_error("PartialKvGather: kv and partial_kv differ in dtype.");
    slot_bytes_ = binder.size_of("slot_size") * binder.item_size();
    const std::initializer_list<Dim> places = {"layers", "heads", "retrieval"};
    selected_ = binder.input<i64>("selected", selected, places);
    resident_ = binder.output<i64>("resident", resident, {"R", "layers", "heads", "retrieval"});
    row_ = binder.input<i64>("row", row, {1});
    covered_ = binder.input<i64>("covered", covered, {1});
    layers_ = binder.size_of("layers");
    if (binder.size_of("planes") != 2 * layers_) refuse(kOp, "kv must have two planes for each layer.");
    rows_ = binder.size_of("R");
    heads_ = binder.size_of("heads");
    capacity_ = binder.size_of("capacity");
    room_ = binder.size_of("partial_capacity");
    retrieval_ = binder.size_of("retrieval");
    arrays_ = binder.take_arrays();
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
  std::vector<nb::object> arrays_;
};

}  // namespace

void register_partial_kv_gather(nb::module_& module) {
  nb::class_<PartialKvGather>(module, "PartialKvGather")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, i64, i64, i64>(),
           nb::arg("kv"), nb::arg("row"), nb::arg("covered"), nb::arg("selected"), nb::arg("partial_kv"), nb::arg("resident"), nb::arg("block_size"),
           nb::arg("sink_blocks"), nb::arg("window_blocks"))
      .def("__call__", &PartialKvGather::call);
}

}  // namespace outrider
