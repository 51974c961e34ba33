// ONNX Runtime's C interface as our ops use it. Only functions that keep their place in every version are called.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "onnxruntime_c_api.h"

namespace outrider::engine {

struct Failed {
  OrtStatus* status;
};

inline void check(OrtStatus* status) {
  if (status != nullptr) throw Failed{status};
}

// An exception of a C++ body becomes the status that a C caller reads.
template <class Body>
OrtStatus* guarded(const OrtApi& api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Failed& failed) {
    return failed.status;
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}

// The inputs, outputs and attributes of one run of an op, which is called `name` in errors.
class Run {
 public:
  Run(const OrtApi& api, OrtKernelContext* context, const char* name, int threads)
      : api_(api), context_(context), name_(name), threads_(threads) {}

  [[noreturn]] void refuse(const std::string& why) const {
    throw Failed{api_.CreateStatus(ORT_INVALID_ARGUMENT, (std::string(name_) + ": " + why).c_str())};
  }

  // Null where an optional input is absent.
  template <class T>
  const T* input(std::size_t index) const {
    const OrtValue* value = nullptr;
    check(api_.KernelContext_GetInput(context_, index, &value));
    return value == nullptr ? nullptr : static_cast<const T*>(memory(const_cast<OrtValue*>(value)));
  }

  // Calls `each` with each of its extents; not at all where it is absent.
  template <class Each>
  void each_extent(std::size_t index, const Each& each) const {
    const OrtValue* value = nullptr;
    check(api_.KernelContext_GetInput(context_, index, &value));
    if (value == nullptr) return;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api_.GetTensorTypeAndShape(value, &info));
    constexpr std::size_t kMost = 8;
    std::int64_t extents[kMost] = {};
    std::size_t rank = 0;
    OrtStatus* status = api_.GetDimensionsCount(info, &rank);
    if (status == nullptr) status = api_.GetDimensions(info, extents, rank < kMost ? rank : kMost);
    api_.ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    for (std::size_t i = 0; i < kMost; ++i) each(extents[i]);
    each(static_cast<std::int64_t>(rank));
  }

  // Its extents, into `shape`, whose rank it must have. Zeros, and false, where it is absent.
  template <std::size_t Rank>
  bool shape_of(std::size_t index, std::int64_t (&shape)[Rank]) const {
    for (auto& extent : shape) extent = 0;
    const OrtValue* value = nullptr;
    check(api_.KernelContext_GetInput(context_, index, &value));
    if (value == nullptr) return false;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api_.GetTensorTypeAndShape(value, &info));
    std::size_t rank = 0;
    OrtStatus* status = api_.GetDimensionsCount(info, &rank);
    if (status == nullptr && rank == Rank) status = api_.GetDimensions(info, shape, Rank);
    api_.ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    if (rank != Rank)
      refuse("input " + std::to_string(index) + " has " + std::to_string(rank) + " dimensions in place of " +
             std::to_string(Rank));
    return true;
  }

  // The same for an input of any rank.
  std::vector<std::int64_t> shape_of(std::size_t index) const {
    const OrtValue* value = nullptr;
    check(api_.KernelContext_GetInput(context_, index, &value));
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api_.GetTensorTypeAndShape(value, &info));
    std::size_t rank = 0;
    OrtStatus* status = api_.GetDimensionsCount(info, &rank);
    std::vector<std::int64_t> shape(rank);
    if (status == nullptr) status = api_.GetDimensions(info, shape.data(), rank);
    api_.ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    return shape;
  }

  // Refuses an input that is there and has another shape.
  template <std::size_t Rank>
  void expect(std::size_t index, const std::int64_t (&wanted)[Rank]) const {
    std::int64_t found[Rank];
    if (!shape_of(index, found)) return;
    for (std::size_t i = 0; i < Rank; ++i)
      if (found[i] != wanted[i])
        refuse("input " + std::to_string(index) + " has extent " + std::to_string(found[i]) + " in place of " +
               std::to_string(wanted[i]) + " in dimension " + std::to_string(i));
  }

  // Null where an optional output is absent.
  template <class T, std::size_t Rank>
  T* output(std::size_t index, const std::int64_t (&shape)[Rank]) const {
    OrtValue* value = nullptr;
    check(api_.KernelContext_GetOutput(context_, index, shape, Rank, &value));
    return value == nullptr ? nullptr : static_cast<T*>(memory(value));
  }

  template <class T>
  T* output(std::size_t index, const std::vector<std::int64_t>& shape) const {
    OrtValue* value = nullptr;
    check(api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
    return value == nullptr ? nullptr : static_cast<T*>(memory(value));
  }

  // Calls body(state, i) for all i < count, on the session's threads; on the calling thread alone where `small`: waking
  // others would cost more than it saves.
  void parallel_for(void (*body)(void*, std::size_t), std::size_t count, void* state, bool small = false) const {
    if (small) {
      for (std::size_t i = 0; i < count; ++i) body(state, i);
      return;
    }
    check(api_.KernelContext_ParallelFor(context_, body, count, 0, state));
  }

  // How many those are, or where the session did not say, the machine's processors.
  int threads() const { return threads_; }

 private:
  void* memory(OrtValue* value) const {
    void* data = nullptr;
    check(api_.GetTensorMutableData(value, &data));
    return data;
  }

  const OrtApi& api_;
  OrtKernelContext* context_;
  const char* name_;
  int threads_;
};

inline std::int64_t int_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  std::int64_t value = 0;
  check(api.KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

// Of an attribute that a node may leave out.
inline std::int64_t int_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name, std::int64_t usual) {
  std::int64_t value = 0;
  OrtStatus* missing = api.KernelInfoGetAttribute_int64(info, name, &value);
  if (missing == nullptr) return value;
  api.ReleaseStatus(missing);
  return usual;
}

inline float float_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  float value = 0;
  check(api.KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

// Of an attribute that a node may leave out.
inline float float_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name, float usual) {
  float value = 0;
  OrtStatus* missing = api.KernelInfoGetAttribute_float(info, name, &value);
  if (missing == nullptr) return value;
  api.ReleaseStatus(missing);
  return usual;
}

inline std::string text_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  std::size_t size = 0;
  check(api.KernelInfoGetAttribute_string(info, name, nullptr, &size));
  std::string value(size, '\0');
  check(api.KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size - 1);  // without the zero that ends it
  return value;
}

// A kernel as ONNX Runtime's table of functions, for sessions with `threads` threads. `Kernel` has: kName, kInputs,
// kOutputs, of which kRequired are always there; input_type(i), output_type(i), is_optional(i); a constructor from
// (api, info); and compute(const Run&).
template <class Kernel>
struct Op : OrtCustomOp {
  struct Instance {
    const OrtApi& api;
    Kernel kernel;
    int threads;
  };

  int threads;

  explicit Op(int threads) : OrtCustomOp{}, threads(threads) {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return Kernel::kInputs; };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return Kernel::kOutputs; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) { return Kernel::input_type(index); };
    GetOutputType = [](const OrtCustomOp*, std::size_t index) { return Kernel::output_type(index); };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return Kernel::is_optional(index) ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return index < Kernel::kRequired ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                        void** kernel) -> OrtStatus* {
      return guarded(*api, [&] {
        *kernel = new Instance{*api, Kernel(*api, info), static_cast<const Op*>(op)->threads};
      });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      auto& self = *static_cast<Instance*>(kernel);
      return guarded(self.api, [&] { self.kernel.compute(Run(self.api, context, Kernel::kName, self.threads)); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1; };
  }
};

}  // namespace outrider::engine
