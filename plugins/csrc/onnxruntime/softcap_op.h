// Softcap as ONNX Runtime calls it: cap * tanh(x / cap), number by number.
#pragma once

#include <algorithm>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

class SoftcapOp {
 public:
  static constexpr const char* kName = "Softcap";
  static constexpr std::size_t kInputs = 1, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t) { return false; }

  SoftcapOp(const OrtApi& api, const OrtKernelInfo* info) : cap_(float_attribute(api, info, "cap")) {
    if (!(cap_ > 0.0f)) check(api.CreateStatus(ORT_INVALID_ARGUMENT, "Softcap: cap must be positive"));
  }

  void compute(const Run& run) const {
    const std::vector<std::int64_t> shape = run.shape_of(0);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    Job job{run.input<float>(0), run.output<float>(0, shape), count, cap_};
    const std::int64_t pieces = (count + kPiece - 1) / kPiece;
    run.parallel_for(&one_piece, static_cast<std::size_t>(pieces), &job, pieces < 2);
  }

 private:
  static constexpr std::int64_t kPiece = 8192;  // elements

  struct Job {
    const float* x;
    float* to;
    std::int64_t count;
    float cap;
  };

  static void one_piece(void* state, std::size_t piece) {
    const auto& job = *static_cast<const Job*>(state);
    const std::int64_t first = static_cast<std::int64_t>(piece) * kPiece;
    kernels().rows.capped(job.x + first, job.cap, std::min(kPiece, job.count - first), job.to + first);
  }

  float cap_;
};

}  // namespace outrider::engine
