// KvGather on the CPU. Moves are found once and merged into runs; then every plane and head does its row's runs.
#include "../kv_gather.h"

#include <cstring>
#include <vector>

#include "../rows.h"
#include "gil.h"
#include "op.h"
#include "refuse.h"

namespace outrider {

namespace {

// Neighbouring slots of a row that move by the same distance.
struct Run {
  i64 row;
  i64 from;
  i64 to;
  i64 slots;
};

class KvGather {
 public:
  static constexpr const char* kOp = "KvGather";

  explicit KvGather(const Binding& bound)
      : kv_(bound.output<char>("kv")),
        source_(bound.input<i64>("source")),
        source_count_(bound.input<i64>("source_count")),
        row_splits_(bound.input<i64>("row_splits")),
        source_base_(bound.input<i64>("source_base")),
        destination_(bound.input<i64>("destination")),
        slot_bytes_(bound.size("slot_size") * bound.item_size("kv")),
        planes_(bound.size("planes")),
        most_rows_(bound.size("R")),
        heads_(bound.size("heads")),
        capacity_(bound.size("capacity")),
        most_new_(bound.size("N")),
        placed_(static_cast<size_t>(most_rows_)) {
    runs_.reserve(static_cast<size_t>(most_new_));
  }

  void call(i64 rows) {
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
    // A run that moves upwards over itself, slot by slot, reads its own writes; memmove would not.
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
};

const Registration registered(define_op<KvGather>);

}  // namespace

}  // namespace outrider
