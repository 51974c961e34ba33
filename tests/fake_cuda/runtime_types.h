// Types of libcudart 13 as ONNX Runtime was compiled with them, as far as it reads them.
#pragma once

#include <cstddef>

using CudaError = int;
enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidConfiguration = 9, kCaptureUnsupported = 900 };

struct Dim3 {
  unsigned x, y, z;
};

struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_memory;
  size_t shared_memory_per_block;
  int registers_per_block;
  int warp_size;
  size_t memory_pitch;
  int most_threads_per_block;
  int most_threads_dim[3];
  int most_grid_size[3];
  size_t total_constant_memory;
  int major;
  int minor;
  size_t texture_alignment[2];
  int multiprocessors;
  char between_1[596 - 388];
  int l2_cache_size;
  int persisting_l2_cache_size;
  int most_threads_per_multiprocessor;
  int features[3];
  size_t shared_memory_per_multiprocessor;
  int registers_per_multiprocessor;
  char between_2[672 - 636];
  size_t shared_memory_per_block_optin;
  char between_3[688 - 680];
  int most_blocks_per_multiprocessor;
  char rest[1008 - 692];
};
static_assert(sizeof(DeviceProperties) == 1008);

enum DeviceAttribute {
  kMaxThreadsPerBlock = 1,
  kMaxSharedMemoryPerBlock = 8,
  kWarpSize = 10,
  kMultiprocessors = 16,
  kMaxThreadsPerMultiprocessor = 39,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kMaxSharedMemoryPerBlockOptin = 97,
};

struct FunctionAttributes {
  size_t shared_bytes, constant_bytes, local_bytes;
  int most_threads_per_block, registers, ptx_version, binary_version;
  char rest[144 - 40];
};
static_assert(sizeof(FunctionAttributes) == 144);

struct PointerAttributes {
  int type;  // 0 unregistered, 1 host, 2 device
  int device;
  void* device_pointer;
  void* host_pointer;
  char rest[88 - 24];
};
static_assert(sizeof(PointerAttributes) == 88);

struct LaunchConfiguration {
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfiguration) == 56);
