// Kernels that measure a GPU by themselves, and that fill memory with numbers for kernels to read.
#include "block.h"
#include "element.h"

namespace outrider {

constexpr i64 kProbeLoads = 8;  // of a thread that are on their way at once

OUTRIDER_DEVICE u32 probe_random(u64 place, u64 seed) {  // SplitMix64
  u64 z = place * 0x9e3779b97f4a7c15ull + seed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<u32>((z ^ (z >> 31)) >> 16);
}

OUTRIDER_DEVICE float probe_uniform(u64 place, u64 seed) {
  return static_cast<float>(probe_random(place, seed) >> 8) * (1.0f / 16777216.0f);
}

OUTRIDER_DEVICE i64 probe_first() { return block_index() * thread_count() + thread_index(); }
OUTRIDER_DEVICE i64 probe_step() { return block_count() * thread_count(); }

OUTRIDER_KERNEL probe_empty() { follow(); }

// Reads `count` times 16 bytes of `from`; `to` is there so that the loads are.
OUTRIDER_KERNEL probe_read(const Bytes16* from, u32* to, i64 count) {
  follow();
  u32 all = 0;
  i64 i = probe_first();
  for (; i + (kProbeLoads - 1) * probe_step() < count; i += kProbeLoads * probe_step()) {
    OUTRIDER_UNROLL(8)
    for (i64 k = 0; k < kProbeLoads; ++k) {
      const Bytes16 loaded = load_bytes16(from + i + k * probe_step());
      all ^= loaded.word[0] ^ loaded.word[1] ^ loaded.word[2] ^ loaded.word[3];
    }
  }
  for (; i < count; i += probe_step()) all ^= load_bytes16(from + i).word[0];
  if (all == 0x12345678u) *to = all;
}

// Uniform numbers from 0.5 to 1.
OUTRIDER_KERNEL probe_fill_reals(float* to, i64 bytes, i64 seed) {
  follow();
  for (i64 i = probe_first(); i < bytes / 4; i += probe_step()) to[i] = 0.5f + 0.5f * probe_uniform(i, seed);
}

// Numbers of type `element` (element.h), uniform in +-0.03.
OUTRIDER_KERNEL probe_fill_halves(char* to, i64 bytes, i64 seed, i64 element) {
  follow();
  for (i64 i = probe_first(); i < bytes / 2; i += probe_step()) {
    keep_element(to, i, element, 0.06f * (probe_uniform(i, seed) - 0.5f));
  }
}

// Blocks of `integers` random bytes, and `scales` numbers of about 0.01: float32 where they are `wide`, else float16.
OUTRIDER_KERNEL probe_fill_packed(u32* to, i64 bytes, i64 seed, i64 integers, i64 scales, i64 wide) {
  follow();
  const i64 words = integers / 4, block = words + (wide ? scales : scales / 2);
  for (i64 i = probe_first(); i < bytes / 4; i += probe_step()) {
    const u32 random = probe_random(i, seed);
    to[i] = i % block < words ? random : wide ? 0x3c23d70au + (random & 0xffffu) : 0x211f211fu ^ (random & 0x000f000fu);
  }
}

}  // namespace outrider
