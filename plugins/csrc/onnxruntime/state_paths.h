// Where tokens of a step stand on the paths of their branches, for ops whose states recur.
#pragma once

#include <vector>

#include "onnxruntime/ort.h"

namespace outrider::engine {

// `parent` and `branch` of the step's tokens; of each branch, the rows of its log that were accepted, and how many of its
// tokens go into its state. Read from five inputs, the first of which is input `first` of the op.
struct StatePaths {
  std::int64_t tokens, branches, rows;
  const std::int64_t *parent, *branch, *replay, *replays, *fold;
  std::vector<std::vector<std::int64_t>> of;  // tokens of each branch, ascending

  StatePaths(const Run& run, std::size_t first, std::int64_t branches, std::int64_t rows)
      : branches(branches), rows(rows), of(static_cast<std::size_t>(branches)) {
    std::int64_t shape[1];
    run.shape_of(first, shape);
    const std::int64_t by_branch[] = {branches}, replayed[] = {branches, rows};
    run.expect(first + 1, shape);
    run.expect(first + 2, replayed);
    run.expect(first + 3, by_branch);
    run.expect(first + 4, by_branch);
    tokens = shape[0];
    parent = run.input<std::int64_t>(first);
    branch = run.input<std::int64_t>(first + 1);
    replay = run.input<std::int64_t>(first + 2);
    replays = run.input<std::int64_t>(first + 3);
    fold = run.input<std::int64_t>(first + 4);
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (parent[i] < -1 || parent[i] >= i) run.refuse("a parent does not come before its token");
      if (has_branch(i)) of[branch[i]].push_back(i);
    }
    for (std::int64_t number = 0; number < branches; ++number) {
      const auto news = static_cast<std::int64_t>(of[number].size());
      if (news == 0) continue;
      if (fold[number] < 0 || fold[number] > news || news - fold[number] > rows)
        run.refuse("a branch's tokens are more than are folded and logged");
      if (replays[number] < 0 || replays[number] > rows) run.refuse("more records are replayed than there are");
      for (std::int64_t r = 0; r < replays[number]; ++r) {
        const std::int64_t row = replay[number * rows + r];
        if (row < 0 || row >= rows) run.refuse("a record is replayed that is not there");
      }
    }
  }

  // Tokens of no branch have numbers that none has.
  bool has_branch(std::int64_t token) const { return branch[token] >= 0 && branch[token] < branches; }

  // The row of the log that is the branch's r-th accepted record.
  std::int64_t row(std::int64_t number, std::int64_t r) const { return number * rows + replay[number * rows + r]; }

  // Calls each(token, row of the log) for each token that is logged.
  template <class Each>
  void each_logged(const Each& each) const {
    for (std::int64_t number = 0; number < branches; ++number)
      for (std::size_t i = static_cast<std::size_t>(fold[number]); i < of[number].size(); ++i)
        each(of[number][i], number * rows + static_cast<std::int64_t>(i) - fold[number]);
  }
};

}  // namespace outrider::engine
