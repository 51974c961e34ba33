// KvGather on the CPU. Moves are found once and merged into runs; then every plane and head does the runs.
#include "../kv_gather.h"

#include <nanobind/nanobind.h>

#include <cstring>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "KvGather";

// Neighbouring rows that move by the same distance.
struct Run {
  i64 from;
  i64 to;
  i64 rows;
};

class KvGather {
 public:
  KvGather(nb::object kv, nb::object source, nb::object source_count, nb::object source_base, nb::object destination) {
    Binder binder(kOp);
    kv_ = static_cast<char*>(binder.movable("kv", kv, {"planes", "heads", "capacity", "head_dim"}));
    row_bytes_ = binder.size_of("head_dim") * binder.item_size();
    planes_ = binder.size_of("planes") * binder.size_of("heads");
    capacity_ = binder.size_of("capacity");
    source_ = binder.input<i64>("source", source, {"N"});
    source_count_ = binder.input<i64>("source_count", source_count, {1});
    source_base_ = binder.input<i64>("source_base", source_base, {1});
    destination_ = binder.input<i64>("destination", destination, {1});
    most_rows_ = binder.size_of("N");
    arrays_ = binder.take_arrays();
    runs_.reserve(static_cast<size_t>(most_rows_));
  }

  void call() {
    const i64 count = source_count_[0];
    check_value(kOp, "source_count", 0, count, 0, most_rows_);
    check_value(kOp, "source_base", 0, source_base_[0], 0, capacity_);
    check_value(kOp, "destination", 0, destination_[0], 0, capacity_ - count);
    const i64 moved = find_runs(count);
    if (moved == 0) return;
    const GilReleasedIfLong released(planes_ * moved * row_bytes_);
    for (i64 plane = 0; plane < planes_; ++plane) {
      char* rows = kv_ + plane * capacity_ * row_bytes_;
      for (const Run& run : runs_) move(rows, run);
    }
  }

 private:
  // Fills runs_ with the moves that change something, and returns how many rows they move.
  i64 find_runs(i64 count) {
    const i64 base = source_base_[0];
    runs_.clear();
    i64 moved = 0;
    for (i64 i = 0; i < count; ++i) {
      check_value(kOp, "source", i, source_[i], -base, capacity_ - 1 - base);
      const RowMove next = row_move(source_, base, destination_[0], i);
      if (next.from == next.to) continue;
      ++moved;
      if (!runs_.empty() && runs_.back().from + runs_.back().rows == next.from &&
          runs_.back().to + runs_.back().rows == next.to) {
        ++runs_.back().rows;
      } else {
        runs_.push_back({next.from, next.to, 1});
      }
    }
    return moved;
  }

  void move(char* rows, const Run& run) const {
    // Upwards over itself, a run read row by row sees what it has just written; memmove would not.
    const bool feeds_itself = run.from < run.to && run.to < run.from + run.rows;
    const i64 piece = feeds_itself ? 1 : run.rows;
    for (i64 i = 0; i < run.rows; i += piece) {
      std::memmove(rows + (run.to + i) * row_bytes_, rows + (run.from + i) * row_bytes_,
                   static_cast<size_t>(piece * row_bytes_));
    }
  }

  char* kv_;
  const i64* source_;
  const i64* source_count_;
  const i64* source_base_;
  const i64* destination_;
  i64 row_bytes_;
  i64 planes_;
  i64 capacity_;
  i64 most_rows_;
  std::vector<Run> runs_;
  std::vector<nb::object> arrays_;
};

}  // namespace

void register_kv_gather(nb::module_& module) {
  nb::class_<KvGather>(module, "KvGather")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::arg("kv"), nb::arg("source"),
           nb::arg("source_count"), nb::arg("source_base"), nb::arg("destination"))
      .def("__call__", &KvGather::call);
}

}  // namespace outrider
