// The weights of a layer's experts as float32 or as packed integers: their inputs, and products of an expert's rows.
//
// Each has kName, the op's name, and of one run:
//   gate_groups(), down_groups()   parts in which an expert's outputs are multiplied, of kColumns columns
//   inner_stride(), outer_stride() floats from a row of results to the next
//   take(..)                       makes the rows of all pairs legible
//   gate(pairs of an expert, groups, to), up(..), down(..)
//   keep(..)                       makes gated results legible for down
#pragma once

#include <algorithm>
#include <string>

#include "onnxruntime/expert_pairs.h"
#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"
#include "onnxruntime/quant_kernel.h"
#include "onnxruntime/work_items.h"

namespace outrider::engine {

// Sizes of one run.
struct ExpertSizes {
  std::int64_t experts, hidden, inner;  // inner: outputs of gate and up, inputs of down
};

// Groups [first, last) of outputs of the rows of pairs [begin, end), which are `expert`'s.
struct ExpertPart {
  std::int64_t expert, begin, end, first, last;
  std::int64_t rows() const { return end - begin; }
};

// Numbers of rows, and multiply-adds, below which waking other threads costs more than they bring.
constexpr std::int64_t kFewNumbers = 65536, kFewProducts = 500000;

// As plugins/panel_layout.py packs them: [experts, panels, inputs, kLanes].
class FloatExperts {
 public:
  static constexpr const char* kName = "MixtureOfExperts";
  static constexpr ONNXTensorElementDataType kType = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  static constexpr std::int64_t kColumns = kLanes;

  struct Attributes {
    Attributes(const OrtApi&, const OrtKernelInfo*) {}
  };

  FloatExperts(const Run& run, const Attributes&, const ExpertSizes& sizes, const std::size_t (&inputs)[3])
      : sizes_(sizes), inner_panels_(panels(sizes.inner)), outer_panels_(panels(sizes.hidden)) {
    const std::int64_t in[] = {sizes.experts, inner_panels_, sizes.hidden, kLanes};
    const std::int64_t out[] = {sizes.experts, outer_panels_, sizes.inner, kLanes};
    run.expect(inputs[0], in);
    run.expect(inputs[1], in);
    run.expect(inputs[2], out);
    for (std::size_t i = 0; i < 3; ++i) weights_[i] = run.input<float>(inputs[i]);
  }

  std::int64_t gate_groups() const { return inner_panels_; }
  std::int64_t down_groups() const { return outer_panels_; }
  std::int64_t inner_stride() const { return inner_panels_ * kLanes; }
  std::int64_t outer_stride() const { return outer_panels_ * kLanes; }

  void take(const Run&, const float* x, const float* gated, const ExpertPairs& pairs) {
    thread_local Memory<const float*> memory;
    rows_ = memory.room(2 * pairs.count());
    gated_ = rows_ + pairs.count();
    for (std::int64_t pair = 0; pair < pairs.count(); ++pair) {
      rows_[pair] = x + pairs.token(pair) * sizes_.hidden;
      gated_[pair] = gated + pair * inner_stride();
    }
  }

  void gate(const ExpertPart& part, float* to) const { multiply(0, rows_, sizes_.hidden, part, to, inner_stride()); }
  void up(const ExpertPart& part, float* to) const { multiply(1, rows_, sizes_.hidden, part, to, inner_stride()); }
  void down(const ExpertPart& part, float* to) const { multiply(2, gated_, sizes_.inner, part, to, outer_stride()); }
  void keep(const ExpertPart&, const float*) const {}

 private:
  static std::int64_t panels(std::int64_t outputs) { return (outputs + kLanes - 1) / kLanes; }

  void multiply(int which, const float* const* rows, std::int64_t inputs, const ExpertPart& part, float* to,
                std::int64_t stride) const {
    const std::int64_t size = stride * inputs;  // of an expert's weights
    const FloatProduct product{weights_[which] + part.expert * size, inputs,  rows + part.begin, part.rows(),
                               to + part.begin * stride,             stride};
    kernels().multiply(product, part.first, part.last);
  }

  ExpertSizes sizes_;
  std::int64_t inner_panels_, outer_panels_;
  const float* weights_[3];
  const float **rows_ = nullptr, **gated_ = nullptr;
};

// As plugins/quant_layout.py packs the matrices of all experts, one under another: [experts * outputs, inputs].
class QuantExperts {
 public:
  static constexpr const char* kName = "QuantMixtureOfExperts";
  static constexpr ONNXTensorElementDataType kType = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  static constexpr std::int64_t kColumns = kGroup;

  struct Attributes {
    Attributes(const OrtApi& api, const OrtKernelInfo* info)
        : bits(static_cast<int>(int_attribute(api, info, "bits"))),
          wide(int_attribute(api, info, "wide") != 0),
          minimums(int_attribute(api, info, "minimums") != 0) {
      if (bits != 4 && bits != 8)
        check(api.CreateStatus(ORT_INVALID_ARGUMENT, (std::string(kName) + ": bits must be 4 or 8").c_str()));
    }
    int bits;
    bool wide, minimums;
  };

  QuantExperts(const Run& run, const Attributes& attributes, const ExpertSizes& sizes, const std::size_t (&inputs)[3])
      : sizes_(sizes), kernels_(quant_kernels()) {
    // So that no group has outputs of two experts.
    if (sizes.hidden % kGroup != 0 || sizes.inner % kGroup != 0) run.refuse("its sizes must be multiples of 32");
    in_ = quant_layout(sizes.inner, sizes.hidden, attributes.bits, attributes.wide, attributes.minimums);
    out_ = quant_layout(sizes.hidden, sizes.inner, attributes.bits, attributes.wide, attributes.minimums);
    for (std::size_t i = 0; i < 3; ++i) {
      const QuantLayout& layout = i < 2 ? in_ : out_;
      const std::int64_t size[] = {sizes.experts * layout.groups * layout.group_bytes};
      run.expect(inputs[i], size);
      weights_[i] = run.input<std::uint8_t>(inputs[i]);
    }
  }

  std::int64_t gate_groups() const { return in_.groups; }
  std::int64_t down_groups() const { return out_.groups; }
  std::int64_t inner_stride() const { return sizes_.inner; }
  std::int64_t outer_stride() const { return sizes_.hidden; }

  void take(const Run& run, const float* x, const float*, const ExpertPairs& pairs) {
    thread_local Memory<QuantBlock> memory;
    rows_ = memory.room(pairs.count() * (in_.blocks + out_.blocks));
    gated_ = rows_ + pairs.count() * in_.blocks;
    QuantBlock* const rows = rows_;
    for_each_item(run, pairs.active_count(), pairs.count() * sizes_.hidden < kFewNumbers, [&](std::int64_t item) {
      const std::int64_t expert = pairs.active(item), begin = pairs.first(expert), end = pairs.first(expert + 1);
      for (std::int64_t pair = begin; pair < end; ++pair)
        kernels_.quantize(in_, x + pairs.token(pair) * sizes_.hidden, rows + begin * in_.blocks + (pair - begin),
                          end - begin);
    });
  }

  void gate(const ExpertPart& part, float* to) const { multiply(0, in_, rows_, part, to); }
  void up(const ExpertPart& part, float* to) const { multiply(1, in_, rows_, part, to); }
  void down(const ExpertPart& part, float* to) const { multiply(2, out_, gated_, part, to); }

  // A group of outputs is a block of inputs.
  void keep(const ExpertPart& part, const float* gated) const {
    static_assert(kGroup == kBlock);
    QuantLayout layout = out_;
    layout.blocks = part.last - part.first;
    QuantBlock* to = gated_ + part.begin * out_.blocks + part.first * part.rows();
    for (std::int64_t row = 0; row < part.rows(); ++row)
      kernels_.quantize(layout, gated + (part.begin + row) * sizes_.inner + part.first * kGroup, to + row, part.rows());
  }

 private:
  void multiply(int which, const QuantLayout& layout, const QuantBlock* x, const ExpertPart& part, float* to) const {
    const std::uint8_t* packed = weights_[which] + part.expert * layout.groups * layout.group_bytes;
    const QuantProduct product{layout, packed, x + part.begin * layout.blocks, part.rows(),
                               to + part.begin * layout.outputs};
    kernels_.multiply(product, part.first, part.last);
  }

  ExpertSizes sizes_;
  QuantLayout in_, out_;
  const QuantKernels& kernels_;
  const std::uint8_t* weights_[3];
  QuantBlock *rows_ = nullptr, *gated_ = nullptr;  // of an expert's pairs side by side, [blocks, rows]
};

}  // namespace outrider::engine
