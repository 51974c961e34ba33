// MixtureOfExperts and QuantMixtureOfExperts as ONNX Runtime calls them; plugins/onnxruntime_ops.py has their inputs.
//
// Tokens are grouped by expert, so that an expert's weights are read once for all that chose it, and threads share
// experts by columns. A token's result is summed over its experts in ascending order, whatever else is in the pass.
#pragma once

#include <algorithm>

#include "onnxruntime/expert_pairs.h"
#include "onnxruntime/expert_weights.h"
#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"
#include "onnxruntime/work_items.h"

namespace outrider::engine {

template <class Weights>
class MixtureOfExpertsOp {
  enum Input { kX, kWeights, kGate, kUp, kDown, kGateBias, kUpBias, kDownBias };

 public:
  static constexpr const char* kName = Weights::kName;
  static constexpr std::size_t kInputs = kDownBias + 1, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index >= kGate && index <= kDown ? Weights::kType : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t index) { return index > kDown; }

  MixtureOfExpertsOp(const OrtApi& api, const OrtKernelInfo* info)
      : attributes_(api, info),
        sizes_{int_attribute(api, info, "experts"), int_attribute(api, info, "hidden"),
               int_attribute(api, info, "size")},
        alpha_(float_attribute(api, info, "alpha")),
        limit_(float_attribute(api, info, "limit")) {}

  void compute(const Run& run) const {
    std::int64_t shape[3], chosen[3];
    run.shape_of(kX, shape);
    run.shape_of(kWeights, chosen);
    if (chosen[0] != shape[0] || chosen[1] != shape[1]) run.refuse("x and weights have other tokens");
    const std::int64_t tokens = shape[0] * shape[1];
    const ExpertSizes& sizes = sizes_;
    if (shape[2] != sizes.hidden) run.refuse("x has another width than the weights");
    if (chosen[2] != sizes.experts) run.refuse("there are weights of another number of experts");
    Weights weights(run, attributes_, sizes, {kGate, kUp, kDown});
    const std::int64_t inner[] = {sizes.experts, sizes.inner}, outer[] = {sizes.experts, sizes.hidden};
    run.expect(kGateBias, inner);
    run.expect(kUpBias, inner);
    run.expect(kDownBias, outer);
    const float *share = run.input<float>(kWeights), *gate_bias = run.input<float>(kGateBias);
    const float *up_bias = run.input<float>(kUpBias), *down_bias = run.input<float>(kDownBias);
    float* to = run.output<float>(0, shape);

    thread_local ExpertPairs pairs_memory;
    thread_local Memory<float> memory;
    ExpertPairs& pairs = pairs_memory;
    pairs.read(share, tokens, sizes.experts);
    const std::int64_t inner_stride = weights.inner_stride(), outer_stride = weights.outer_stride();
    float* gate = memory.room(pairs.count() * (2 * inner_stride + outer_stride));
    float* up = gate + pairs.count() * inner_stride;
    float* out = up + pairs.count() * inner_stride;
    weights.take(run, run.input<float>(kX), gate, pairs);

    const bool few = pairs.count() * sizes.hidden * sizes.inner < kFewProducts;
    each_part(run, pairs, weights.gate_groups(), few, [&](const ExpertPart& part) {
      weights.gate(part, gate);
      weights.up(part, up);
      const std::int64_t from = part.first * Weights::kColumns;
      const std::int64_t count = std::min(part.last * Weights::kColumns, sizes.inner) - from;
      for (std::int64_t pair = part.begin; pair < part.end; ++pair) {
        float *g = gate + pair * inner_stride + from, *u = up + pair * inner_stride + from;
        if (gate_bias != nullptr) add(gate_bias + part.expert * sizes.inner + from, count, g);
        if (up_bias != nullptr) add(up_bias + part.expert * sizes.inner + from, count, u);
        if (limit_ > 0.0f) {
          kernels().rows.clamped(g, u, count, alpha_, limit_, g);
        } else {
          unit_(g, u, count, g);
        }
      }
      weights.keep(part, gate);
    });
    each_part(run, pairs, weights.down_groups(), few, [&](const ExpertPart& part) {
      weights.down(part, out);
      if (down_bias == nullptr) return;
      const std::int64_t from = part.first * Weights::kColumns;
      const std::int64_t count = std::min(part.last * Weights::kColumns, sizes.hidden) - from;
      for (std::int64_t pair = part.begin; pair < part.end; ++pair)
        add(down_bias + part.expert * sizes.hidden + from, count, out + pair * outer_stride + from);
    });
    for_each_item(run, tokens, pairs.count() * sizes.hidden < kFewNumbers, [&](std::int64_t token) {
      float* sum = to + token * sizes.hidden;
      std::fill_n(sum, sizes.hidden, 0.0f);
      std::int64_t expert = -1;
      for (std::int64_t i = pairs.first_of_token(token); i < pairs.first_of_token(token + 1); ++i) {
        do ++expert;
        while (share[token * sizes.experts + expert] == 0.0f);
        add_times(share[token * sizes.experts + expert], out + pairs.pair_of_token(i) * outer_stride, sizes.hidden, sum);
      }
    });
  }

 private:
  static constexpr std::int64_t kItems = 8;  // of a thread, about

  // Calls body(part) for parts of all experts that have tokens.
  template <class Body>
  static void each_part(const Run& run, const ExpertPairs& pairs, std::int64_t groups, bool few, const Body& body) {
    const std::int64_t active = pairs.active_count();
    if (active == 0) return;
    const std::int64_t wanted = few ? 1 : (kItems * run.threads() + active - 1) / active;
    const std::int64_t shares = std::min(groups, wanted);
    for_each_item(run, active * shares, few, [&](std::int64_t item) {
      const std::int64_t expert = pairs.active(item / shares), share = item % shares;
      body(ExpertPart{expert, pairs.first(expert), pairs.first(expert + 1), share * groups / shares,
                      (share + 1) * groups / shares});
    });
  }

  static void add(const float* __restrict added, std::int64_t count, float* __restrict to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += added[i];
  }

  static void add_times(float factor, const float* __restrict x, std::int64_t count, float* __restrict to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * x[i];
  }

  typename Weights::Attributes attributes_;
  ExpertSizes sizes_;
  float alpha_, limit_;
  GatedUnit unit_ = kernels().rows.unit("silu");
};

}  // namespace outrider::engine
