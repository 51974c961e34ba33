// Common to the accept ops: the trees of a step are checked, walked from their roots, and written as committed tokens
// and kept rows.
#pragma once

#include <algorithm>

#include "../sample.h"
#include "../tree_accept.h"
#include "op.h"

namespace outrider {

constexpr i64 kNothing = -1;  // stands in outputs after what was committed or kept

// A visited node's outcome: the token after it, and the place of the child that holds it; kNothing ends the walk.
struct Visit {
  i64 token;
  i64 next;
};

// Collects the kept rows in ascending order: pending tokens (rows without logits) and visited nodes.
class KeptRows {
 public:
  KeptRows(const Trees& trees, i64* kept) : trees_(trees), kept_(kept) {}

  void visit(i64 place) {
    pending_before(trees_.logit_indices[place]);
    kept_[count_++] = row_++;
    ++place_;
  }

  i64 finish(i64 new_tokens) {
    pending_before(new_tokens);
    return count_;
  }

 private:
  void pending_before(i64 end) {
    for (; row_ < end; ++row_) {
      if (place_ < trees_.count && trees_.logit_indices[place_] == row_) {
        ++place_;  // a node that was not visited
      } else {
        kept_[count_++] = row_;
      }
    }
  }

  const Trees& trees_;
  i64* kept_;
  i64 row_ = 0;
  i64 place_ = 0;
  i64 count_ = 0;
};

class TreeWalk {
 public:
  explicit TreeWalk(const Binding& bound);

  // The trees of rows that were checked (RowChoices). Refuses what makes no trees, or too many.
  Trees trees(const i64* logit_indices, i64 count, i64 new_tokens) const;

  // Walks every tree: `step(place, end)` is the Visit of the node at `place`, whose tree ends before place `end`.
  template <typename Step>
  void run(const Trees& trees, i64 new_tokens, Step step) const {
    std::fill_n(committed_, trees.count, kNothing);
    std::fill_n(kept_indices_, new_tokens, kNothing);
    std::fill_n(accepted_count_, most_trees_, 0);
    KeptRows kept(trees, kept_indices_);
    i64 tree = 0;
    for (i64 root = 0, end; root < trees.count; root = end) {
      end = tree_end(trees, root);
      if (fills_up(trees, root)) continue;
      i64 committed = 0;
      for (i64 node = root; node != kNothing;) {
        const Visit visit = step(node, end);
        kept.visit(node);
        committed_[root + committed++] = visit.token;
        node = visit.next;
      }
      accepted_count_[tree++] = committed;
    }
    kept_count_[0] = kept.finish(new_tokens);
  }

 private:
  static i64 tree_end(const Trees& trees, i64 root);
  bool fills_up(const Trees& trees, i64 place) const { return branch_[trees.logit_indices[place]] == kNoBranch; }

  const char* op_;
  const i64* token_ids_;
  const i64* parent_;
  const i64* branch_;
  i64* committed_;
  i64* accepted_count_;
  i64* kept_indices_;
  i64* kept_count_;
  i64 most_trees_;
};

}  // namespace outrider
