// BimMask on the CPU. A token's line of the bias is its parent's line and one more visible key: most lines are copies.
#include "../bim_mask.h"

#include <algorithm>

#include "clones.h"
#include "gil.h"
#include "op.h"
#include "refuse.h"

namespace outrider {

namespace {

constexpr i64 kLeastBranch = -1;  // rows of the shared prefix itself; -2 marks empty slots and is no branch

OUTRIDER_CLONES void committed_part(const i64* bim, i64 past, i64 branch, float* line) {
  for (i64 j = 0; j < past; ++j) line[j] = sees_committed(bim[j], branch) ? kVisible : kMasked;
}

// A row of the step: pointers to its first new token, its slots and its part of the bias.
struct Row {
  const i64* bim;
  const i64* branch;
  const i64* parent;  // still indices in the step
  float* bias;        // [places, view]
  i64 first;          // its first new token's index in the step
  i64 tokens;
  i64 past;
};

class BimMask {
 public:
  static constexpr const char* kOp = "BimMask";

  explicit BimMask(const Binding& bound)
      : bim_(bound.input<i64>("bim")),
        past_length_(bound.input<i64>("past_length")),
        row_splits_(bound.input<i64>("row_splits")),
        branch_(bound.input<i64>("branch")),
        parent_(bound.input<i64>("parent")),
        attn_bias_(bound.output<float>("attn_bias")),
        capacity_(bound.size("capacity")) {}

  void call(i64 new_tokens, i64 view, i64 rows, i64 places) {
    check_row_splits(kOp, row_splits_, rows, new_tokens);
    if (row_splits_[rows] != new_tokens) {
      refuse(kOp, "row_splits[" + std::to_string(rows) + "] is " + std::to_string(row_splits_[rows]) +
                      ", but the last split must be N, " + std::to_string(new_tokens) + ".");
    }
    for (i64 r = 0; r < rows; ++r) check_row(r, view, places);

    const GilReleasedIfLong released(rows * places * view * static_cast<i64>(sizeof(float)));
    for (i64 r = 0; r < rows; ++r) {
      const i64 first = row_splits_[r];
      write_row({bim_ + r * capacity_, branch_ + first, parent_ + first, attn_bias_ + r * places * view, first,
                 row_splits_[r + 1] - first, past_length_[r]},
                view, places);
    }
  }

 private:
  void check_row(i64 r, i64 view, i64 places) const {
    const i64 first = row_splits_[r];
    const i64 end = row_splits_[r + 1];
    const i64 past = past_length_[r];
    check_value(kOp, "past_length", r, past, 0, capacity_);
    if (view < past + (end - first)) {
      refuse(kOp, "extent T is " + std::to_string(view) + ", but " + std::to_string(past) + " committed and " +
                      std::to_string(end - first) + " new keys of row " + std::to_string(r) + " must be in view.");
    }
    if (places < end - first) {
      refuse(kOp, "extent S is " + std::to_string(places) + ", but row " + std::to_string(r) + " has " +
                      std::to_string(end - first) + " new tokens.");
    }
    for (i64 i = first; i < end; ++i) {
      check_value(kOp, "parent", i, parent_[i], -1, i - 1);
      if (parent_[i] >= 0 && parent_[i] < first) {
        refuse(kOp, "parent[" + std::to_string(i) + "] is " + std::to_string(parent_[i]) +
                        ", a token of another row; the tokens of row " + std::to_string(r) + " start at " +
                        std::to_string(first) + ".");
      }
      if (branch_[i] < kLeastBranch) check_value(kOp, "branch", i, branch_[i], kLeastBranch, i64{1} << 62);
    }
  }

  static void write_row(const Row& row, i64 view, i64 places) {
    for (i64 s = 0; s < row.tokens; ++s) write_token(row, s, view);
    float* padding = row.bias + row.tokens * view;
    std::fill(padding, row.bias + places * view, kMasked);
    if (view == 0) return;
    for (i64 s = row.tokens; s < places; ++s, padding += view) padding[kPaddingKey] = kVisible;
  }

  static void write_token(const Row& row, i64 s, i64 view) {
    float* line = row.bias + s * view;
    const i64 parent = row.parent[s] - row.first;  // its place; below 0 where the parent is committed
    const float* parent_line = parent < 0 ? nullptr : row.bias + parent * view;
    if (parent_line && row.branch[parent] == row.branch[s]) {
      std::copy_n(parent_line, view, line);
    } else {
      if (s > 0 && row.branch[s - 1] == row.branch[s]) {
        std::copy_n(line - view, row.past, line);
      } else {
        committed_part(row.bim, row.past, row.branch[s], line);
      }
      if (parent_line) {
        std::copy_n(parent_line + row.past, view - row.past, line + row.past);
      } else {
        std::fill(line + row.past, line + view, kMasked);
      }
    }
    line[row.past + s] = kVisible;
  }

  const i64* bim_;
  const i64* past_length_;
  const i64* row_splits_;
  const i64* branch_;
  const i64* parent_;
  float* attn_bias_;
  i64 capacity_;
};

const Registration registered(define_op<BimMask>);

}  // namespace

}  // namespace outrider
