// A tile times a panel of four activation rows, for instruction sets that multiply 16-bit integers: the rows of a block
// lie one after another, and each register of weights serves all of them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "repeat.h"

namespace monotape::MONOTAPE_ISA {

// A panel is read like rows whose blocks alternate.
constexpr bool kRowsInPanels = true;

template <int Group>
struct PanelBlock {
  InputBlock<Group> rows[kPanelRows];
};

template <int Group>
static inline void put_panel_row(const int16_t* x, float scale, int shift, int lacks, int row, PanelBlock<Group>& block) {
  put_row<Group>(x, scale, shift, lacks, block.rows[row]);
}
// Unpacked codes as panel_product() reads them: as for a single row.
template <int Bits, bool Centred>
static inline bytes32 for_panels(bytes32 codes) {
  return codes;
}
template <int Group>
static inline f32x8 add_sum_by(const InputBlock<Group>& x, f32x8 minima, f32x8 y) {
  return fma(minima, broadcast(x.sum), y);
}
template <int Group>
static inline float panel_sum(const PanelBlock<Group>& block, int row) {
  return block.rows[row].sum;
}

// Adds `blocks` blocks of int8 ([k / 4][row][4], `stride` bytes apart) to the results at `from` and stores them at `to`,
// kPanelRows rows of eight floats; strides of results in floats. `scales`: eight a block, the tile's.
template <int Group>
static inline void panel_product(const uint8_t* codes, size_t stride, int blocks, const PanelBlock<Group>* panel,
                                 const float* scales, const float* from, size_t from_stride, float* to, size_t to_stride) {
  f32x8 y[kPanelRows];
  for (int r = 0; r < kPanelRows; r++) y[r] = load(from + r * from_stride);
  for (int b = 0; b < blocks; b++, codes += stride, scales += kTileRows) {
    const InputBlock<Group>* x = panel[b].rows;
    Dots<Group> dots[kPanelRows];
    repeat<kPanelRows>(MT_BODY(r) { dots[r].begin(x[r]); });
    repeat<Group / 4>(MT_BODY(i) {
      const bytes32 w = load_pair(codes + 32 * i);
      repeat<kPanelRows>(MT_BODY(r) { dots[r].template step<i>(w, x[r]); });
    });
    const f32x8 weights = load(scales);
    for (int r = 0; r < kPanelRows; r++) y[r] = fma(dots[r].total(x[r]), weights, y[r]);
  }
  for (int r = 0; r < kPanelRows; r++) store(to + r * to_stride, y[r]);
}

}  // namespace monotape::MONOTAPE_ISA
