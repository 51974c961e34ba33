// StateScan as ONNX Runtime calls it: each token's matrix states, walked along its path.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "onnxruntime/kernels.h"
#include "onnxruntime/state_paths.h"
#include "onnxruntime/work_items.h"

namespace outrider::engine {

class StateScanOp {
  enum Input { kX, kA, kDecay, kStep, kState, kLog, kParent, kBranch, kReplay, kReplays, kFold, kB, kSkip };
  enum Output { kOut, kStateOut, kLogOut };

 public:
  static constexpr const char* kName = "StateScan";
  static constexpr std::size_t kInputs = kSkip + 1, kOutputs = kLogOut + 1, kRequired = kOutputs;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index >= kParent && index <= kFold ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                              : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(std::size_t index) { return index >= kB; }

  StateScanOp(const OrtApi& api, const OrtKernelInfo* info)
      : key_heads_(int_attribute(api, info, "key_heads")),
        values_(int_attribute(api, info, "values")),
        delta_(int_attribute(api, info, "delta", 1) != 0),
        scale_(float_attribute(api, info, "scale", 1.0f)),
        least_(float_attribute(api, info, "least_step", 0.0f)),
        most_(float_attribute(api, info, "most_step", std::numeric_limits<float>::infinity())) {}

  void compute(const Run& run) const {
    std::int64_t state[5], log[3];
    run.shape_of(kState, state);
    run.shape_of(kLog, log);
    const std::int64_t branches = state[0], heads = state[1], tiles = state[2], keys = state[3];
    const std::int64_t channels = 2 * key_heads_ * keys + heads * values_;
    const std::int64_t record = key_heads_ * keys + heads * values_ + 2 * heads;
    if (key_heads_ < 1 || heads % key_heads_ != 0) run.refuse("heads are no multiple of key_heads");
    if (values_ < 1 || tiles != (values_ + kStateColumns - 1) / kStateColumns || state[4] != kStateColumns)
      run.refuse("a state is in tiles of 32 values");
    const std::int64_t logged[] = {branches, log[1], record}, by_head[] = {heads};
    run.expect(kLog, logged);
    run.expect(kDecay, by_head);
    run.expect(kStep, by_head);
    run.expect(kSkip, by_head);
    const StatePaths paths(run, kParent, branches, log[1]);
    std::vector<std::int64_t> shape = run.shape_of(kX), gate = run.shape_of(kA);
    if (shape.back() != channels || product(shape) != paths.tokens * channels) run.refuse("x is not of the step");
    if (gate.back() != heads || product(gate) != paths.tokens * heads) run.refuse("a is not of the step");
    if (run.input<float>(kB) != nullptr && run.shape_of(kB) != gate) run.refuse("a and b differ in shape");
    shape.back() = heads * values_;

    const Job job{paths, *this, run.input<float>(kX), run.input<float>(kA), run.input<float>(kB),
                  run.input<float>(kSkip), run.input<float>(kLog), run.output<float>(kOut, shape),
                  {heads, run.input<float>(kDecay), run.input<float>(kStep), least_, most_, scale_},
                  heads, tiles, keys, channels, record};
    thread_local Memory<float> memory;
    const std::int64_t each = prepared_size(job);
    float* ready = memory.room(paths.tokens * each);
    const bool small = paths.tokens * channels < kSmall;
    for_each_item(run, paths.tokens, small, [&](std::int64_t token) { prepare(job, token, ready + token * each); });
    auto* states = run.output<float>(kStateOut, state);
    if (states != run.input<float>(kState))
      std::copy_n(run.input<float>(kState), branches * heads * tiles * keys * kStateColumns, states);
    std::vector<std::int64_t> live;
    for (std::int64_t number = 0; number < branches; ++number)
      if (!paths.of[number].empty()) live.push_back(number);
    for (std::int64_t token = 0; token < paths.tokens; ++token)
      if (!paths.has_branch(token)) std::fill_n(job.out + token * shape.back(), shape.back(), 0.0f);
    const auto tiles_in_all = static_cast<std::int64_t>(live.size()) * heads * tiles;
    for_each_item(run, tiles_in_all, false, [&](std::int64_t item) {
      const std::int64_t head = item / tiles % heads;
      walk(job, ready, live[item / (tiles * heads)], head, item % tiles, states);
    });
    keep(job, ready, run.output<float>(kLogOut, logged));
  }

 private:
  static constexpr std::int64_t kSmall = 65536;  // numbers

  struct Job {
    const StatePaths& paths;
    const StateScanOp& op;
    const float *x, *a, *b, *skip, *log;
    float* out;
    StateGates gates;
    std::int64_t heads, tiles, keys, channels, record;
  };

  static std::int64_t product(const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    return count;
  }

  // What a token's walk reads beside its values: queries and keys of each head, their products, decays and rates.
  static std::int64_t prepared_size(const Job& job) {
    return 2 * job.op.key_heads_ * job.keys + job.op.key_heads_ + 2 * job.heads;
  }
  static const float* keys_of(const Job& job, const float* ready) { return ready + job.op.key_heads_ * job.keys; }
  static const float* products_of(const Job& job, const float* ready) {
    return ready + 2 * job.op.key_heads_ * job.keys;
  }
  static const float* decays_of(const Job& job, const float* ready) {
    return products_of(job, ready) + job.op.key_heads_;
  }

  static void prepare(const Job& job, std::int64_t token, float* ready) {
    const StateKernels& kernel = kernels().states;
    const float* x = job.x + token * job.channels;
    const std::int64_t size = job.op.key_heads_ * job.keys;
    const float scale = 1.0f / std::sqrt(static_cast<float>(job.keys));
    if (!job.op.delta_) std::memcpy(ready, x, static_cast<std::size_t>(2 * size) * sizeof(float));
    float* products = ready + 2 * size;
    for (std::int64_t h = 0; h < job.op.key_heads_; ++h) {
      float *q = ready + h * job.keys, *k = q + size;
      if (job.op.delta_) {
        kernel.unit(x + h * job.keys, job.keys, scale, q);
        kernel.unit(x + size + h * job.keys, job.keys, 1.0f, k);
      }
      products[h] = kernel.dot(q, k, job.keys);
    }
    float* decays = products + job.op.key_heads_;
    kernel.gates(job.gates, job.a + token * job.heads, job.b == nullptr ? nullptr : job.b + token * job.heads, decays,
                 decays + job.heads);
  }

  static void walk(const Job& job, const float* ready, std::int64_t number, std::int64_t head, std::int64_t tile,
                   float* states) {
    thread_local std::vector<StateStep> steps;
    thread_local std::vector<std::int64_t> firsts, local;
    thread_local std::vector<float*> copies;
    thread_local Memory<float> memory;
    const StatePaths& paths = job.paths;
    const std::vector<std::int64_t>& tokens = paths.of[number];
    const std::int64_t replays = paths.replays[number], fold = paths.fold[number], values = job.op.values_;
    const std::int64_t key_head = head / (job.heads / job.op.key_heads_), first = tile * kStateColumns;
    const std::int64_t size = prepared_size(job), all_keys = job.op.key_heads_ * job.keys;
    steps.clear();
    for (std::int64_t r = 0; r < replays; ++r) {
      const float* record = job.log + paths.row(number, r) * job.record;
      const float *v = record + all_keys, *decays = v + job.heads * values;
      steps.push_back({record + key_head * job.keys, nullptr, v + head * values + first, decays[head],
                       decays[job.heads + head], 0.0f, nullptr, -1});
    }
    const auto nodes = static_cast<std::int64_t>(tokens.size()) - fold;
    local.assign(static_cast<std::size_t>(tokens.back() - tokens.front() + 1), -1);
    firsts.assign(static_cast<std::size_t>(nodes), -1);
    std::int64_t inner = 0;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(tokens.size()); ++i) {
      const std::int64_t token = tokens[i], above = paths.parent[token];
      const std::int64_t parent = i < fold || above < tokens.front() ? -1 : local[above - tokens.front()];
      const float *own = ready + token * size, *decays = decays_of(job, own);
      steps.push_back({keys_of(job, own) + key_head * job.keys, own + key_head * job.keys,
                       job.x + token * job.channels + 2 * all_keys + head * values + first, decays[head],
                       decays[job.heads + head], products_of(job, own)[key_head],
                       job.out + (token * job.heads + head) * values + first, parent});
      if (i >= fold) local[token - tokens.front()] = i - fold;
      if (parent >= 0 && firsts[parent] < 0) {
        firsts[parent] = i - fold;
        ++inner;
      }
    }
    const std::int64_t elements = job.keys * kStateColumns;
    float* room = memory.room(inner * elements + (2 + nodes) * kStateColumns);
    copies.assign(static_cast<std::size_t>(nodes), nullptr);
    float* deltas = room + inner * elements;
    for (std::int64_t n = 0; n < nodes; ++n)
      if (firsts[n] >= 0) copies[n] = room + --inner * elements;
    kernels().states.walk({job.keys, std::min<std::int64_t>(kStateColumns, values - first), replays + fold, nodes,
                           job.op.delta_, job.skip == nullptr ? 0.0f : job.skip[head],
                           states + ((number * job.heads + head) * job.tiles + tile) * elements, steps.data(),
                           firsts.data(), copies.data(), deltas});
  }

  // Records of the tokens that are not in a state. The output may lie where the input does.
  static void keep(const Job& job, const float* ready, float* log) {
    const std::int64_t size = job.op.key_heads_ * job.keys, values = job.heads * job.op.values_;
    if (log != job.log) std::copy_n(job.log, job.paths.branches * job.paths.rows * job.record, log);
    job.paths.each_logged([&](std::int64_t token, std::int64_t row) {
      const float* own = ready + token * prepared_size(job);
      float* to = log + row * job.record;
      std::copy_n(keys_of(job, own), size, to);
      std::copy_n(job.x + token * job.channels + 2 * size, values, to + size);
      std::copy_n(decays_of(job, own), 2 * job.heads, to + size + values);
    });
  }

  std::int64_t key_heads_, values_;
  bool delta_;
  float scale_, least_, most_;
};

}  // namespace outrider::engine
