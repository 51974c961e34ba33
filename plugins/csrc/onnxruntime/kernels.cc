#include "onnxruntime/kernels.h"

#include <cstdlib>
#include <new>

namespace outrider::engine {

Scratch::~Scratch() {
  std::free(pieces_);
  std::free(lists_);
  std::free(scores_);
}

template <class T>
static void grow(T*& memory, std::int64_t& have, std::int64_t count) {
  if (count <= have) return;
  count = count < 2 * have ? 2 * have : count;
  void* more = std::realloc(static_cast<void*>(memory), static_cast<std::size_t>(count) * sizeof(T));
  if (more == nullptr) throw std::bad_alloc();
  memory = static_cast<T*>(more);
  have = count;
}

Piece* Scratch::pieces(std::int64_t count) {
  grow(pieces_, piece_count_, count);
  return pieces_;
}

std::int32_t* Scratch::lists(std::int64_t count) {
  grow(lists_, list_count_, count);
  return lists_;
}

float* Scratch::scores(std::int64_t count) {
  grow(scores_, score_count_, count);
  return scores_;
}

// What a machine has, or fewer lanes where OUTRIDER_CPU_LANES says so: the bits of a lesser machine, on a better one.
static int lanes_here() {
  int lanes = 4;
#if defined(OUTRIDER_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    lanes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? 16 : 8;
  }
#endif
  const char* wanted = std::getenv("OUTRIDER_CPU_LANES");
  const int most = wanted == nullptr ? 0 : std::atoi(wanted);
  return 0 < most && most < lanes ? most : lanes;
}

const Kernels& kernels_for(std::int64_t size) {
  static const int lanes = lanes_here();
#if defined(OUTRIDER_X86)
  if (lanes >= 16 && size % 16 == 0) return avx512_kernels();
  if (lanes >= 8 && size % 8 == 0) return avx2_kernels();
#endif
  return lanes >= 4 && size % 4 == 0 ? plain_kernels() : single_kernels();
}

}  // namespace outrider::engine
