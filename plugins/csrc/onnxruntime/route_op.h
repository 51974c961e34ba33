// Route as ONNX Runtime calls it: the router's product, the choice of experts and their weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"
#include "onnxruntime/work_items.h"

namespace outrider::engine {

class RouteOp {
  enum Input { kX, kRouter, kBias };

 public:
  static constexpr const char* kName = "Route";
  static constexpr std::size_t kInputs = kBias + 1, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t index) { return index == kBias; }

  RouteOp(const OrtApi& api, const OrtKernelInfo* info)
      : experts_(int_attribute(api, info, "experts")),
        top_k_(int_attribute(api, info, "top_k")),
        normalise_(int_attribute(api, info, "normalise") != 0) {
    if (top_k_ < 1 || top_k_ > experts_)
      check(api.CreateStatus(ORT_INVALID_ARGUMENT, "Route: top_k is no number of experts"));
  }

  void compute(const Run& run) const {
    std::int64_t shape[3];
    run.shape_of(kX, shape);
    const std::int64_t tokens = shape[0] * shape[1], size = shape[2];
    const std::int64_t panels = (experts_ + kLanes - 1) / kLanes, stride = panels * kLanes;
    const std::int64_t packed[] = {1, panels, size, kLanes}, biases[] = {experts_};
    run.expect(kRouter, packed);
    run.expect(kBias, biases);
    const std::int64_t routed[] = {shape[0], shape[1], experts_};
    const float *x = run.input<float>(kX), *bias = run.input<float>(kBias);
    float* to = run.output<float>(0, routed);

    thread_local Memory<const float*> pointers;
    thread_local Memory<float> memory;
    const float** rows = pointers.room(tokens);
    for (std::int64_t token = 0; token < tokens; ++token) rows[token] = x + token * size;
    float* logits = memory.room(tokens * stride);
    const FloatProduct product{run.input<float>(kRouter), size, rows, tokens, logits, stride};
    for_each_item(run, panels, tokens * size * experts_ < kMultiplied,
                  [&](std::int64_t panel) { kernels().multiply(product, panel, panel + 1); });

    thread_local Memory<float> values;
    thread_local Memory<std::int64_t> indices;
    const Room room{values.room(3 * stride), indices.room(top_k_)};
    for (std::int64_t token = 0; token < tokens; ++token) {
      float* row = logits + token * stride;
      for (std::int64_t expert = 0; bias != nullptr && expert < experts_; ++expert) row[expert] += bias[expert];
      weigh(row, room, to + token * experts_);
    }
  }

 private:
  static constexpr std::int64_t kMultiplied = 500000;  // multiply-adds

  struct Room {
    float* values;
    std::int64_t* chosen;
  };

  // The weights of all experts, given the logits of a token: 0 of those that it does not choose.
  void weigh(const float* logits, const Room& room, float* to) const {
    const RowKernels& rows = kernels().rows;
    float *best = room.values, *shares = best + experts_, *all = shares + experts_;
    rows.best(logits, experts_, top_k_, best, room.chosen);
    double total = 0.0;
    rows.weights(best, top_k_, best[0], 1.0f, shares);
    if (normalise_) {
      for (std::int64_t rank = 0; rank < top_k_; ++rank) total += static_cast<double>(shares[rank]);
    } else {
      rows.weights(logits, experts_, best[0], 1.0f, all);
      for (std::int64_t expert = 0; expert < experts_; ++expert) total += static_cast<double>(all[expert]);
    }
    const bool legible = std::all_of(logits, logits + experts_, [](float logit) { return logit == logit; });
    std::fill_n(to, experts_, 0.0f);
    for (std::int64_t rank = 0; rank < top_k_; ++rank)
      to[room.chosen[rank]] = legible ? static_cast<float>(static_cast<double>(shares[rank]) / total)
                                      : std::numeric_limits<float>::quiet_NaN();
  }

  std::int64_t experts_, top_k_;
  bool normalise_;
};

}  // namespace outrider::engine
