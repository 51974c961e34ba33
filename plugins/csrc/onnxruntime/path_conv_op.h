// PathConv as ONNX Runtime calls it: each token convolved with those before it on its path, in or before the step.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "onnxruntime/kernels.h"
#include "onnxruntime/ort.h"

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
    std::int64_t weight[2], log[3], tokens[1];
    run.shape_of(kWeight, weight);
    run.shape_of(kLog, log);
    run.shape_of(kParent, tokens);
    const std::int64_t kernel = weight[0], channels = weight[1], branches = log[0], rows = log[1];
    const std::int64_t tail[] = {branches, kernel - 1, channels}, logged[] = {branches, rows, channels};
    const std::int64_t by_branch[] = {branches}, replayed[] = {branches, rows}, width[] = {channels};
    run.expect(kTail, tail);
    run.expect(kLog, logged);
    run.expect(kBranch, tokens);
    run.expect(kReplay, replayed);
    run.expect(kReplays, by_branch);
    run.expect(kFold, by_branch);
    run.expect(kBias, width);
    const std::vector<std::int64_t> shape = run.shape_of(kX);
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    if (kernel < 2 || kernel > kMostTaps) run.refuse("a convolution has from 2 to 16 taps");
    if (count != tokens[0] * channels || shape.back() != channels) run.refuse("x is not of the step's tokens");

    Job job{run.input<float>(kX), run.input<float>(kWeight), run.input<float>(kBias), run.input<float>(kTail),
            run.input<float>(kLog), run.input<std::int64_t>(kParent), run.input<std::int64_t>(kBranch),
            run.input<std::int64_t>(kReplay), run.input<std::int64_t>(kReplays), run.output<float>(kOut, shape),
            kernel, channels, branches, rows, opens_};
    const auto* fold = run.input<std::int64_t>(kFold);
    const std::vector<std::int64_t> news = tokens_of_each(run, job, fold, tokens[0]);
    run.parallel_for(&one_token, static_cast<std::size_t>(tokens[0]), &job, count < kSmall);
    keep(job, fold, news, tokens[0], run.output<float>(kTailOut, tail), run.output<float>(kLogOut, logged));
  }

 private:
  static constexpr std::int64_t kMostTaps = 16;
  static constexpr std::int64_t kSmall = 65536;  // numbers

  struct Job {
    const float *x, *weight, *bias, *tail, *log;
    const std::int64_t *parent, *branch, *replay, *replays;
    float* out;
    std::int64_t kernel, channels, branches, rows;
    bool opens;

    // The row `back` tokens before the branch's first new one: of the replayed records, then of the tail.
    const float* before(std::int64_t number, std::int64_t back) const {
      const std::int64_t at = replays[number] - 1 - back;
      if (at >= 0) return log + (number * rows + replay[number * rows + at]) * channels;
      return tail + (number * (kernel - 1) + kernel - 1 + at) * channels;
    }
  };

  // How many new tokens each branch has. Tokens of no branch have numbers that none has.
  static std::vector<std::int64_t> tokens_of_each(const Run& run, const Job& job, const std::int64_t* fold,
                                                  std::int64_t tokens) {
    std::vector<std::int64_t> found(static_cast<std::size_t>(job.branches));
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (job.parent[i] < -1 || job.parent[i] >= i) run.refuse("a parent does not come before its token");
      if (job.branch[i] >= 0 && job.branch[i] < job.branches) ++found[job.branch[i]];
    }
    for (std::int64_t number = 0; number < job.branches; ++number) {
      const std::int64_t news = found[number], replays = job.replays[number];
      if (news == 0) continue;
      if (fold[number] < 0 || fold[number] > news || news - fold[number] > job.rows)
        run.refuse("a branch's tokens are more than are folded and logged");
      if (replays < 0 || replays > job.rows) run.refuse("more records are replayed than there are");
      for (std::int64_t r = 0; r < replays; ++r) {
        const std::int64_t row = job.replay[number * job.rows + r];
        if (row < 0 || row >= job.rows) run.refuse("a record is replayed that is not there");
      }
    }
    return found;
  }

  static void one_token(void* state, std::size_t index) {
    const auto& job = *static_cast<const Job*>(state);
    const auto token = static_cast<std::int64_t>(index);
    const std::int64_t number = job.branch[token];
    float* out = job.out + token * job.channels;
    if (number < 0 || number >= job.branches) {
      std::fill_n(out, job.channels, 0.0f);
      return;
    }
    const float* taps[kMostTaps];
    std::int64_t node = token, back = 0;
    for (std::int64_t t = job.kernel - 1; t >= 0; --t) {
      taps[t] = node >= 0 ? job.x + node * job.channels : job.before(number, back++);
      if (node >= 0) node = job.parent[node];
    }
    kernels().rows.convolved(taps, job.weight, job.bias, job.kernel, job.channels, job.opens, out);
  }

  // The state after each branch's folded tokens, and records of the others. Outputs may lie where the inputs do.
  static void keep(const Job& job, const std::int64_t* fold, const std::vector<std::int64_t>& news, std::int64_t tokens,
                   float* tail, float* log) {
    const std::int64_t size = job.channels, taps = job.kernel - 1;
    const std::size_t row = static_cast<std::size_t>(size) * sizeof(float);
    std::vector<float> kept(static_cast<std::size_t>(taps * size));
    if (tail != job.tail) std::copy_n(job.tail, job.branches * taps * size, tail);
    for (std::int64_t number = 0; number < job.branches; ++number) {
      if (news[number] == 0) continue;
      // Its newest rows, the last first: of the folded tokens, then of those before the step.
      std::vector<const float*> folded;
      for (std::int64_t i = 0; i < tokens && static_cast<std::int64_t>(folded.size()) < fold[number]; ++i)
        if (job.branch[i] == number) folded.push_back(job.x + i * size);
      for (std::int64_t t = 0; t < taps; ++t) {
        const auto have = static_cast<std::int64_t>(folded.size());
        const float* from = t < have ? folded[have - 1 - t] : job.before(number, t - have);
        std::memcpy(kept.data() + (taps - 1 - t) * size, from, row);
      }
      std::memcpy(tail + number * taps * size, kept.data(), kept.size() * sizeof(float));
    }
    if (log != job.log) std::copy_n(job.log, job.branches * job.rows * size, log);
    std::vector<std::int64_t> seen(static_cast<std::size_t>(job.branches));
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t number = job.branch[i];
      if (number < 0 || number >= job.branches) continue;
      const std::int64_t at = seen[number]++ - fold[number];
      if (at >= 0) std::memcpy(log + (number * job.rows + at) * size, job.x + i * size, row);
    }
  }

  bool opens_;
};

}  // namespace outrider::engine
