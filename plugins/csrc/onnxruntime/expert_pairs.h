// Which tokens an expert has, and which experts a token has.
#pragma once

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {

// Pairs of a token and an expert that it chose: expert after expert, an expert's tokens ascending. Memory grows only.
class ExpertPairs {
 public:
  // Reads weights [tokens, experts], of which those that are 0 are of experts that a token did not choose.
  void read(const float* weights, std::int64_t tokens, std::int64_t experts) {
    experts_ = experts;
    starts_ = counts_.room(experts + 1);
    token_starts_ = token_counts_.room(tokens + 1);
    for (std::int64_t e = 0; e <= experts; ++e) starts_[e] = 0;
    token_starts_[0] = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::int64_t chosen = 0;
      for (std::int64_t e = 0; e < experts; ++e) {
        if (weights[t * experts + e] == 0.0f) continue;
        ++starts_[e + 1];
        ++chosen;
      }
      token_starts_[t + 1] = token_starts_[t] + chosen;
    }
    for (std::int64_t e = 0; e < experts; ++e) starts_[e + 1] += starts_[e];
    const std::int64_t count = starts_[experts];
    token_of_ = token_memory_.room(count);
    by_token_ = order_memory_.room(count);
    active_ = active_memory_.room(experts);
    active_count_ = 0;
    std::int64_t* at = cursor_memory_.room(tokens);
    for (std::int64_t t = 0; t < tokens; ++t) at[t] = token_starts_[t];
    std::int64_t pair = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (starts_[e + 1] == starts_[e]) continue;
      active_[active_count_++] = e;
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (weights[t * experts + e] == 0.0f) continue;
        token_of_[pair] = t;
        by_token_[at[t]++] = pair++;
      }
    }
  }

  std::int64_t count() const { return starts_[experts_]; }
  // Experts with tokens, ascending.
  std::int64_t active_count() const { return active_count_; }
  std::int64_t active(std::int64_t i) const { return active_[i]; }
  // An expert's pairs are first(e) to first(e + 1).
  std::int64_t first(std::int64_t expert) const { return starts_[expert]; }
  std::int64_t token(std::int64_t pair) const { return token_of_[pair]; }
  // A token's pairs, their experts ascending, are pair_of_token(i) for i from first_of_token(t) to that of t + 1.
  std::int64_t first_of_token(std::int64_t token) const { return token_starts_[token]; }
  std::int64_t pair_of_token(std::int64_t i) const { return by_token_[i]; }

 private:
  std::int64_t experts_ = 0, active_count_ = 0;
  std::int64_t *starts_ = nullptr, *token_starts_ = nullptr, *token_of_ = nullptr, *by_token_ = nullptr,
               *active_ = nullptr;
  Memory<std::int64_t> counts_, token_counts_, token_memory_, order_memory_, active_memory_, cursor_memory_;
};

}  // namespace outrider::engine
