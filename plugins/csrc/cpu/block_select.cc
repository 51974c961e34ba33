// BlockSelect on the CPU. Scores are summed over a head's elements in order, many blocks side by side: the same bits at
// any vector width.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "../rank_key.h"
#include "clones.h"
#include "gil.h"
#include "op.h"
#include "partial_layout.h"
#include "refuse.h"

namespace outrider {

namespace {

constexpr i64 kStrip = 64;  // blocks whose scores by one query are in registers together

// The scores of a strip's blocks by one query, by summaries `[head_dim, kStrip]`.
OUTRIDER_CLONES void score_strip(const float* query, const float* key_max, const float* key_min, i64 head_dim,
                                 float* to) {
  float high[kStrip] = {}, low[kStrip] = {};
  for (i64 d = 0; d < head_dim; ++d)
    for (i64 b = 0; b < kStrip; ++b) {
      high[b] += query[d] * key_max[d * kStrip + b];
      low[b] += query[d] * key_min[d * kStrip + b];
    }
  for (i64 b = 0; b < kStrip; ++b) {
    const float h = worth(high[b]), l = worth(low[b]);
    to[b] = h > l ? h : l;
  }
}

class BlockSelect {
 public:
  static constexpr const char* kOp = "BlockSelect";

  explicit BlockSelect(const Binding& bound)
      : layout_(bound_layout(bound)),
        reduction_(bound.size("reduction")),
        most_(reduction_ == kLast ? 1 : bound.size("most_queries")),
        queries_(bound.input<float>("queries")),
        key_max_(bound.input<float>("key_max")),
        key_min_(bound.input<float>("key_min")),
        kept_indices_(bound.input<i64>("kept_indices")),
        kept_count_(bound.input<i64>("kept_count")),
        layer_windows_(bound.input<i64>("layer_windows")),
        row_(bound.input<i64>("row")),
        covered_(bound.input<i64>("covered")),
        budget_(bound.input<i64>("budget")),
        selected_(bound.output<i64>("selected")),
        rows_(bound.size("R")),
        layers_(bound.size("layers")),
        heads_(bound.size("heads")),
        head_dim_(bound.size("head_dim")),
        blocks_(bound.size("blocks")),
        retrieval_(bound.size("retrieval")),
        new_(bound.size("N")),
        width_(bound.size("num_heads * head_dim")) {
    check_value(kOp, "reduction", 0, reduction_, kMax, kLast);
    check_value(kOp, "most_queries", 0, bound.size("most_queries"), 1, 1 << 20);
    group_ = width_ / (heads_ * head_dim_);
    if (group_ < 1 || group_ * heads_ * head_dim_ != width_)
      refuse(kOp, "queries are " + std::to_string(width_) + " wide, no multiple of the key heads' width.");
    score_.resize(static_cast<size_t>(blocks_));
    ranks_.resize(static_cast<size_t>(blocks_));
    strips_.resize(static_cast<size_t>(2 * head_dim_ * kStrip));
  }

  void call() {
    check_value(kOp, "row", 0, row_[0], 0, rows_ - 1);
    const i64 candidates = layout_.candidates(std::max<i64>(covered_[0], 0));
    if (covered_[0] < 0 || candidates > blocks_)
      refuse(kOp, "covered[0] is " + std::to_string(covered_[0]) + "; there are " + std::to_string(blocks_) + " blocks.");
    check_value(kOp, "kept_count", 0, kept_count_[0], 1, new_);
    for (i64 i = 0; i < kept_count_[0]; ++i) check_value(kOp, "kept_indices", i, kept_indices_[i], 0, new_ - 1);
    check_value(kOp, "budget", 0, budget_[0], 0, retrieval_);
    const i64 count = std::min(budget_[0], candidates);
    i64 scoring = 0;  // layers
    for (i64 i = 0; i < layers_; ++i) {
      check_value(kOp, "layer_windows", i, layer_windows_[i], 0, kMostKeys);
      scoring += layer_windows_[i] == 0;
      if (count < candidates && layout_.reach(layer_windows_[i]) > count)
        refuse(kOp, std::to_string(count) + " blocks and the window do not reach the last " +
                        std::to_string(layer_windows_[i]) + " tokens, which layer " + std::to_string(i) + " sees.");
    }
    const i64 asked = std::min(most_, kept_count_[0]);
    const GilReleasedIfLong released(scoring * heads_ * group_ * asked * candidates * head_dim_ * 2);
    for (i64 of = 0; of < layers_ * heads_; ++of) {
      i64* to = selected_ + of * retrieval_;
      const i64 window = layer_windows_[of / heads_];
      if (count == candidates || window > 0) {
        const i64 reach = std::min(count, layout_.reach(window));
        for (i64 i = 0; i < count; ++i) to[i] = layout_.recent(i, count, reach, candidates);
      } else {
        score(of, candidates);
        select(candidates, count, to);
      }
      std::fill(to + count, to + retrieval_, i64{-1});
    }
  }

 private:
  // The scores of all candidates by one layer's head.
  void score(i64 of, i64 candidates) {
    const i64 layer = of / heads_, head = of % heads_;
    const i64 summaries = (row_[0] * layers_ * heads_ + of) * head_dim_ * blocks_;
    const float *most = key_max_ + summaries, *least = key_min_ + summaries;
    const i64 first = std::max<i64>(0, kept_count_[0] - most_);
    float *const strip_most = strips_.data(), *const strip_least = strip_most + head_dim_ * kStrip;
    float strip[kStrip];
    for (i64 start = 0; start < candidates; start += kStrip) {
      const i64 blocks = std::min(kStrip, candidates - start);
      for (i64 d = 0; d < head_dim_; ++d) {  // every query reads it: side by side, it stays in the fastest cache
        std::copy_n(most + d * blocks_ + start, blocks, strip_most + d * kStrip);
        std::copy_n(least + d * blocks_ + start, blocks, strip_least + d * kStrip);
      }
      float* score = score_.data() + start;
      bool begun = false;
      for (i64 i = first; i < kept_count_[0]; ++i) {
        const float* queries = queries_ + (layer * new_ + kept_indices_[i]) * width_ + head * group_ * head_dim_;
        for (i64 g = 0; g < group_; ++g) {
          score_strip(queries + g * head_dim_, strip_most, strip_least, head_dim_, strip);
          for (i64 b = 0; b < blocks; ++b) {
            if (!begun)
              score[b] = strip[b];
            else if (reduction_ == kMax)
              score[b] = std::max(score[b], strip[b]);
            else
              score[b] += strip[b];
          }
          begun = true;
        }
      }
    }
  }

  void select(i64 candidates, i64 count, i64* to) {
    for (i64 b = 0; b < candidates; ++b) ranks_[b] = rank_key(worth(score_[b]), b);
    std::nth_element(ranks_.begin(), ranks_.begin() + count, ranks_.begin() + candidates, std::greater<>());
    std::transform(ranks_.begin(), ranks_.begin() + count, to, index_of);
    std::sort(to, to + count);
  }

  PartialLayout layout_;
  i64 reduction_, most_;
  const float *queries_, *key_max_, *key_min_;
  const i64 *kept_indices_, *kept_count_, *layer_windows_, *row_, *covered_, *budget_;
  i64* selected_;
  i64 rows_, layers_, heads_, head_dim_, blocks_, retrieval_, new_, width_, group_;
  std::vector<float> score_;
  std::vector<u64> ranks_;
  std::vector<float> strips_;  // summaries of a strip's blocks, the largest keys and the least
};

const Registration registered(define_op<BlockSelect>);

}  // namespace

}  // namespace outrider
