// Ops of a draft graph on the CPU. A draft is a guess: its last bits are this machine's.
#pragma once

#include <cstdint>

namespace outrider::engine {

struct TreeExpandInputs {
  std::int64_t trees, nodes, vocabulary, top_k;
  float doubt;
  const float* logits;          // [B, F, V]
  const float* score;           // [B, F]
  const float* noise;           // [B, V]
  const float* draft_sampling;  // [B, kSettings]
};

struct TreeExpandOutputs {
  std::int64_t* token;     // [B, F * top_k]
  float* candidate_score;  // [B, F * top_k]
  std::int64_t* frontier;  // [B, top_k]
};

// Wants 0 < top_k <= V.
void tree_expand(const TreeExpandInputs& in, const TreeExpandOutputs& out);

struct TreeRerankInputs {
  std::int64_t trees, candidates, nodes;
  const std::int64_t* token;   // [B, C]
  const float* score;          // [B, C]
  const std::int64_t* parent;  // [B, C]: a candidate, or -1
  const std::int64_t* depth;   // [C]
};

struct TreeRerankOutputs {  // [B, nodes - 1] each
  std::int64_t *candidate, *token, *parent, *depth;
  float* score;
};

// Wants 0 < nodes - 1 <= C.
void tree_rerank(const TreeRerankInputs& in, const TreeRerankOutputs& out);

}  // namespace outrider::engine
