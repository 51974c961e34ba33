// Instruction sets, of which a machine's best is taken.
#pragma once

namespace outrider::engine {

// Of x86-64, and behind them of arm64: each has what those before it of the same have. AVX512: with foundation and DQ;
// whether it has VNNI is another question. AMX: with tiles of int8, and with VNNI. NEON: with dot products.
enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512, kAmx, kNeon, kI8mm };

// The best of this machine, or the one that OUTRIDER_ISA names in the environment.
Isa isa_here();

// Null, or why OUTRIDER_ISA cannot be obeyed.
const char* isa_refused();

// Whether this machine's AVX-512 multiplies integers of 8 bits.
bool has_avx512_vnni();

}  // namespace outrider::engine
