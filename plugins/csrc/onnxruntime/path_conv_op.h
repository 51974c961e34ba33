// PathConv as ONNX Runtime calls it: each token convolved with those before it on its path, in or before the step.
#pragma once

#include <algorithm>
#include <cstring>

#include "onnxruntime/kernels.h"
#include "onnxruntime/state_paths.h"

namespace outrider::engine {

class PathConvOp {
  enum Input { kX, kWeight, kTail, kLog, kParent, kBranch, kReplay, kReplays, kFold, kBias };
  enum Output { kOut, kTailOut, kLogOut };

 public:
  static constexpr const char* kName = "PathConv";
  static constexpr std::size_t kInputs = kBias + 1, kOutputs = kLogOut + 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index >= kParent && index <= kFold ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                              : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t index) { return index == kBias; }

  PathConvOp(const OrtApi& api, const OrtKernelInfo* info) : opens_(int_attribute(api, info, "silu", 0) != 0) {}

  void compute(const Run& run) const {
    std::int64_t weight[2], log[3];
    run.shape_of(kWeight, weight);
    run.shape_of(kLog, log);
    const std::int64_t kernel = weight[0], channels = weight[1], branches = log[0], rows = log[1];
    const std::int64_t tail[] = {branches, kernel - 1, channels}, logged[] = {branches, rows, channels};
    const std::int64_t width[] = {channels};
    run.expect(kTail, tail);
    run.expect(kLog, logged);
    run.expect(kBias, width);
    const StatePaths paths(run, kParent, branches, rows);
    const std::vector<std::int64_t> shape = run.shape_of(kX);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    if (kernel < 2 || kernel > kMostTaps) run.refuse("a convolution has from 2 to 16 taps");
    if (count != paths.tokens * channels || shape.back() != channels) run.refuse("x is not of the step's tokens");

    Job job{paths, run.input<float>(kX), run.input<float>(kWeight), run.input<float>(kBias), run.input<float>(kTail),
            run.input<float>(kLog), run.output<float>(kOut, shape), kernel, channels, opens_};
    run.parallel_for(&one_token, static_cast<std::size_t>(paths.tokens), &job, count < kSmall);
    keep(job, run.output<float>(kTailOut, tail), run.output<float>(kLogOut, logged));
  }

 private:
  static constexpr std::int64_t kMostTaps = 16;
  static constexpr std::int64_t kSmall = 65536;  // numbers

  struct Job {
    const StatePaths& paths;
    const float *x, *weight, *bias, *tail, *log;
    float* out;
    std::int64_t kernel, channels;
    bool opens;

    // The row `back` tokens before the branch's first new one: of the replayed records, then of the tail.
    const float* before(std::int64_t number, std::int64_t back) const {
      const std::int64_t at = paths.replays[number] - 1 - back;
      if (at >= 0) return log + paths.row(number, at) * channels;
      return tail + (number * (kernel - 1) + kernel - 1 + at) * channels;
    }
  };

  static void one_token(void* state, std::size_t index) {
    const auto& job = *static_cast<const Job*>(state);
    auto node = static_cast<std::int64_t>(index);
    const std::int64_t number = job.paths.branch[node];
    float* out = job.out + node * job.channels;
    if (!job.paths.has_branch(node)) {
      std::fill_n(out, job.channels, 0.0f);
      return;
    }
    const float* taps[kMostTaps];
    std::int64_t back = 0;
    for (std::int64_t t = job.kernel - 1; t >= 0; --t) {
      taps[t] = node >= 0 ? job.x + node * job.channels : job.before(number, back++);
      if (node >= 0) node = job.paths.parent[node];
    }
    kernels().rows.convolved(taps, job.weight, job.bias, job.kernel, job.channels, job.opens, out);
  }

  // The state after each branch's folded tokens, and records of the others. Outputs may lie where the inputs do.
  static void keep(const Job& job, float* tail, float* log) {
    const StatePaths& paths = job.paths;
    const std::int64_t size = job.channels, taps = job.kernel - 1;
    const std::size_t row = static_cast<std::size_t>(size) * sizeof(float);
    if (tail != job.tail) std::copy_n(job.tail, paths.branches * taps * size, tail);
    std::vector<float> kept(static_cast<std::size_t>(taps * size));
    for (std::int64_t number = 0; number < paths.branches; ++number) {
      if (paths.of[number].empty()) continue;
      for (std::int64_t t = 0; t < taps; ++t) {  // its newest rows, the last first: folded tokens, then those before
        const std::int64_t at = paths.fold[number] - 1 - t;
        const float* from = at >= 0 ? job.x + paths.of[number][at] * size : job.before(number, -1 - at);
        std::memcpy(kept.data() + (taps - 1 - t) * size, from, row);
      }
      std::memcpy(tail + number * taps * size, kept.data(), kept.size() * sizeof(float));
    }
    if (log != job.log) std::copy_n(job.log, paths.branches * paths.rows * size, log);
    paths.each_logged([&](std::int64_t token, std::int64_t at) {
      std::memcpy(log + at * size, job.x + token * size, row);
    });
  }

  bool opens_;
};

}  // namespace outrider::engine
