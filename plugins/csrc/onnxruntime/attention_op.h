// BranchAttention as ONNX Runtime calls it; its inputs stand in plugins/onnxruntime_ops.py.
#pragma once

#include <array>
#include <atomic>
#include <cstring>

#include "onnxruntime/branch_attention.h"
#include "onnxruntime/ort.h"

namespace outrider::engine {

// `Cached` is the type of a KV cache, `Type` ONNX Runtime's name for it; everything else is computed in float32.
template <class Cached, ONNXTensorElementDataType Type>
class BranchAttentionOp {
  enum Input { kQuery, kKey, kValue, kKeyCache, kValueCache, kBias, kPastLength, kRowSplits, kPositions, kCos, kSin,
               kQueryNorm, kKeyNorm, kSinks };
  enum Output { kOut, kKeyCacheOut, kValueCacheOut, kQueries };

 public:
  static constexpr const char* kName = "BranchAttention";
  static constexpr std::size_t kInputs = kSinks + 1, kOutputs = kQueries + 1, kRequired = kQueries;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    if (index == kKeyCache || index == kValueCache) return Type;
    if (index == kPastLength || index == kRowSplits || index == kPositions) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t index) {
    return index == kKeyCacheOut || index == kValueCacheOut ? Type : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional(std::size_t index) { return index == kKey || index == kValue || index > kPastLength; }

  BranchAttentionOp(const OrtApi& api, const OrtKernelInfo* info) {
    const std::int64_t heads = int_attribute(api, info, "num_heads"), kv = int_attribute(api, info, "kv_num_heads");
    if (kv < 1 || heads < 1 || heads % kv != 0 || heads > 65536)
      check(api.CreateStatus(ORT_INVALID_ARGUMENT, "BranchAttention: kv_num_heads must divide num_heads"));
    shape_.heads = static_cast<int>(heads);
    shape_.kv_heads = static_cast<int>(kv);
    shape_.scale = float_attribute(api, info, "scale");
    shape_.epsilon = float_attribute(api, info, "epsilon");
    shape_.asks = int_attribute(api, info, "asks", 1) != 0;
    shape_.softcap = float_attribute(api, info, "softcap", 0.0f);
    shape_.window = int_attribute(api, info, "window", 0);
    for (std::size_t index = 0; index < kInputs; ++index) {
      int constant = 0;
      const OrtValue* value = nullptr;
      check(api.KernelInfoGetConstantInput_tensor(info, index, &constant, &value));
      constant_[index] = constant != 0;
    }
    if (!(shape_.softcap >= 0.0f) || shape_.window < 0)
      check(api.CreateStatus(ORT_INVALID_ARGUMENT, "BranchAttention: softcap or window is negative"));
  }

  void compute(const Run& run) const {
    std::int64_t query[3], cache[4], bias[4], cos[2];
    run.shape_of(kQuery, query);
    run.shape_of(kKeyCache, cache);
    run.shape_of(kBias, bias);
    run.shape_of(kCos, cos);
    Shape shape = shape_;
    shape.head_dim = static_cast<int>(cache[3] - slot_size<Cached>(0));
    if (shape.head_dim < 1) run.refuse("the KV cache's slots have no room for a number");
    const std::int64_t query_size = std::int64_t{shape.heads} * shape.head_dim;
    const std::int64_t kv_size = std::int64_t{shape.kv_heads} * shape.head_dim;

    Inputs in{};
    in.tokens = query[1];
    in.rows = bias[0];
    in.places = bias[2];
    in.view = bias[3];
    in.capacity = cache[2];
    const auto* tokens = run.input<float>(kQuery);
    in.query = tokens;
    in.query_stride = query[2];
    in.key = run.input<float>(kKey);
    in.value = run.input<float>(kValue);
    if (in.key == nullptr) {
      if (in.query_stride != query_size + 2 * kv_size) run.refuse("the packed q, k and v have another width than heads");
      in.key = tokens + query_size;
      in.value = tokens + query_size + kv_size;
      in.key_stride = in.value_stride = in.query_stride;
    } else {
      if (in.query_stride != query_size || in.value == nullptr) run.refuse("q has another width than its heads, or v lacks");
      in.key_stride = in.value_stride = kv_size;
    }
    if (cache[0] != in.rows || cache[1] != shape.kv_heads) run.refuse("the KV cache has other rows or heads");
    check_others(run, in, shape.head_dim, query, cache, bias, cos);
    in.bias = run.input<float>(kBias);
    in.past_length = run.input<std::int64_t>(kPastLength);
    in.row_splits = run.input<std::int64_t>(kRowSplits);
    in.positions = run.input<std::int64_t>(kPositions);
    in.cos = run.input<float>(kCos);
    in.sin = run.input<float>(kSin);
    in.position_limit = cos[0];
    if (in.positions != nullptr && (in.cos == nullptr || in.sin == nullptr || cos[1] * 2 > shape.head_dim))
      run.refuse("positions come without rotations, or with rotations of more than a head");
    in.rotated = static_cast<int>(cos[1] * 2);
    in.query_norm = run.input<float>(kQueryNorm);
    in.key_norm = run.input<float>(kKeyNorm);
    in.sinks = run.input<float>(kSinks);

    const std::int64_t out[] = {1, in.tokens, query_size}, queries[] = {in.tokens, query_size};
    const Outputs to{run.output<float>(kOut, out), kv_cache(run, cache, kKeyCache, kKeyCacheOut),
                     kv_cache(run, cache, kValueCache, kValueCacheOut), run.output<float>(kQueries, queries)};
    const Parallel parallel{[](const void* on, void (*body)(void*, std::size_t), std::size_t count, void* state) {
                              static_cast<const Run*>(on)->parallel_for(body, count, state);
                            },
                            &run, run.threads()};
    const char* refused = branch_attention<Cached>(shape, in, to, parallel);
    if (refused != nullptr) run.refuse(refused);
  }

 private:
  // The other inputs go with those whose extents are at hand. Looked at when these change: a step has many layers, and
  // asking costs as much as a short one.
  void check_others(const Run& run, const Inputs& in, std::int64_t head_dim, const std::int64_t (&query)[3],
                    const std::int64_t (&cache)[4], const std::int64_t (&bias)[4], const std::int64_t (&cos)[2]) const {
    std::uint64_t seen = 14695981039346656037u;
    const auto mix = [&](std::int64_t extent) { seen = (seen ^ static_cast<std::uint64_t>(extent)) * 1099511628211u; };
    for (const std::int64_t extent : query) mix(extent);
    for (const std::int64_t extent : cache) mix(extent);
    for (const std::int64_t extent : bias) mix(extent);
    for (const std::int64_t extent : cos) mix(extent);
    for (std::size_t index = kKey; index < kInputs; ++index) {
      if (constant_[index] || index == kKeyCache || index == kBias || index == kCos) continue;
      mix(static_cast<std::int64_t>(index));
      run.each_extent(index, mix);
    }
    if (checked_.value.load(std::memory_order_relaxed) == seen) return;
    if (query[0] != 1 || bias[1] != 1) run.refuse("q or attn_bias has more than one in a dimension of one");
    const std::int64_t flat[] = {1, in.tokens, shape_.kv_heads * head_dim}, rows[] = {in.rows}, edges[] = {in.rows + 1};
    const std::int64_t one_head[] = {head_dim}, heads[] = {shape_.heads}, positions[] = {1, in.tokens};
    run.expect(kKey, flat);
    run.expect(kValue, flat);
    run.expect(kValueCache, cache);
    run.expect(kPastLength, rows);
    run.expect(kRowSplits, edges);
    run.expect(kPositions, positions);
    run.expect(kSin, cos);
    run.expect(kQueryNorm, one_head);
    run.expect(kKeyNorm, one_head);
    run.expect(kSinks, heads);
    checked_.value.store(seen, std::memory_order_relaxed);
  }

  // Bound to the memory of its input, as in a session of ours, a KV cache is appended to in place; else it is copied.
  static Cached* kv_cache(const Run& run, const std::int64_t (&shape)[4], Input from, Output to) {
    auto* memory = run.output<Cached>(to, shape);
    const auto* before = run.input<Cached>(from);
    if (memory != before) std::memcpy(memory, before, sizeof(Cached) * shape[0] * shape[1] * shape[2] * shape[3]);
    return memory;
  }

  struct Checked {  // an atomic that moves with its owner, before anybody shares it
    Checked() = default;
    Checked(Checked&&) noexcept {}
    std::atomic<std::uint64_t> value{0};
  };

  Shape shape_{};
  std::array<bool, kInputs> constant_{};  // inputs whose extents have not changed since they were checked
  mutable Checked checked_;
};

}  // namespace outrider::engine
