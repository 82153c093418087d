// A matrix product over rows: blocks of output are dealt out to workers; each block's operands stream through shared
// memory, weights and activations alike, because both lie in the same blocks of 8 x 32, and groups of four warps
// multiply them there.
#pragma once
#include "rows/block.h"
#include "rows/epilogue.h"

namespace monotape {

__host__ __device__ constexpr bool is_multiplied(Format format) {
  for (int i = 0; i < kProducts; i++)
    if (product(i).format == format) return true;
  return false;
}
template <int Number, int F = 0>
__device__ __forceinline__ void multiply_block(Consumer& c, const RowProduct& product, Block at) {
  constexpr Format kFormat = static_cast<Format>(F);
  constexpr Shape kShape = shape_row(Number);
  if constexpr (F + 1 == kFormats || kOneFormat) return BlockProduct<kShape.row_tiles, kShape.column_tiles, kFormat>::run(c, product, at);
  if constexpr (is_multiplied(kFormat))
    if (product.format == kFormat) return BlockProduct<kShape.row_tiles, kShape.column_tiles, kFormat>::run(c, product, at);
  multiply_block<Number, F + 1 == kFormats ? F : F + 1>(c, product, at);
}

template <int Number = 0>
__device__ __forceinline__ void multiply_shape(Consumer& c, const RowProduct& product, Block at) {
  if constexpr (Number + 1 == kShapes) multiply_block<Number>(c, product, at);
  else if (product.shape == Number) multiply_block<Number>(c, product, at);
  else multiply_shape<Number + 1>(c, product, at);
}

__device__ __forceinline__ int blocks_of(Consumer& c, const RowProduct& product) {
  const Shape shape = shape_of(product);
  if constexpr (kExperts > 0)
    if (is_routed(product.stage)) return rows_state(c).expert_blocks[kExperts] * divide_up(product.tiles, shape.column_tiles);
  const Grid grid = grid_of(product, shape);
  return ((grid.columns - grid.narrow) * grid.rows + grid.narrow * grid.few) * product.pieces.count;
}
// The i-th block of output. Blocks of the same weights are neighbours in time, so that the weights are read from memory
// once.
__device__ __forceinline__ Block block_of(Consumer& c, const RowProduct& product, int i) {
  const Shape shape = shape_of(product);
  if constexpr (kExperts > 0)
    if (is_routed(product.stage)) {
      const int columns = divide_up(product.tiles, shape.column_tiles), expert = expert_of_block(c, i / columns);
      const int before = rows_state(c).expert_blocks[expert], blocks = rows_state(c).expert_blocks[expert + 1] - before;
      const int at = i - before * columns;
      return {at % blocks * shape.row_tiles, at / blocks * shape.column_tiles, 0, expert};
    }
  const Grid grid = grid_of(product, shape);
  const int whole = (grid.columns - grid.narrow) * grid.rows * product.pieces.count;  // blocks of columns that have all rows
  const bool narrow = i >= whole;
  const int rows = narrow ? grid.few : grid.rows, at = narrow ? i - whole : i;
  const int first_row = narrow ? grid.rows - grid.few : 0, first_column = narrow ? 0 : grid.narrow;
  return {(first_row + at % rows) * shape.row_tiles, (first_column + at / rows / product.pieces.count) * shape.column_tiles,
          at / rows % product.pieces.count};
}

__device__ __forceinline__ void multiply_rows(Consumer& c) {
  if constexpr (kExperts > 0) {
    const RowProduct product = product_of(c);
    if (is_routed(product.stage)) count_expert_blocks(c, shape_of(product).row_tiles);
  }
#pragma unroll 1
  for (int i = worker_number();; i += kWorkers) {
    {
      c.refresh();
      const RowProduct product = product_of(c);
      if (i >= blocks_of(c, product)) return;
      const Block at = block_of(c, product, i);
      multiply_shape(c, product, at);
    }
    c.refresh();
    const RowProduct product = product_of(c);
    finish_block(c, product, block_of(c, product, i));
  }
}

}  // namespace monotape
