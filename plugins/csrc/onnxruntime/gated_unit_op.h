// GatedUnit as ONNX Runtime calls it: gate and up side by side, as one product leaves them.
#pragma once

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

class GatedUnitOp {
 public:
  static constexpr const char* kName = "GatedUnit";
  static constexpr std::size_t kInputs = 1, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t) { return false; }

  GatedUnitOp(const OrtApi& api, const OrtKernelInfo* info)
      : unit_(kernels().rows.unit(text_attribute(api, info, "activation").c_str())) {
    if (unit_ == nullptr) check(api.CreateStatus(ORT_INVALID_ARGUMENT, "GatedUnit: there is no such activation"));
  }

  void compute(const Run& run) const {
    std::int64_t shape[3];
    run.shape_of(0, shape);
    if (shape[2] % 2 != 0) run.refuse("gate and up are not of one size");
    const std::int64_t rows = shape[0] * shape[1], size = shape[2] / 2;
    const std::int64_t out[] = {shape[0], shape[1], size};
    Job job{run.input<float>(0), run.output<float>(0, out), size, unit_};
    run.parallel_for(&one_row, static_cast<std::size_t>(rows), &job, rows * size < kSmall);
  }

 private:
  static constexpr std::int64_t kSmall = 16384;  // elements

  struct Job {
    const float* both;  // [rows, 2 * size]
    float* to;          // [rows, size]
    std::int64_t size;
    GatedUnit unit;
  };

  static void one_row(void* state, std::size_t row) {
    const auto& job = *static_cast<const Job*>(state);
    const float* gate = job.both + static_cast<std::int64_t>(row) * 2 * job.size;
    job.unit(gate, gate + job.size, job.size, job.to + static_cast<std::int64_t>(row) * job.size);
  }

  GatedUnit unit_;
};

}  // namespace outrider::engine
