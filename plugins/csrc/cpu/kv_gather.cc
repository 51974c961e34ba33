// KvGather on the CPU. Moves are found once and merged into runs; then every plane and head does its row's runs.
#include "../kv_gather.h"

#include <nanobind/nanobind.h>

#include <cstring>

#include "../rows.h"
#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "KvGather";

// Neighbouring slots of a row that move by the same distance.
struct Run {
  i64 row;
  i64 from;
  i64 to;
  i64 slots;
};

class KvGather {
 public:
  KvGather(nb::object kv, nb::object source, nb::object source_count, nb::object row_splits, nb::object source_base,
           nb::object destination) {
    Binder binder(kOp);
    kv_ = static_cast<char*>(binder.movable("kv", kv, {"planes", "R", "heads", "capacity", "slot_size"}));
    slot_bytes_ = binder.size_of("slot_size") * binder.item_size();
    planes_ = binder.size_of("planes");
    most_rows_ = binder.size_of("R");
    heads_ = binder.size_of("heads");
    capacity_ = binder.size_of("capacity");
    source_ = binder.input<i64>("source", source, {"N"});
    source_count_ = binder.input<i64>("source_count", source_count, {1});
    row_splits_ = binder.row_splits(row_splits);
    source_base_ = binder.input<i64>("source_base", source_base, {"R"});
    destination_ = binder.input<i64>("destination", destination, {"R"});
    most_new_ = binder.size_of("N");
    arrays_ = binder.take_arrays();
    placed_.resize(static_cast<size_t>(most_rows_));
    runs_.reserve(static_cast<size_t>(most_new_));
  }

  void call(i64 rows) {
    check_extent(kOp, "R", rows, most_rows_);
    const i64 count = source_count_[0];
    check_value(kOp, "source_count", 0, count, 0, most_new_);
    check_row_splits(kOp, row_splits_, rows, most_new_);
    for (i64 r = 0; r < rows; ++r) {
      check_value(kOp, "source_base", r, source_base_[r], 0, capacity_);
      check_value(kOp, "destination", r, destination_[r], 0, capacity_);
      placed_[r] = 0;
    }
    const i64 moved = find_runs(count, rows);
    for (i64 r = 0; r < rows; ++r) check_value(kOp, "destination", r, destination_[r], 0, capacity_ - placed_[r]);
    if (moved == 0) return;
    const GilReleasedIfLong released(planes_ * heads_ * moved * slot_bytes_);
    for (i64 plane = 0; plane < planes_; ++plane) {
      for (const Run& run : runs_) move(plane, run);
    }
  }

 private:
  // Fills runs_ with the moves that change something, and returns how many slots they move.
  i64 find_runs(i64 count, i64 rows) {
    const i64 new_tokens = row_splits_[rows];
    runs_.clear();
    i64 moved = 0;
    i64 row = 0;
    for (i64 i = 0; i < count; ++i) {
      const i64 token = source_[i];
      check_value(kOp, "source", i, token, 0, new_tokens - 1);
      if (token < row_splits_[row] || token >= row_splits_[row + 1]) row = row_of(row_splits_, rows, token);
      const i64 first = row_splits_[row];
      const SlotMove next = slot_move(token, first, placed_[row]++, source_base_[row], destination_[row]);
      check_value(kOp, "source", i, token, first, first + capacity_ - 1 - source_base_[row]);
      if (next.from == next.to) continue;
      ++moved;
      if (!runs_.empty() && continues(runs_.back(), row, next)) {
        ++runs_.back().slots;
      } else {
        runs_.push_back({row, next.from, next.to, 1});
      }
    }
    return moved;
  }

  static bool continues(const Run& run, i64 row, const SlotMove& next) {
    return run.row == row && run.from + run.slots == next.from && run.to + run.slots == next.to;
  }

  // A run in every head of one plane. Heads hold different memory, so only the order of a head's runs matters.
  void move(i64 plane, const Run& run) const {
    // Upwards over itself, a run read slot by slot sees what it has just written; memmove would not.
    const bool feeds_itself = run.from < run.to && run.to < run.from + run.slots;
    const i64 piece = feeds_itself ? 1 : run.slots;
    char* slots = kv_ + (plane * most_rows_ + run.row) * heads_ * capacity_ * slot_bytes_;
    for (i64 head = 0; head < heads_; ++head, slots += capacity_ * slot_bytes_) {
      for (i64 i = 0; i < run.slots; i += piece) {
        std::memmove(slots + (run.to + i) * slot_bytes_, slots + (run.from + i) * slot_bytes_,
                     static_cast<size_t>(piece * slot_bytes_));
      }
    }
  }

  char* kv_;
  const i64* source_;
  const i64* source_count_;
  const i64* row_splits_;
  const i64* source_base_;
  const i64* destination_;
  i64 slot_bytes_;
  i64 planes_;
  i64 most_rows_;
  i64 heads_;
  i64 capacity_;
  i64 most_new_;
  std::vector<i64> placed_;  // by row: how many of its entries were seen
  std::vector<Run> runs_;
  std::vector<nb::object> arrays_;
};

}  // namespace

void register_kv_gather(nb::module_& module) {
  nb::class_<KvGather>(module, "KvGather")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::arg("kv"),
           nb::arg("source"), nb::arg("source_count"), nb::arg("row_splits"), nb::arg("source_base"),
           nb::arg("destination"))
      .def("__call__", &KvGather::call);
}

}  // namespace outrider
