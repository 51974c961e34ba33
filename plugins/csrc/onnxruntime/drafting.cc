#include "onnxruntime/drafting.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "onnxruntime/kernels.h"
#include "tree_rerank.h"

namespace outrider::engine {
namespace {

constexpr std::int64_t kLikely = 64;  // tokens among which the cuts of top-k and top-p are looked for
constexpr float kCoolest = 1e-30f;    // temperatures below it are it
constexpr float kUnknownScore = -3.0e38f;
constexpr float kLeastMass = 1e-30f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Memory of a thread, which only grows.
struct Workspace {
  std::vector<float> weights, values;
  std::vector<std::int64_t> indices;

  void reserve(std::int64_t vocabulary, std::int64_t best) {
    weights.resize(std::max<std::size_t>(weights.size(), vocabulary));
    values.resize(std::max<std::size_t>(values.size(), best));
    indices.resize(std::max<std::size_t>(indices.size(), best));
  }
};

struct Filters {
  float temperature;
  std::int64_t top_k;
  float top_p;
};

// The smallest logit that top-k and top-p keep, looked for among the likeliest.
float least_kept(const RowKernels& rows, const float* logits, std::int64_t size, const Filters& filters, double total,
                 Workspace& space) {
  if (filters.top_k <= 0 && filters.top_p >= 1.0f) return kNothing;
  const std::int64_t likely = std::min(kLikely, size);
  rows.best(logits, size, likely, space.values.data(), space.indices.data());
  const bool limited = filters.top_k > 0 && filters.top_k <= likely;
  const std::int64_t most = limited ? filters.top_k : likely;
  double survivors = limited ? 0.0 : total;
  for (std::int64_t i = 0; limited && i < most; ++i) survivors += space.weights[space.indices[i]];
  std::int64_t kept = 0;
  for (double before = 0.0;
       kept < most && (kept == 0 || filters.top_p >= 1.0f || before < double{filters.top_p} * survivors); ++kept)
    before += space.weights[space.indices[kept]];
  return kept == likely && !limited ? kNothing : space.values[kept - 1];
}

// Weights become the probability that the target, which draws with `draw`, chooses each token.
void to_masses(const float* logits, std::int64_t size, float least, float draw, float spread, float doubt, double total,
               float* weights) {
  double kept_total = 0.0;
  for (std::int64_t i = 0; i < size; ++i) kept_total += logits[i] >= least ? weights[i] : 0.0f;
  const double first = (double{draw} - spread) * kept_total, last = (double{draw} + spread) * kept_total;
  const double near = (1.0 - doubt) / (2.0 * spread) / kept_total, far = doubt / total;
  double below = 0.0;
  for (std::int64_t i = 0; i < size; ++i) {
    double inside = 0.0;
    if (logits[i] >= least) {
      const double above = below + weights[i];
      inside = std::max(0.0, std::min(above, last) - std::max(below, first));
      below = above;
    }
    weights[i] = static_cast<float>(near * inside + far * weights[i]);
  }
}

}  // namespace

void tree_expand(const TreeExpandInputs& in, const TreeExpandOutputs& out) {
  thread_local Workspace space;
  const RowKernels& rows = kernels().rows;
  const std::int64_t size = in.vocabulary, k = in.top_k;
  space.reserve(size, std::max(kLikely, k));
  for (std::int64_t node = 0; node < in.trees * in.nodes; ++node) {
    const std::int64_t tree = node / in.nodes;
    const float* logits = in.logits + node * size;
    const bool sampled = in.temperature[tree] > 0.0f;
    const float top = rows.highest(logits, size);
    const bool known = top > kNothing;
    double normaliser = 0.0;
    if (known && sampled) {
      const Filters filters{std::max(in.temperature[tree], kCoolest), in.top_k_filter[tree], in.top_p[tree]};
      float* weights = space.weights.data();
      const double total = rows.weights(logits, size, top, 1.0f / filters.temperature, weights);
      const float least = least_kept(rows, logits, size, filters, total, space);
      to_masses(logits, size, least, in.draws[tree], in.spread, in.doubt, total, weights);
      rows.best(weights, size, k, space.values.data(), space.indices.data());
    } else {
      rows.best(logits, size, k, space.values.data(), space.indices.data());
      if (known) normaliser = top + std::log(rows.weights(logits, size, top, 1.0f, nullptr));
    }
    for (std::int64_t i = 0; i < k; ++i) {
      const float value = space.values[i];
      const double log_prob = !known    ? double{kUnknownScore}
                              : sampled ? std::log(double{std::max(value, kLeastMass)})
                                        : value - normaliser;
      const float sum = static_cast<float>(in.score[node] + log_prob);
      out.token[node * k + i] = space.indices[i];
      out.candidate_score[node * k + i] = sum < in.score[node] ? sum : in.score[node];  // the latter for NaN
    }
  }
  for (std::int64_t tree = 0; tree < in.trees; ++tree)
    rows.best(out.candidate_score + tree * in.nodes * k, in.nodes * k, k, space.values.data(), out.frontier + tree * k);
}

void tree_rerank(const TreeRerankInputs& in, const TreeRerankOutputs& out) {
  thread_local Workspace space;
  const std::int64_t drafted = in.nodes - 1;
  space.reserve(0, drafted);
  for (std::int64_t tree = 0; tree < in.trees; ++tree) {
    const std::int64_t from = tree * in.candidates;
    std::int64_t* chosen = out.candidate + tree * drafted;
    kernels().rows.best(in.score + from, in.candidates, drafted, space.values.data(), chosen);
    std::sort(chosen, chosen + drafted);
    static_assert(sizeof(i64) == sizeof(std::int64_t), "node_of counts in i64");
    for (std::int64_t i = 0; i < drafted; ++i) {
      const std::int64_t candidate = from + chosen[i], to = tree * drafted + i;
      out.token[to] = in.token[candidate];
      out.score[to] = in.score[candidate];
      out.depth[to] = in.depth[chosen[i]];
      out.parent[to] = node_of(reinterpret_cast<const i64*>(chosen), drafted, in.parent[candidate]);
    }
  }
}

}  // namespace outrider::engine
