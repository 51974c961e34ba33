// TreeExpand and TreeRerank as ONNX Runtime calls them: plugins.ops has their inputs.
#pragma once

#include "choice.h"
#include "onnxruntime/drafting.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

class TreeExpandOp {
 public:
  static constexpr const char* kName = "TreeExpand";
  static constexpr std::size_t kInputs = 4, kOutputs = 3, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  static bool is_optional(std::size_t) { return false; }

  TreeExpandOp(const OrtApi& api, const OrtKernelInfo* info)
      : top_k_(int_attribute(api, info, "top_k")),
        doubt_(float_attribute(api, info, "doubt")) {}

  void compute(const Run& run) const {
    std::int64_t shape[3];
    run.shape_of(0, shape);
    if (top_k_ < 1 || top_k_ > shape[2]) run.refuse("top_k is no number of tokens");
    if (shape[1] < 1) run.refuse("there is no node to expand");
    const std::int64_t nodes[] = {shape[0], shape[1]};
    run.expect(1, nodes);
    const std::int64_t noise[] = {shape[0], shape[2]}, settings[] = {shape[0], kSettings};
    run.expect(2, noise);
    run.expect(3, settings);
    const TreeExpandInputs in{shape[0], shape[1], shape[2], top_k_, doubt_, run.input<float>(0), run.input<float>(1),
                              run.input<float>(2), run.input<float>(3)};
    const std::int64_t candidates[] = {shape[0], shape[1] * top_k_}, frontier[] = {shape[0], top_k_};
    tree_expand(in, {run.output<std::int64_t>(0, candidates), run.output<float>(1, candidates),
                     run.output<std::int64_t>(2, frontier)});
  }

 private:
  std::int64_t top_k_;
  float doubt_;
};

class TreeRerankOp {
 public:
  static constexpr const char* kName = "TreeRerank";
  static constexpr std::size_t kInputs = 4, kOutputs = 5, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index == 4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  static bool is_optional(std::size_t) { return false; }

  TreeRerankOp(const OrtApi& api, const OrtKernelInfo* info) : nodes_(int_attribute(api, info, "nodes")) {}

  void compute(const Run& run) const {
    std::int64_t shape[2];
    run.shape_of(1, shape);
    if (nodes_ < 2 || nodes_ - 1 > shape[1]) run.refuse("nodes is no number of candidates and a root");
    const std::int64_t depths[] = {shape[1]};
    run.expect(0, shape);
    run.expect(2, shape);
    run.expect(3, depths);
    const TreeRerankInputs in{shape[0], shape[1], nodes_, run.input<std::int64_t>(0), run.input<float>(1),
                              run.input<std::int64_t>(2), run.input<std::int64_t>(3)};
    const std::int64_t drafted[] = {shape[0], nodes_ - 1};
    tree_rerank(in, {run.output<std::int64_t>(0, drafted), run.output<std::int64_t>(1, drafted),
                     run.output<std::int64_t>(2, drafted), run.output<std::int64_t>(3, drafted),
                     run.output<float>(4, drafted)});
  }

 private:
  std::int64_t nodes_;
};

}  // namespace outrider::engine
