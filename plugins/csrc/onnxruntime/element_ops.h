// Functions of single numbers as ONNX Runtime calls them.
#pragma once

#include <algorithm>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

// `Function` has kName, a constructor from (api, info), and row(x, count, to).
template <class Function>
class ElementOp {
 public:
  static constexpr const char* kName = Function::kName;
  static constexpr std::size_t kInputs = 1, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t) { return false; }

  ElementOp(const OrtApi& api, const OrtKernelInfo* info) : function_(api, info) {}

  void compute(const Run& run) const {
    const std::vector<std::int64_t> shape = run.shape_of(0);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    Job job{run.input<float>(0), run.output<float>(0, shape), count, function_};
    const std::int64_t pieces = (count + kPiece - 1) / kPiece;
    run.parallel_for(&one_piece, static_cast<std::size_t>(pieces), &job, pieces < 2);
  }

 private:
  static constexpr std::int64_t kPiece = 8192;  // elements

  struct Job {
    const float* x;
    float* to;
    std::int64_t count;
    const Function& function;
  };

  static void one_piece(void* state, std::size_t piece) {
    const auto& job = *static_cast<const Job*>(state);
    const std::int64_t first = static_cast<std::int64_t>(piece) * kPiece;
    job.function.row(job.x + first, std::min(kPiece, job.count - first), job.to + first);
  }

  Function function_;
};

// cap * tanh(x / cap).
class Softcap {
 public:
  static constexpr const char* kName = "Softcap";

  Softcap(const OrtApi& api, const OrtKernelInfo* info) : cap_(float_attribute(api, info, "cap")) {
    if (!(cap_ > 0.0f)) check(api.CreateStatus(ORT_INVALID_ARGUMENT, "Softcap: cap must be positive"));
  }
  void row(const float* x, std::int64_t count, float* to) const { kernels().rows.capped(x, cap_, count, to); }

 private:
  float cap_;
};

// 1 / (1 + exp(-x)).
class Sigmoid {
 public:
  static constexpr const char* kName = "Sigmoid";

  Sigmoid(const OrtApi&, const OrtKernelInfo*) {}
  void row(const float* x, std::int64_t count, float* to) const { kernels().rows.share(x, count, to); }
};

}  // namespace outrider::engine
