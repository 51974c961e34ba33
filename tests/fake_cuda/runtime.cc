// libcudart.so.13: what ONNX Runtime's CUDA provider calls. Its kernels are launched, and do nothing.
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "runtime_types.h"

using SharedGraph = std::shared_ptr<fake::Graph>;
using fake::drop;
using fake::give;

namespace {

struct Configuration {
  Dim3 grid, block;
  size_t shared;
  void* stream;
};

std::mutex mutex;
std::unordered_map<const void*, std::string> kernel_names;
thread_local std::vector<Configuration> configurations;  // of launches that the compiler's code has begun
thread_local CudaError last_error = kSuccess;

CudaError fail(CudaError error) { return last_error = error; }
CudaError of(fake::Verdict verdict) { return verdict == fake::kAllowed ? kSuccess : fail(kCaptureUnsupported); }

bool fits(const Dim3& grid, const Dim3& block) {
  const bool some = grid.x && grid.y && grid.z && block.x && block.y && block.z;
  return some && grid.y <= 65535 && grid.z <= 65535 && block.x * block.y * block.z <= 1024;
}

CudaError launch(const void* function, const Dim3& grid, const Dim3& block, void* stream) {
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    name = kernel_names[function];
  }
  if (!fits(grid, block)) {
    fake::fault(name + " is launched with a size that no GPU takes");
    return fail(kInvalidConfiguration);
  }
  fake::Stream* of = fake::stream_of(stream);
  fake::record(of->capturing ? "captured kernel" : "kernel", name);
  fake::enqueue(of, name, [] {});
  return kSuccess;
}

CudaError allocate(void** address, size_t bytes, fake::Kind kind, const char* function) {
  if (fake::unsafe_call(function) == fake::kForbidden) return fail(kCaptureUnsupported);
  *address = fake::allocate(bytes, kind, function);
  return *address == nullptr ? fail(kOutOfMemory) : kSuccess;
}

CudaError release(void* address, const char* function) {
  if (fake::wait_for_all(function) == fake::kForbidden) return fail(kCaptureUnsupported);
  fake::release(address, function);
  return kSuccess;
}

CudaError set(void* address, int value, size_t bytes, void* stream, const char* function) {
  fake::check_range(address, bytes, function);
  fake::enqueue(fake::stream_of(stream), function, [=] { std::memset(address, value, bytes); });
  return kSuccess;
}

}  // namespace

extern "C" {

// Kernels of the compiler's code.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(mutex);
  kernel_names[host] = name;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
CudaError __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *stream = last.stream;
  return kSuccess;
}
CudaError __cudaGetKernel(const void** kernel, const void* function) { return give(kernel, function); }
CudaError __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
  return launch(kernel, grid, block, stream);
}
CudaError cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
  return launch(function, grid, block, stream);
}
CudaError cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
  return launch(function, grid, block, stream);
}
CudaError cudaLaunchKernelExC(const LaunchConfiguration* how, const void* function, void**) {
  return launch(function, how->grid, how->block, how->stream);
}
CudaError cudaFuncGetAttributes(FunctionAttributes* attributes, const void*) {
  *attributes = {};
  attributes->most_threads_per_block = 1024;
  attributes->registers = 32;
  attributes->ptx_version = attributes->binary_version = 90;
  return kSuccess;
}
CudaError cudaFuncSetAttribute(const void*, int, int) { return kSuccess; }
CudaError cudaKernelSetAttributeForDevice(void*, int, int, int) { return kSuccess; }
CudaError cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return give(blocks, 2);
}

// The device: one of compute capability 9.0.
CudaError cudaGetDevice(int* device) { return give(device, 0); }
CudaError cudaSetDevice(int) { return kSuccess; }
CudaError cudaGetDeviceCount(int* count) { return give(count, 1); }
CudaError cudaDriverGetVersion(int* version) { return give(version, 13000); }
CudaError cudaRuntimeGetVersion(int* version) { return give(version, 13000); }
CudaError cudaGetDeviceProperties(DeviceProperties* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "a fake GPU");
  properties->total_global_memory = size_t{80} << 30;
  properties->shared_memory_per_block = 48 << 10;
  properties->registers_per_block = properties->registers_per_multiprocessor = 64 << 10;
  properties->warp_size = 32;
  properties->most_threads_per_block = 1024;
  properties->most_threads_dim[0] = properties->most_threads_dim[1] = 1024;
  properties->most_threads_dim[2] = 64;
  properties->most_grid_size[0] = 2147483647;
  properties->most_grid_size[1] = properties->most_grid_size[2] = 65535;
  properties->total_constant_memory = 64 << 10;
  properties->major = 9;
  properties->multiprocessors = 132;
  properties->l2_cache_size = 50 << 20;
  properties->most_threads_per_multiprocessor = 2048;
  properties->shared_memory_per_multiprocessor = 228 << 10;
  properties->shared_memory_per_block_optin = 227 << 10;
  properties->most_blocks_per_multiprocessor = 32;
  return kSuccess;
}
CudaError cudaDeviceGetAttribute(int* value, DeviceAttribute attribute, int) {
  DeviceProperties properties;
  cudaGetDeviceProperties(&properties, 0);
  switch (attribute) {
    case kMaxThreadsPerBlock: *value = properties.most_threads_per_block; break;
    case kMaxSharedMemoryPerBlock: *value = static_cast<int>(properties.shared_memory_per_block); break;
    case kWarpSize: *value = properties.warp_size; break;
    case kMultiprocessors: *value = properties.multiprocessors; break;
    case kMaxThreadsPerMultiprocessor: *value = properties.most_threads_per_multiprocessor; break;
    case kComputeCapabilityMajor: *value = properties.major; break;
    case kComputeCapabilityMinor: *value = properties.minor; break;
    case kMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.shared_memory_per_multiprocessor);
      break;
    case kMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(properties.shared_memory_per_block_optin); break;
    default: *value = 1;
  }
  return kSuccess;
}
CudaError cudaGetLastError() { return std::exchange(last_error, kSuccess); }
CudaError cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(CudaError error) {
  return error == kCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported" : "cudaErrorFake";
}
const char* cudaGetErrorString(CudaError error) {
  return error == kCaptureUnsupported ? "operation not permitted when stream is capturing" : "an error of the fake GPU";
}
CudaError cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, int* result) {
  *function = nullptr;
  if (result != nullptr) *result = 1;  // not found
  return kSuccess;
}

// Memory.
CudaError cudaMalloc(void** address, size_t bytes) {
  return allocate(address, bytes, fake::Kind::kDevice, "cudaMalloc");
}
CudaError cudaFree(void* address) { return release(address, "cudaFree"); }
CudaError cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return allocate(address, bytes, fake::Kind::kPinned, "cudaHostAlloc");
}
CudaError cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
CudaError cudaFreeHost(void* address) { return release(address, "cudaFreeHost"); }
CudaError cudaMemGetInfo(size_t* available, size_t* total) {
  *available = size_t{64} << 30;
  return give(total, size_t{80} << 30);
}
CudaError cudaPointerGetAttributes(PointerAttributes* attributes, const void* address) {
  const fake::Kind kind = fake::kind_of(address);
  *attributes = {};
  attributes->type = kind == fake::Kind::kDevice ? 2 : kind == fake::Kind::kPinned ? 1 : 0;
  attributes->device_pointer = const_cast<void*>(address);
  return kSuccess;
}
CudaError cudaMemcpy(void* to, const void* source, size_t bytes, int) {
  return of(fake::copy_now(to, source, bytes, "cudaMemcpy"));
}
CudaError cudaMemcpyAsync(void* to, const void* source, size_t bytes, int, void* stream) {
  fake::copy(fake::stream_of(stream), to, source, bytes, "cudaMemcpyAsync");
  return kSuccess;
}
CudaError cudaMemcpy2DAsync(void* to, size_t pitch_to, const void* source, size_t pitch, size_t width, size_t height,
                            int, void* stream) {
  for (size_t row = 0; row < height; ++row) {
    fake::copy(fake::stream_of(stream), static_cast<char*>(to) + row * pitch_to,
               static_cast<const char*>(source) + row * pitch, width, "cudaMemcpy2DAsync");
  }
  return kSuccess;
}
CudaError cudaMemset(void* address, int value, size_t bytes) {
  return set(address, value, bytes, nullptr, "cudaMemset");
}
CudaError cudaMemsetAsync(void* address, int value, size_t bytes, void* stream) {
  return set(address, value, bytes, stream, "cudaMemsetAsync");
}

// Streams, events, captures.
CudaError cudaStreamCreate(void** stream) { return give(stream, fake::make_stream()); }
CudaError cudaStreamCreateWithFlags(void** stream, unsigned) { return give(stream, fake::make_stream()); }
CudaError cudaStreamDestroy(void*) { return kSuccess; }
CudaError cudaStreamSynchronize(void* stream) {
  return of(fake::wait_for(fake::stream_of(stream), "cudaStreamSynchronize"));
}
CudaError cudaDeviceSynchronize() { return of(fake::wait_for_all("cudaDeviceSynchronize")); }
CudaError cudaStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }  // there is one order
CudaError cudaEventCreate(void** event) { return give(event, new fake::Event); }
CudaError cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
CudaError cudaEventDestroy(void* event) { return drop(static_cast<fake::Event*>(event)); }
CudaError cudaEventRecord(void* event, void* stream) {
  fake::mark(static_cast<fake::Event*>(event), fake::stream_of(stream));
  return kSuccess;
}
CudaError cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
CudaError cudaEventSynchronize(void* event) { return of(fake::wait_for(*static_cast<fake::Event*>(event))); }
CudaError cudaEventElapsedTime(float* milliseconds, void*, void*) { return give(milliseconds, 1); }
CudaError cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  fake::enqueue(fake::stream_of(stream), "cudaLaunchHostFunc", [=] { function(argument); });
  return kSuccess;
}
CudaError cudaStreamBeginCapture(void* stream, fake::CaptureMode mode) {
  return of(fake::begin_capture(fake::stream_of(stream), mode, "cudaStreamBeginCapture"));
}
CudaError cudaStreamEndCapture(void* stream, void** graph) {
  *graph = fake::end_capture(fake::stream_of(stream), "cudaStreamEndCapture");
  return *graph == nullptr ? fail(kInvalidValue) : kSuccess;
}
CudaError cudaStreamIsCapturing(void* stream, int* status) {
  return give(status, fake::stream_of(stream)->capturing);
}
CudaError cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  return give(executable, new SharedGraph(*static_cast<SharedGraph*>(graph)));
}
CudaError cudaGraphDestroy(void* graph) { return drop(static_cast<SharedGraph*>(graph)); }
CudaError cudaGraphExecDestroy(void* executable) { return drop(static_cast<SharedGraph*>(executable)); }
CudaError cudaGraphLaunch(void* executable, void* stream) {
  fake::launch_graph(*static_cast<SharedGraph*>(executable), fake::stream_of(stream), "cudaGraphLaunch");
  return kSuccess;
}

// Functions that no program of ours calls.
#define NOT_EMULATED(function) \
  int function() { return fake::not_emulated(#function); }
NOT_EMULATED(cudaFreeAsync)
NOT_EMULATED(cudaLibraryGetKernel)
NOT_EMULATED(cudaLibraryLoadData)
NOT_EMULATED(cudaLibraryUnload)
NOT_EMULATED(cudaMallocFromPoolAsync)
NOT_EMULATED(cudaMemPoolCreate)
NOT_EMULATED(cudaMemPoolDestroy)
NOT_EMULATED(cudaMemPoolGetAttribute)
NOT_EMULATED(cudaMemPoolSetAttribute)
NOT_EMULATED(cudaMemPoolTrimTo)
NOT_EMULATED(cudaMemcpyFromSymbol)

}  // extern "C"
