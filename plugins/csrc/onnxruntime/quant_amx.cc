// Built with -mamx-tile -mamx-int8 and the flags of quant_avx512.cc, run where the processor has them. It never
// ran on one: tests run it with the tiles' instructions emulated.
//
// An instruction multiplies a block of 16 rows by one of 16 outputs. Its sums go through memory to AVX-512, which
// rescales them. That takes longer than the products, so those of the next block are under way meanwhile.
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "onnxruntime/amx_tiles.h"
#include "onnxruntime/quant_kernel.h"

namespace outrider::engine {
namespace {

constexpr int kTileRows = 16, kColumns = 16, kQuads = kBlock / kQuad;
constexpr int kLine = kColumns * kQuad;  // bytes: a quad of all columns
constexpr int kParts = kGroup / kColumns;
constexpr int kChunk = 8;  // blocks whose weights are unpacked at once: with the rows they fit the first level of cache

// Weights of kColumns outputs and up to kChunk blocks: bytes, which are signed where there are no minimums.
struct Chunk {
  alignas(64) std::uint8_t integers[kChunk][kQuads][kLine];
  alignas(64) float scales[kChunk][kColumns];
  alignas(64) float minimums[kChunk][kColumns];
};

// A block's sums.
using Integers = std::int32_t[kTileRows][kColumns];

// The kColumns scales of part `part` of a group.
__m512 load_scales(const QuantLayout& layout, const std::uint8_t* from, int part) {
  from += part * (layout.scale_bytes / kParts);
  if (layout.wide) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Unpacks part `part` of `count` blocks of a group, the first of which is at `packed`.
void unpack(const QuantLayout& layout, const std::uint8_t* packed, int part, int count, Chunk& to) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(layout.offset));
  for (int block = 0; block < count; ++block) {
    const auto load = [&](int quad) { return _mm512_loadu_si512(packed + (quad * kParts + part) * kLine); };
    const auto store = [&](int quad, __m512i weights) {
      _mm512_store_si512(to.integers[block][quad], _mm512_sub_epi8(weights, offset));
    };
    if (layout.bits == 4) {
      for (int quad = 0; quad < kQuads / 2; ++quad) {
        const __m512i both = load(quad);
        store(quad, _mm512_and_si512(both, nibble));
        store(quad + kQuads / 2, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
      }
    } else {
      for (int quad = 0; quad < kQuads; ++quad) store(quad, load(quad));
    }
    packed += layout.integer_bytes;
    _mm512_store_ps(to.scales[block], load_scales(layout, packed, part));
    packed += layout.scale_bytes;
    if (layout.minimums) {
      _mm512_store_ps(to.minimums[block], load_scales(layout, packed, part));
      packed += layout.scale_bytes;
    }
  }
}

static_assert(offsetof(QuantBlock, integers) == 0, "tiles of rows are loaded from there");

// Two sets of tiles, for a block and for the next: tile 3 * set has sums, the next one rows, the next one weights.
struct Configured {
  Configured() {
    TileShapes shapes;
    for (int set = 0; set < 6; set += 3) {
      shapes.rows[set] = kTileRows, shapes.row_bytes[set] = sizeof(Integers) / kTileRows;
      shapes.rows[set + 1] = kTileRows, shapes.row_bytes[set + 1] = kBlock;
      shapes.rows[set + 2] = kQuads, shapes.row_bytes[set + 2] = kLine;
    }
    tiles_configure(shapes);
  }
  ~Configured() { tiles_release(); }
};

template <int Set, bool Minimums>
void multiply_block(const QuantBlock* x, const Chunk& chunk, int block, Integers& to) {
  constexpr int kSums = 3 * Set, kRows = kSums + 1, kWeights = kSums + 2;
  tile_zero<kSums>();
  tile_load<kRows>(x, sizeof *x);
  tile_load<kWeights>(chunk.integers[block], kLine);
  if constexpr (Minimums) {
    tile_multiply_unsigned<kSums, kRows, kWeights>();
  } else {
    tile_multiply_signed<kSums, kRows, kWeights>();
  }
  tile_store<kSums>(to, sizeof to[0]);
}

// Adds products of kTileRows rows to sums [kTileRows, kColumns]: of `count` blocks, the chunk's and x, [count, rows].
template <bool Minimums>
void add_blocks(const QuantBlock* x, std::int64_t rows, int count, const Chunk& chunk, float* sums) {
  alignas(64) Integers integers[2];
  __m512 totals[kTileRows];  // in registers, if every loop over them is unrolled
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) totals[r] = _mm512_load_ps(sums + r * kColumns);
  multiply_block<0, Minimums>(x, chunk, 0, integers[0]);
  for (int block = 0; block < count; ++block, x += rows) {
    if (const int next = block + 1; next < count) {
      if (next % 2 == 0) {
        multiply_block<0, Minimums>(x + rows, chunk, next, integers[0]);
      } else {
        multiply_block<1, Minimums>(x + rows, chunk, next, integers[1]);
      }
    }
    const __m512 scales = _mm512_load_ps(chunk.scales[block]);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(integers[block % 2][r]));
      totals[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scales, _mm512_set1_ps(x[r].scale)), totals[r]);
    }
    if constexpr (Minimums) {
      const __m512 minimums = _mm512_load_ps(chunk.minimums[block]);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r)
        totals[r] = _mm512_fmadd_ps(minimums, _mm512_set1_ps(x[r].scaled_sum), totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) _mm512_store_ps(sums + r * kColumns, totals[r]);
}

// The last tile takes the last kTileRows rows, of which another may have some too: they get the same numbers twice.
void multiply_tiles(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  const QuantLayout& layout = product.layout;
  const std::int64_t tiles = (product.rows + kTileRows - 1) / kTileRows, tile_size = kTileRows * kColumns;
  const auto row_of = [&](std::int64_t tile) {
    return tile + 1 < tiles ? tile * kTileRows : product.rows - kTileRows;
  };
  const auto add = layout.minimums ? &add_blocks<true> : &add_blocks<false>;
  thread_local Memory<float> memory;
  float* sums = memory.room(kParts * tiles * tile_size);  // [parts, tiles, kTileRows, kColumns]
  Chunk chunk;
  const Configured configured;
  for (std::int64_t group = first; group < last; ++group) {
    const std::uint8_t* packed = product.packed + group * layout.group_bytes;
    std::memset(sums, 0, static_cast<std::size_t>(kParts * tiles * tile_size) * sizeof *sums);
    for (std::int64_t block = 0; block < layout.blocks; block += kChunk) {
      const int count = static_cast<int>(layout.blocks - block < kChunk ? layout.blocks - block : kChunk);
      for (int part = 0; part < kParts; ++part) {
        unpack(layout, packed, part, count, chunk);
        for (std::int64_t tile = 0; tile < tiles; ++tile)
          add(product.x + block * product.rows + row_of(tile), product.rows, count, chunk,
              sums + (part * tiles + tile) * tile_size);
      }
      packed += layout.group_bytes / layout.blocks * count;
    }
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t column = group * kGroup + part * kColumns, left = layout.outputs - column;
      if (left <= 0) break;
      const auto columns = static_cast<__mmask16>(left < kColumns ? (1 << left) - 1 : 0xffff);
      for (std::int64_t tile = 0; tile < tiles; ++tile)
        for (int r = 0; r < kTileRows; ++r)
          _mm512_mask_storeu_ps(product.to + (row_of(tile) + r) * layout.outputs + column, columns,
                                _mm512_load_ps(sums + (part * tiles + tile) * tile_size + r * kColumns));
    }
  }
}

// A tile takes as long whatever rows it has; prototypes for fewer were no faster than AVX-512.
void multiply(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  if (product.rows < kTileRows) return quant_avx512().multiply(product, first, last);
  multiply_tiles(product, first, last);
}

}  // namespace

const QuantKernels& quant_amx() {
  static const QuantKernels kernels = {quant_avx512().quantize, &multiply};
  return kernels;
}

}  // namespace outrider::engine
