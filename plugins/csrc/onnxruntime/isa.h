// Instruction sets, of which a machine's best is taken.
#pragma once

namespace outrider::engine {

// Each has what those before it have. AVX512: with foundation and DQ; whether it has VNNI is another question.
enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512 };

// The best of this machine, or the one that OUTRIDER_ISA names in the environment.
Isa isa_here();

// Null, or why OUTRIDER_ISA cannot be obeyed.
const char* isa_refused();

// Whether this machine's AVX-512 multiplies integers of 8 bits.
bool has_avx512_vnni();

}  // namespace outrider::engine
