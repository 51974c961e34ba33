#include "onnxruntime/isa.h"
#include "onnxruntime/quant_kernel.h"

namespace outrider::engine {

QuantLayout quant_layout(std::int64_t outputs, std::int64_t inputs, int bits, bool wide, bool minimums) {
  QuantLayout layout{outputs, inputs, bits, wide, minimums, minimums ? 0 : 1 << (bits - 1), 0, 0, 0, 0, 0};
  layout.blocks = inputs / kBlock;
  layout.groups = (outputs + kGroup - 1) / kGroup;
  layout.integer_bytes = kBlock * kGroup * bits / 8;
  layout.scale_bytes = kGroup * (wide ? 4 : 2);
  layout.group_bytes = layout.blocks * (layout.integer_bytes + layout.scale_bytes * (minimums ? 2 : 1));
  return layout;
}

const QuantKernels& quant_kernels() {
#if defined(OUTRIDER_X86)
  static const bool vnni = has_avx512_vnni();
  switch (isa_here()) {
    case Isa::kAmx: return quant_amx();
    case Isa::kAvx512:
      if (vnni) return quant_avx512();
      [[fallthrough]];
    case Isa::kAvx2: return quant_avx2();
    case Isa::kAvxVnni: return quant_avxvnni();
    default: break;
  }
#elif defined(OUTRIDER_ARM64)
  switch (isa_here()) {
    case Isa::kI8mm: return quant_i8mm();
    case Isa::kNeon: return quant_neon();
    default: break;
  }
#endif
  return quant_plain();
}

}  // namespace outrider::engine
