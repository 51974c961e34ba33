// QuantMatMul and QuantGather as ONNX Runtime calls them; their inputs stand in plugins/onnxruntime_ops.py.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"
#include "onnxruntime/quant_gather.h"
#include "onnxruntime/quant_kernel.h"

namespace outrider::engine {

// An op of an input of type `First` and packed weights, whose layout its attributes describe.
template <ONNXTensorElementDataType First>
class QuantOp {
 public:
  static constexpr std::size_t kInputs = 2, kOutputs = 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 0 ? First : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t) { return false; }

 protected:
  QuantOp(const OrtApi& api, const OrtKernelInfo* info, const char* name) : layout_(read_layout(api, info, name)) {}

  const QuantLayout& layout() const { return layout_; }

  const std::uint8_t* packed(const Run& run) const {
    const std::int64_t size[] = {layout_.groups * layout_.group_bytes};
    run.expect(1, size);
    return run.input<std::uint8_t>(1);
  }

 private:
  // So that the bytes of the largest weights can be counted in 64 bits.
  static constexpr std::int64_t kMost = std::int64_t{1} << 31;

  static QuantLayout read_layout(const OrtApi& api, const OrtKernelInfo* info, const std::string& op) {
    const auto attribute = [&](const char* name) { return int_attribute(api, info, name); };
    const auto expect = [&](bool holds, const char* what) {
      if (!holds) check(api.CreateStatus(ORT_INVALID_ARGUMENT, (op + ": " + what).c_str()));
    };
    const std::int64_t outputs = attribute("N"), inputs = attribute("K"), bits = attribute("bits");
    expect(bits == 4 || bits == 8, "bits must be 4 or 8");
    expect(outputs >= 1 && outputs <= kMost, "N must be from 1 to 2^31");
    expect(inputs >= kBlock && inputs <= kMost && inputs % kBlock == 0, "K must be a multiple of 32, at most 2^31");
    return quant_layout(outputs, inputs, static_cast<int>(bits), attribute("wide") != 0, attribute("minimums") != 0);
  }

  QuantLayout layout_;
};

class QuantMatMulOp : public QuantOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT> {
 public:
  static constexpr const char* kName = "QuantMatMul";

  QuantMatMulOp(const OrtApi& api, const OrtKernelInfo* info) : QuantOp(api, info, kName) {}

  void compute(const Run& run) const {
    const QuantLayout& layout = this->layout();
    std::vector<std::int64_t> shape = run.shape_of(0);
    if (shape.empty() || shape.back() != layout.inputs) run.refuse("x has another width than the weights' K");
    std::int64_t rows = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    shape.back() = layout.outputs;

    thread_local Memory<QuantBlock> quantised;
    QuantBlock* x = quantised.room(rows * layout.blocks);
    std::atomic<bool> failed = false;
    Job job{{layout, this->packed(run), x, rows, run.output<float>(0, shape)},
            run.input<float>(0), x, quant_kernels(), 1, failed};
    if (rows == 0) return;
    each(run, rows * layout.inputs < kQuantised ? 1 : rows, job, &quantize_part);
    each(run, rows * layout.inputs * layout.outputs < kMultiplied ? 1 : layout.groups, job, &multiply_part);
    if (failed) throw std::bad_alloc();
  }

 private:
  // Numbers, and multiply-adds, below which waking other threads costs more than they bring.
  static constexpr std::int64_t kQuantised = 65536, kMultiplied = 500000;

  struct Job {
    QuantProduct product;
    const float* x;
    QuantBlock* quantised;  // the product's input
    const QuantKernels& kernels;
    std::int64_t parts;
    std::atomic<bool>& failed;  // a part's memory did not suffice: nothing may be thrown past other threads' parts
  };

  // Runs `body` in as many parts as there are threads, of at most `most`.
  static void each(const Run& run, std::int64_t most, Job& job, void (*body)(void*, std::size_t)) {
    job.parts = std::min<std::int64_t>(most, run.threads());
    run.parallel_for(body, static_cast<std::size_t>(job.parts), &job, job.parts == 1);
  }

  static void quantize_part(void* state, std::size_t part) {
    const auto& job = *static_cast<const Job*>(state);
    const QuantProduct& product = job.product;
    const std::int64_t at = static_cast<std::int64_t>(part);
    for (std::int64_t row = at * product.rows / job.parts; row < (at + 1) * product.rows / job.parts; ++row)
      job.kernels.quantize(product.layout, job.x + row * product.layout.inputs, job.quantised + row, product.rows);
  }

  static void multiply_part(void* state, std::size_t part) {
    const auto& job = *static_cast<const Job*>(state);
    const std::int64_t at = static_cast<std::int64_t>(part), groups = job.product.layout.groups;
    try {
      job.kernels.multiply(job.product, at * groups / job.parts, (at + 1) * groups / job.parts);
    } catch (const std::bad_alloc&) {
      job.failed = true;
    }
  }
};

class QuantGatherOp : public QuantOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64> {
 public:
  static constexpr const char* kName = "QuantGather";

  QuantGatherOp(const OrtApi& api, const OrtKernelInfo* info) : QuantOp(api, info, kName) {}

  void compute(const Run& run) const {
    const QuantLayout& layout = this->layout();
    std::vector<std::int64_t> shape = run.shape_of(0);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    const auto* ids = run.input<std::int64_t>(0);
    for (std::int64_t i = 0; i < count; ++i)
      if (ids[i] < 0 || ids[i] >= layout.outputs) run.refuse("an index is outside of the table");
    shape.push_back(layout.inputs);
    auto* to = run.output<float>(0, shape);
    const std::uint8_t* packed = this->packed(run);
    for (std::int64_t i = 0; i < count; ++i) quant_row(layout, packed, ids[i], to + i * layout.inputs);
  }
};

}  // namespace outrider::engine
