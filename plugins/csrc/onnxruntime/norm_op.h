// RmsNorm as ONNX Runtime calls it, with the residual sum before it.
#pragma once

#include <cmath>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

class RmsNormOp {
  enum Input { kX, kWeight, kAdded };
  enum Output { kNormed, kSum };

 public:
  static constexpr const char* kName = "RmsNorm";
  static constexpr std::size_t kInputs = kAdded + 1, kOutputs = kSum + 1, kRequired = kSum;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t index) { return index == kAdded; }

  RmsNormOp(const OrtApi& api, const OrtKernelInfo* info) : epsilon_(float_attribute(api, info, "epsilon")) {}

  void compute(const Run& run) const {
    const std::vector<std::int64_t> shape = run.shape_of(kX);
    std::int64_t rows = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    const std::int64_t size = shape.empty() ? 1 : shape.back();
    const std::int64_t width[] = {size};
    run.expect(kWeight, width);
    if (run.input<float>(kAdded) != nullptr && run.shape_of(kAdded) != shape) run.refuse("x and what is added differ");
    Job job{run.input<float>(kX), run.input<float>(kAdded), run.input<float>(kWeight),
            run.output<float>(kNormed, shape), nullptr, size, epsilon_};
    if (job.added != nullptr) job.sum = run.output<float>(kSum, shape);
    run.parallel_for(&one_row, static_cast<std::size_t>(rows), &job, rows * size < kSmall);
  }

 private:
  static constexpr std::int64_t kSmall = 65536;  // elements

  struct Job {
    const float *x, *added, *weight;  // [rows, size], the same or null, [size]
    float *normed, *sum;              // [rows, size]; the sum is null where it is not read
    std::int64_t size;
    float epsilon;
  };

  static void one_row(void* state, std::size_t row) {
    const auto& job = *static_cast<const Job*>(state);
    const RowKernels& rows = kernels().rows;
    const std::int64_t at = static_cast<std::int64_t>(row) * job.size;
    const float *x = job.x + at, *added = job.added == nullptr ? nullptr : job.added + at;
    float* normed = job.normed + at;
    float* sum = added == nullptr ? nullptr : job.sum == nullptr ? normed : job.sum + at;
    const float squares = rows.squares(x, added, job.size, sum);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(job.size) + job.epsilon);
    rows.scaled(added == nullptr ? x : sum, factor, job.weight, job.size, normed);
  }

  float epsilon_;
};

}  // namespace outrider::engine
