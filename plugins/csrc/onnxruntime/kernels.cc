#include "onnxruntime/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace outrider::engine {

constexpr std::align_val_t kLine{64};

template <class T>
Memory<T>::~Memory() {
  ::operator delete(first_, kLine);
}

template <class T>
T* Memory<T>::room(std::int64_t count) {
  if (count <= count_) return first_;
  count = std::max(count, 2 * count_);
  T* more = static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), kLine));
  std::copy_n(first_, count_, more);
  ::operator delete(first_, kLine);
  count_ = count;
  return first_ = more;
}

template class Memory<Piece>;
template class Memory<std::int32_t>;
template class Memory<float>;

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
