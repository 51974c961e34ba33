#include "onnxruntime/drafting.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "choice.h"
#include "onnxruntime/kernels.h"
#include "tree_rerank.h"

namespace outrider::engine {
namespace {

constexpr std::int64_t kLikely = 64;  // tokens among which the cuts of top-k and top-p are looked for
constexpr float kCoolest = 1e-30f;    // temperatures below it are it
constexpr float kUnknownScore = -3.0e38f;
constexpr float kLeastMass = 1e-30f;
constexpr std::int64_t kSums = 16;  // at once: one sum waits for itself
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Memory of a thread, which only grows.
struct Workspace {
  std::vector<float> weights, paces, values;
  std::vector<std::int64_t> indices;

  void reserve(std::int64_t vocabulary, std::int64_t best) {
    weights.resize(std::max<std::size_t>(weights.size(), vocabulary));
    paces.resize(weights.size());
    values.resize(std::max<std::size_t>(values.size(), best));
    indices.resize(std::max<std::size_t>(indices.size(), best));
  }
};

using Filters = SamplingRow<float>;

// The smallest logit that top-k and top-p keep, looked for among the likeliest.
float least_kept(const RowKernels& rows, const float* logits, std::int64_t size, const Filters& filters, double total,
                 Workspace& space) {
  if (filters.top_k < 1.0f && filters.top_p >= 1.0f) return kNothing;
  const std::int64_t likely = std::min(kLikely, size);
  rows.best(logits, size, likely, space.values.data(), space.indices.data());
  const bool limited = filters.top_k >= 1.0f && filters.top_k <= static_cast<float>(likely);
  const std::int64_t most = limited ? static_cast<std::int64_t>(filters.top_k) : likely;
  double survivors = limited ? 0.0 : total;
  for (std::int64_t i = 0; limited && i < most; ++i) survivors += space.weights[space.indices[i]];
  std::int64_t kept = 0;
  for (double before = 0.0;
       kept < most && (kept == 0 || filters.top_p >= 1.0f || before < double{filters.top_p} * survivors); ++kept)
    before += space.weights[space.indices[kept]];
  return kept == likely && !limited ? kNothing : space.values[kept - 1];
}

// Weights become the probability that the target, which runs a race with this noise, chooses each token.
void to_masses(const RowKernels& rows, const float* logits, std::int64_t size, const Filters& filters, float least,
               const float* noise, float doubt, double total, Workspace& space) {
  float* weights = space.weights.data();
  float* paces = space.paces.data();
  for (std::int64_t i = 0; i < size; ++i) {
    const bool kept = logits[i] >= least && weights[i] >= filters.min_p;
    paces[i] = kept ? weights[i] / noise[i] : 0.0f;
  }
  float sums[kSums] = {};
  const float fastest = rows.highest(paces, size);
  std::int64_t i = 0;
  for (; i + kSums <= size; i += kSums)
    for (std::int64_t lane = 0; lane < kSums; ++lane) sums[lane] += paces[i + lane] / fastest;
  double all = 0.0;
  for (; i < size; ++i) all += paces[i] / fastest;
  for (const float sum : sums) all += sum;
  const auto near = static_cast<float>((1.0 - doubt) / all / fastest), far = static_cast<float>(doubt / total);
  for (std::int64_t j = 0; j < size; ++j) weights[j] = near * paces[j] + far * weights[j];
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
    const Filters filters = sampling_of(in.draft_sampling, tree);
    const bool sampled = filters.temperature > 0.0f;
    const float top = rows.highest(logits, size);
    const bool known = top > kNothing;
    double normaliser = 0.0;
    if (known && sampled) {
      float* weights = space.weights.data();
      const double total = rows.weights(logits, size, top, 1.0f / std::max(filters.temperature, kCoolest), weights);
      const float least = least_kept(rows, logits, size, filters, total, space);
      to_masses(rows, logits, size, filters, least, in.noise + tree * size, in.doubt, total, space);
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
