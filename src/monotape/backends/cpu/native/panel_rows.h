// A tile times a panel of four activation rows, for instruction sets that multiply 16-bit integers: the rows of a block
// lie one after another, and each weight that is widened serves all of them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace monotape::MONOTAPE_ISA {

struct PanelBlock {
  Q8Block rows[kPanelRows];
};

static inline void put_panel_row(const int16_t* x, float scale, int row, PanelBlock& block) {
  put_row(x, scale, block.rows[row]);
}

// Adds `blocks` blocks to the results at `from` and stores them at `to`, kPanelRows rows of eight floats; strides in
// floats. `scales`: eight a block, the tile's.
static inline void q8_panel(const uint8_t* tile, int blocks, const PanelBlock* panel, const float* scales,
                            const float* from, size_t from_stride, float* to, size_t to_stride) {
  f32x8 y[kPanelRows], dots[kPanelRows];
  for (int r = 0; r < kPanelRows; r++) y[r] = load(from + r * from_stride);
  for (int b = 0; b < blocks; b++, tile += kQ8BlockBytes, scales += kTileRows) {
    q8_block<kPanelRows>(reinterpret_cast<const int8_t*>(tile + 2 * kTileRows), panel[b].rows, dots);
    const f32x8 weights = load(scales);
    for (int r = 0; r < kPanelRows; r++) y[r] = fma(mul(dots[r], broadcast(panel[b].rows[r].scale)), weights, y[r]);
  }
  for (int r = 0; r < kPanelRows; r++) store(to + r * to_stride, y[r]);
}

static inline f32x8 q8_block(const int8_t* w, const Q8Block& x) {
  f32x8 dots;
  q8_block<1>(w, &x, &dots);
  return dots;
}

}  // namespace monotape::MONOTAPE_ISA
