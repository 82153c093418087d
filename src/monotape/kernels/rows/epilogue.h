// What becomes of a finished block: scales, biases, gates, and where its rows are stored.
#pragma once
#include "rows/product.h"

namespace monotape {

// The epilogue of eight neighbouring outputs of a row, by stage.
__device__ __forceinline__ void keep_activation(Consumer& c, int row, int tile, const float (&gate)[8], const float (&up)[8]) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = gated(gate[i], up[i]);
  if constexpr (kExperts > 0) {  // `row` is a pair
    const float weight = load_row_value(expert_rows(c.params).weights + row);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] *= weight;
  }
  constexpr Stage kReader = reader_of(Buffer::activation);
  constexpr bool kReadsFloat16 = format_is_float16(product(row_of(kReader).product).format);
  c.params.rows.activation[block_word(row, tile / 2, k_blocks(kReader))] = pack8<kReadsFloat16>(value);
}
__device__ __forceinline__ void keep_logits(Consumer& c, const Chunk& chunk, int row, int tile, const float (&y)[8]) {
  float* out = c.params.logits_out + static_cast<int64_t>(chunk.start - c.params.cached + row) * kAllVocab + first_id(c.params);
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (tile * kTileRows + i < kVocab) out[tile * kTileRows + i] = y[i];
}

// Eight values of a finished row; true if one of them is not a number.
__device__ __forceinline__ bool take(const float* from, float (&value)[8]) {
  load8(from, value);
  bool nan = false;
#pragma unroll
  for (int i = 0; i < 8; i++) nan |= value[i] != value[i];
  return nan;
}

// Matrices of the stage that lie before this one.
__device__ __forceinline__ int64_t matrix_number(const RowProduct& product, int expert) {
  if constexpr (kExperts > 0)
    if (is_routed(product.stage)) return static_cast<int64_t>(product.layer) * kExperts + expert;
  return product.layer;
}

// Multiplies eight neighbouring outputs by their scales, where the stage's format has them.
__device__ __forceinline__ void scale_rows(Consumer& c, const RowProduct& product, int expert, int tile, float (&value)[8]) {
  if constexpr (kScalesRows) {
    const int vector = static_cast<int>(of_stage(product.stage, [](StageRow row) { return row.scale; }));
    if (vector < 0) return;
    float scale[8];
    load8(c.params.vectors[vector] + (matrix_number(product, expert) * product.tiles + tile) * kTileRows, scale);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] *= scale[i];
  }
}
// Adds their biases, in the first piece; those of q, k and v are added with the heads. Where outputs of experts are added up,
// activations have been multiplied by the expert's weight, and its bias is here.
__device__ __forceinline__ void add_biases(Consumer& c, const RowProduct& product, Block at, int row, int tile, float (&value)[8]) {
  const int vector = static_cast<int>(of_stage(product.stage, [](StageRow row) { return row.attends ? kNoVector : row.bias; }));
  if (vector < 0 || at.piece > 0) return;
  float bias[8], weight = 1;
  load8(c.params.vectors[vector] + (matrix_number(product, at.expert) * product.tiles + tile) * kTileRows, bias);
  if (kExperts > 0 && has_inputs(product.stage)) weight = load_row_value(expert_rows(c.params).weights + row);
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] += weight * bias[i];
}
__host__ __device__ constexpr bool adds_biases() {
  for (int i = 0; i < kMatrixStages; i++)
    if (stage_row(i).bias != kNoVector && !stage_row(i).attends) return true;
  return false;
}

// Stores the finished block from shared memory, without rows and tiles past the end.
__device__ __forceinline__ void finish_block(Consumer& c, const RowProduct& product, Block at) {
  const Shape shape = shape_of(product);
  const bool narrow = at.column_tile + shape.column_tiles <= product.narrow_tiles || product.narrow_tiles == product.tiles;
  const int first = narrow ? larger(0, product.first_row - at.row_tile * kTileRows) : 0;  // row of the block that is read
  const int rows = smaller(shape.row_tiles * kTileRows, row_count(c, product, at) - at.row_tile * kTileRows) - first;
  const bool paired = is_gated(product.stage);  // gate tiles are even, their up tiles follow
  const int each = paired ? 2 : 1, across = shape.column_tiles / each;
  bool nan = false;
#pragma unroll 1
  for (int i = c.thread; i < rows * across; i += kConsumers) {
    const int in_block = first + i / across, tile = at.column_tile + i % across * each;
    const int row = output_row(c, product, at, at.row_tile * kTileRows + in_block);
    if (tile >= product.tiles) continue;
    const float* from = finished_row(c, in_block, shape.column_tiles) + i % across * each * kTileRows;
    float value[8];
    nan |= take(from, value);
    scale_rows(c, product, at.expert, tile, value);
    if constexpr (adds_biases()) add_biases(c, product, at, row, tile, value);
    if (paired) {
      float up[8];
      nan |= take(from + kTileRows, up);
      scale_rows(c, product, at.expert, tile + 1, up);
      if constexpr (adds_biases()) add_biases(c, product, at, row, tile + 1, up);
      keep_activation(c, row, tile, value, up);
    } else if (product.stage == Stage::head) {
      keep_logits(c, product.chunk, row, tile, value);
    } else if (kRanks > 1 && adds_to_residual(product.stage) && product.pieces.count == 1 && !is_routed(product.stage)) {
      RowSums(c, product.stage).keep(row, tile, value);
    } else {
      store_row_values(piece_values(c.params, product.pieces, at.piece, row, tile), value);
    }
  }
  if (nan) report_nan(c.shared, product.stage, product.layer);
}

}  // namespace monotape
