#include "onnxruntime/kernels.h"

#include <algorithm>
#include <new>

#include "onnxruntime/isa.h"
#include "onnxruntime/quant_kernel.h"

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
template class Memory<QuantBlock>;
template class Memory<float>;
template class Memory<const float*>;
template class Memory<std::int64_t>;

const Kernels& kernels() {
#if defined(OUTRIDER_X86)
  static const Isa isa = isa_here();
  if (isa >= Isa::kAvx512) return avx512_kernels();
  if (isa >= Isa::kAvx2) return avx2_kernels();
#elif defined(OUTRIDER_ARM64)
  if (isa_here() != Isa::kPlain) return neon_kernels();
#endif
  return plain_kernels();
}

}  // namespace outrider::engine
