// The instructions of onnxruntime/amx_tiles.h in plain C++, as Intel's manual defines them. What would be a fault there
// ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace outrider::engine {
namespace {

struct Tiles {
  bool configured = false;
  TileShapes shapes;
  std::uint8_t bytes[8][16][64];
};
thread_local Tiles tiles;

inline void fault_unless(bool legal, const char* rule) {
  if (legal) return;
  std::fprintf(stderr, "a tile's instruction would fault: %s\n", rule);
  std::abort();
}

inline void tiles_configure(const TileShapes& shapes) {
  fault_unless(shapes.palette == 1 && shapes.start_row == 0, "palette 1 alone");
  for (const std::uint8_t byte : shapes.reserved) fault_unless(byte == 0, "reserved bytes are 0");
  for (int tile = 0; tile < 16; ++tile) {
    fault_unless(shapes.rows[tile] <= (tile < 8 ? 16 : 0), "8 tiles of 16 rows");
    fault_unless(shapes.row_bytes[tile] <= 64, "64 bytes a row");
    fault_unless((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0), "rows and bytes, or neither");
  }
  tiles.configured = true;
  tiles.shapes = shapes;
  std::memset(tiles.bytes, 0, sizeof tiles.bytes);
}

inline void tiles_release() { tiles = Tiles(); }

template <int Tile>
int rows_of() {
  fault_unless(tiles.configured && tiles.shapes.rows[Tile] != 0, "tiles are configured");
  return tiles.shapes.rows[Tile];
}

template <int Tile>
int row_bytes_of() {
  return tiles.shapes.row_bytes[Tile];
}

template <int To>
void tile_zero() {
  rows_of<To>();
  std::memset(tiles.bytes[To], 0, sizeof tiles.bytes[To]);
}

// Rows and bytes beyond the tile's shape become 0.
template <int To>
void tile_load(const void* from, std::int64_t stride) {
  tile_zero<To>();
  for (int row = 0; row < rows_of<To>(); ++row)
    std::memcpy(tiles.bytes[To][row], static_cast<const std::uint8_t*>(from) + row * stride,
                static_cast<std::size_t>(row_bytes_of<To>()));
}

template <int From>
void tile_store(void* to, std::int64_t stride) {
  for (int row = 0; row < rows_of<From>(); ++row)
    std::memcpy(static_cast<std::uint8_t*>(to) + row * stride, tiles.bytes[From][row],
                static_cast<std::size_t>(row_bytes_of<From>()));
}

template <int To, int A, int B, class Right>
void tile_multiply() {
  static_assert(To != A && To != B && A != B, "three tiles");
  fault_unless(row_bytes_of<To>() % 4 == 0 && row_bytes_of<A>() % 4 == 0, "rows of whole sums and quads");
  fault_unless(rows_of<To>() == rows_of<A>() && row_bytes_of<To>() == row_bytes_of<B>(), "rows of a, columns of b");
  fault_unless(row_bytes_of<A>() / 4 == rows_of<B>(), "as many quads in a's rows as b has rows");
  for (int m = 0; m < rows_of<To>(); ++m) {
    std::int32_t sums[16];
    std::memcpy(sums, tiles.bytes[To][m], sizeof sums);
    for (int k = 0; k < rows_of<B>(); ++k)
      for (int n = 0; n < row_bytes_of<To>() / 4; ++n)
        for (int i = 0; i < 4; ++i)
          sums[n] += static_cast<std::int8_t>(tiles.bytes[A][m][4 * k + i]) * static_cast<Right>(tiles.bytes[B][k][4 * n + i]);
    std::memcpy(tiles.bytes[To][m], sums, sizeof sums);
  }
}

template <int To, int A, int B>
void tile_multiply_signed() {
  tile_multiply<To, A, B, std::int8_t>();
}

template <int To, int A, int B>
void tile_multiply_unsigned() {
  tile_multiply<To, A, B, std::uint8_t>();
}

}  // namespace
}  // namespace outrider::engine
