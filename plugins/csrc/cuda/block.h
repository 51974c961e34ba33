// Operations of a block of threads: its place, a barrier, atomics, memory that threads share.
//
// A GPU gives them (nvcc, NVRTC). Tests on machines without one give them too, with threads that are run one after another
// between barriers (tests/plugins/emulator): the same source is compiled, and compared with the references.
#pragma once

#include "../portable.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#define OUTRIDER_KERNEL extern "C" __global__ void
#define OUTRIDER_DEVICE __device__ inline
#define OUTRIDER_OUTLINED __device__ __noinline__ inline  // long code of several kernels, compiled once
#define OUTRIDER_SHARED __shared__
#define OUTRIDER_UNROLL(times) OUTRIDER_PRAGMA(unroll times)  // before a loop: loads of `times` rounds may overlap
#define OUTRIDER_FIT(threads, blocks) __launch_bounds__(threads, blocks)  // registers for `blocks` blocks at once
#define OUTRIDER_PRAGMA(text) _Pragma(#text)

namespace outrider {

OUTRIDER_DEVICE i64 thread_index() { return threadIdx.x; }
OUTRIDER_DEVICE i64 thread_count() { return blockDim.x; }
OUTRIDER_DEVICE i64 block_index() { return blockIdx.x; }
OUTRIDER_DEVICE i64 block_count() { return gridDim.x; }
OUTRIDER_DEVICE void barrier() { __syncthreads(); }

// A kernel may begin while the one before it in the stream still runs (PTX ISA, "griddepcontrol"; launches allow it from compute
// capability 9.0 on). Each lets the next one begin, at once or when it has little left to load, and touches nothing that a
// kernel writes until all before it have ended, which all of its threads wait for. Weights it may read before.
OUTRIDER_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
OUTRIDER_DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

OUTRIDER_DEVICE void publish() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
OUTRIDER_DEVICE void add(u64* to, u64 value) { atomicAdd(to, value); }
OUTRIDER_DEVICE void add(u32* to, u32 value) { atomicAdd(to, value); }
OUTRIDER_DEVICE u32 count_up(u32* counter) { return atomicAdd(counter, 1u); }

OUTRIDER_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
OUTRIDER_DEVICE float root(float x) { return __fsqrt_rn(x); }
OUTRIDER_DEVICE float nearest(float x) { return rintf(x); }

// Shared memory of as many bytes as the launch gives a block, at a multiple of 16.
OUTRIDER_DEVICE char* dynamic_shared() {
  extern __shared__ __align__(16) char outrider_dynamic_shared[];
  return outrider_dynamic_shared;
}

struct alignas(16) Quad {
  float value[4];
};

struct alignas(16) Bytes16 {
  u32 word[4];
};

struct alignas(8) Bytes8 {
  u32 word[2];
};

// The floats, or whatever bytes, at `from`, a multiple of as many bytes: one load.
OUTRIDER_DEVICE Quad load_quad(const float* from) { return *reinterpret_cast<const Quad*>(from); }
OUTRIDER_DEVICE void keep_quad(float* to, const Quad& quad) { *reinterpret_cast<Quad*>(to) = quad; }
OUTRIDER_DEVICE Bytes16 load_bytes16(const void* from) { return *static_cast<const Bytes16*>(from); }
OUTRIDER_DEVICE Bytes8 load_bytes8(const void* from) { return *static_cast<const Bytes8*>(from); }

// Copies from global to shared memory that a thread does not wait for (PTX ISA, "cp.async"): it starts some, closes them as
// a group, and later waits until at most `kOpen` of its newest groups are open. Then it may read its own copies; other
// threads may after a barrier. Both addresses are multiples of the bytes. Nothing is copied unless `there`: a predicate, where
// the compiler would branch. Needs compute capability 8.0.
using SharedAddress = u32;
OUTRIDER_DEVICE SharedAddress shared_address(void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }
OUTRIDER_DEVICE void start_copy16(SharedAddress to, const void* from, bool there) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %2, 0;\n@there cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(static_cast<i32>(there))
               : "memory");
}
OUTRIDER_DEVICE void start_copy4(SharedAddress to, const void* from, bool there) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.s32 there, %2, 0;\n@there cp.async.ca.shared.global [%0], [%1], 4;\n}" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(static_cast<i32>(there))
               : "memory");
}
OUTRIDER_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kOpen>
OUTRIDER_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

}  // namespace outrider

#else

#include "emulated_block.h"

#endif

namespace outrider {

constexpr int kMostThreads = 512;

OUTRIDER_DEVICE void follow() {
  let_next_begin();
  wait_for_earlier();
}

// Whether this block is the last of `blocks` that come here with this counter, which is zero before the first one; what
// the others wrote before is visible to it then.
OUTRIDER_DEVICE bool last_to_finish(u32* counter, i64 blocks) {
  OUTRIDER_SHARED bool last;
  barrier();
  if (thread_index() == 0) {  // whose fences order what all threads of the block wrote before, and read after
    publish();
    last = count_up(counter) + 1 == static_cast<u32>(blocks);
    if (last) *counter = 0;  // for the next launch
    publish();
  }
  barrier();
  return last;
}

}  // namespace outrider
