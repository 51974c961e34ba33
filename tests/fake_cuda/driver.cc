// libcuda.so.1: what `runtime/backends/cuda_driver.py` and ONNX Runtime call of the driver.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <tuple>

#include "device.h"

using fake::drop;
using fake::give;
using SharedGraph = std::shared_ptr<fake::Graph>;

namespace {

using Result = int;
enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kCaptureUnsupported = 900 };
enum Attribute { kMajor = 75, kMinor = 76 };
enum FunctionAttribute { kMostDynamicShared = 8 };
enum LaunchAttributeId { kMayBeginEarly = 6 };  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

constexpr int kVersion = 13000;  // of a driver 580
char context;                    // whose address is the primary context

constexpr unsigned kFreelyShared = 48 << 10;  // bytes of dynamic shared memory that need no leave
std::map<void*, unsigned> most_shared;        // that a function has leave for

constexpr int kUnified = 4;  // a kind of memory: the address says which

// CUlaunchConfig.
struct LaunchAttribute {
  LaunchAttributeId id;
  char value[68];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};

// CUDA_MEMCPY3D.
struct Side {
  size_t x, y, z, level;
  int kind;
  const void* host;
  char* address;
  void* array;
  void* reserved;
  size_t pitch, height;

  char* line(size_t layer, size_t line) const { return address + (layer * height + line) * pitch; }
};

struct Boxes {
  Side source, to;
  size_t width, height, depth;
};

Result of(fake::Verdict verdict) { return verdict == fake::kAllowed ? kSuccess : kCaptureUnsupported; }

Result allocate(void** address, size_t bytes, fake::Kind kind, const char* function) {
  if (fake::unsafe_call(function) == fake::kForbidden) return kCaptureUnsupported;
  *address = fake::allocate(bytes, kind, function);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}

Result release(void* address, const char* function) {
  if (fake::unsafe_call(function) == fake::kForbidden) return kCaptureUnsupported;
  fake::wait_for_all(function);
  fake::release(address, function);
  return kSuccess;
}

Result copy(void* to, fake::Kind kind_to, const void* source, fake::Kind kind_source, size_t bytes, void* stream,
            const char* function) {
  if (fake::kind_of(to) != kind_to || fake::kind_of(source) != kind_source) {
    fake::fault(std::string(function) + " between other kinds of memory than it says");
  }
  fake::copy(fake::stream_of(stream), to, source, bytes, function);
  return kSuccess;
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return kSuccess; }
Result cuDriverGetVersion(int* version) { return give(version, kVersion); }
Result cuGetErrorString(Result, const char** text) { return give(text, "an error of the fake driver"); }
Result cuGetErrorName(Result, const char** text) { return give(text, "CUDA_ERROR_FAKE"); }
Result cuDeviceGetCount(int* count) { return give(count, 1); }
Result cuDeviceGet(int* device, int ordinal) { return give(device, ordinal); }
Result cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, length, "a fake GPU");
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, Attribute attribute, int) {
  return give(value, attribute == kMajor ? 9 : attribute == kMinor ? 0 : 1);
}

Result cuDevicePrimaryCtxRetain(void** retained, int) { return give(retained, &context); }
Result cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
Result cuCtxGetCurrent(void** current) { return give(current, &context); }
Result cuCtxGetDevice(int* device) { return give(device, 0); }
Result cuCtxSetCurrent(void* current) { return current == &context ? kSuccess : kInvalidValue; }

Result cuMemAlloc_v2(void** address, size_t bytes) {
  return allocate(address, bytes, fake::Kind::kDevice, "cuMemAlloc");
}
Result cuMemFree_v2(void* address) { return release(address, "cuMemFree"); }
Result cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  return allocate(address, bytes, fake::Kind::kPinned, "cuMemHostAlloc");
}
Result cuMemFreeHost(void* address) { return release(address, "cuMemFreeHost"); }
Result cuMemGetInfo_v2(size_t* available, size_t* total) {
  *available = size_t{64} << 30;
  return give(total, size_t{80} << 30);
}

Result cuMemsetD8Async(void* address, unsigned char value, size_t bytes, void* stream) {
  if (fake::kind_of(address) != fake::Kind::kDevice) fake::fault("cuMemsetD8Async of memory that is not the device's");
  fake::check_range(address, bytes, "cuMemsetD8Async");
  fake::enqueue(fake::stream_of(stream), "cuMemsetD8Async", [=] { std::memset(address, value, bytes); });
  return kSuccess;
}
Result cuMemcpyHtoDAsync_v2(void* to, const void* source, size_t bytes, void* stream) {
  return copy(to, fake::Kind::kDevice, source, fake::Kind::kPinned, bytes, stream, "cuMemcpyHtoDAsync");
}
Result cuMemcpyDtoHAsync_v2(void* to, const void* source, size_t bytes, void* stream) {
  return copy(to, fake::Kind::kPinned, source, fake::Kind::kDevice, bytes, stream, "cuMemcpyDtoHAsync");
}
Result cuMemcpyDtoDAsync_v2(void* to, const void* source, size_t bytes, void* stream) {
  return copy(to, fake::Kind::kDevice, source, fake::Kind::kDevice, bytes, stream, "cuMemcpyDtoDAsync");
}

Result cuMemcpy3DAsync_v2(const Boxes* boxes, void* stream) {
  const Boxes& b = *boxes;
  if (b.source.kind != kUnified || b.to.kind != kUnified || b.width == 0) return kInvalidValue;
  if (b.width > b.source.pitch || b.width > b.to.pitch) return kInvalidValue;
  if (b.height > b.source.height || b.height > b.to.height) return kInvalidValue;
  for (size_t layer = 0; layer < b.depth; ++layer) {
    for (size_t line = 0; line < b.height; ++line) {
      fake::copy(fake::stream_of(stream), b.to.line(layer, line), b.source.line(layer, line), b.width,
                 "cuMemcpy3DAsync");
    }
  }
  return kSuccess;
}

Result cuStreamCreate(void** stream, unsigned) { return give(stream, fake::make_stream()); }
Result cuStreamDestroy_v2(void*) { return kSuccess; }
Result cuStreamSynchronize(void* stream) {
  return of(fake::wait_for(fake::stream_of(stream), "cuStreamSynchronize"));
}
Result cuEventCreate(void** event, unsigned) { return give(event, new fake::Event); }
Result cuEventDestroy_v2(void* event) { return drop(static_cast<fake::Event*>(event)); }
Result cuEventRecord(void* event, void* stream) {
  fake::mark(static_cast<fake::Event*>(event), fake::stream_of(stream));
  return kSuccess;
}
Result cuEventSynchronize(void* event) { return of(fake::wait_for(*static_cast<fake::Event*>(event))); }
Result cuEventElapsedTime_v2(float* milliseconds, void*, void*) { return give(milliseconds, 1); }

Result cuThreadExchangeStreamCaptureMode(fake::CaptureMode* mode) {
  return give(mode, fake::exchange_mode(*mode));
}
Result cuStreamBeginCapture_v2(void* stream, fake::CaptureMode mode) {
  return of(fake::begin_capture(fake::stream_of(stream), mode, "cuStreamBeginCapture"));
}
Result cuStreamEndCapture(void* stream, void** graph) {
  *graph = fake::end_capture(fake::stream_of(stream), "cuStreamEndCapture");
  return *graph == nullptr ? kInvalidValue : kSuccess;
}
Result cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  return give(executable, new SharedGraph(*static_cast<SharedGraph*>(graph)));
}
Result cuGraphDestroy(void* graph) { return drop(static_cast<SharedGraph*>(graph)); }
Result cuGraphExecDestroy(void* executable) { return drop(static_cast<SharedGraph*>(executable)); }
Result cuGraphLaunch(void* executable, void* stream) {
  fake::launch_graph(*static_cast<SharedGraph*>(executable), fake::stream_of(stream), "cuGraphLaunch");
  return kSuccess;
}

// A module is not read: a function is its name, which the emulator knows.
Result cuModuleLoadData(void** module, const void* image) {
  const bool cubin = std::memcmp(image, "\177ELF", 4) == 0;
  *module = &context;
  return cubin ? kSuccess : kInvalidValue;
}
Result cuModuleUnload(void*) { return kSuccess; }
Result cuModuleGetFunction(void** function, void*, const char* name) {
  *function = strdup(name);
  return fake::has_kernel(name) ? kSuccess : kNotFound;
}
Result cuFuncSetAttribute(void* function, FunctionAttribute attribute, int value) {
  if (attribute != kMostDynamicShared || value > (227 << 10)) return kInvalidValue;
  most_shared[function] = static_cast<unsigned>(value);
  return kSuccess;
}
Result cuLaunchKernelEx(const LaunchConfig* how, void* function, void** parameters, void**) {
  const auto [blocks, threads, shared] = std::make_tuple(how->grid[0], how->block[0], how->shared);
  const unsigned others[] = {how->grid[1], how->grid[2], how->block[1], how->block[2]};
  if (std::any_of(std::begin(others), std::end(others), [](unsigned size) { return size != 1; })) return kInvalidValue;
  if (how->count > 1 || (how->count == 1 && how->attributes->id != kMayBeginEarly)) return kInvalidValue;
  if (blocks == 0 || threads == 0 || threads > 1024 || shared > std::max(kFreelyShared, most_shared[function])) {
    fake::fault(std::string(static_cast<char*>(function)) + " is launched with a size that no GPU takes");
    return kInvalidValue;
  }
  fake::launch_kernel(static_cast<char*>(function), blocks, threads, shared, parameters, fake::stream_of(how->stream));
  return kSuccess;
}

Result cuProfilerStart() { return kSuccess; }
Result cuProfilerStop() { return kSuccess; }

int cuTensorMapEncodeTiled() { return fake::not_emulated("cuTensorMapEncodeTiled"); }

// cuda-bindings asks for every function that it knows, by its name without a version.
Result cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&cuInit), &own);
  void* library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* version : {"_v2", ""}) {
    if (*function == nullptr) *function = dlsym(library, (std::string(name) + version).c_str());
  }
  if (status != nullptr) *status = *function == nullptr;
  return *function == nullptr ? kNotFound : kSuccess;
}

}  // extern "C"
