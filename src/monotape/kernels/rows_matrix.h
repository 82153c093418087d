// A matrix product over rows: blocks of output are dealt out to workers; each block's operands stream through shared
// memory, weights and activations alike, because both lie in the same blocks of 8 x 32.
#pragma once
#include "ranks_rows.h"

namespace monotape {

struct Product {
  Stage stage;
  int layer, tiles, k_blocks;  // tiles: of eight outputs
  const uint4* input;          // rows in blocks
};

__device__ __forceinline__ Product product_of(const Params& p, Stage stage, int layer) {
  const uint4* input = stage == Stage::output ? p.rows.attended : stage == Stage::down ? p.rows.activation : p.rows.normed;
  const int tiles = stage == Stage::qkv       ? kQkvRows / kTileRows
                    : stage == Stage::gate_up ? 2 * divide_up(kFfn, kTileRows)
                    : stage == Stage::head    ? divide_up(kVocab, kTileRows)
                                              : divide_up(kWidth, kTileRows);
  return {stage, layer, tiles, k_blocks(stage), input};
}

// What becomes of two neighbouring outputs of a row, by stage. Rows and tiles past the end are left out.
__device__ __forceinline__ void keep_qkv(Consumer& c, const Product& product, int row, int tile, const float* y) {
  const int column = tile * kTileRows + 2 * c.column();
  float2 bias = make_float2(0, 0);
  if constexpr (kQkvBias) {
    const float* biases = c.params.qkv_bias + static_cast<int64_t>(product.layer) * kQkvRows + column;
    bias = make_float2(biases[0], biases[1]);
  }
  *reinterpret_cast<uint32_t*>(c.params.rows.qkv + static_cast<int64_t>(row) * kQkvRows + column) = pack_pair(y[0] + bias.x, y[1] + bias.y);
}
__device__ __forceinline__ void keep_activation(Consumer& c, int row, int tile, const float* y, const float* up) {
  if (tile % 2) return;  // the tile beside has the values that this one's are multiplied with
  const int k = tile / 2 * kTileRows + 2 * c.column();
  uint32_t* word = reinterpret_cast<uint32_t*>(c.params.rows.activation + block_word(row, k / 8, k_blocks(Stage::down)));
  word[c.column()] = pack_pair(__fdividef(y[0], 1 + __expf(-y[0])) * up[0], __fdividef(y[1], 1 + __expf(-y[1])) * up[1]);
}
__device__ __forceinline__ void add_to_residual(Consumer& c, int row, int tile, const float* y) {
  const int column = tile * kTileRows + 2 * c.column();
  float* out = c.params.rows.residual + static_cast<int64_t>(row) * kWidth + column;
  if (column < kWidth) out[0] = load_row_value(out) + y[0];
  if (column + 1 < kWidth) out[1] = load_row_value(out + 1) + y[1];
}
__device__ __forceinline__ void keep_logits(Consumer& c, Chunk chunk, int row, int tile, const float* y) {
  const int column = tile * kTileRows + 2 * c.column();
  float* out = c.params.logits_out + static_cast<int64_t>(chunk.start - c.params.cached + row) * kAllVocab + first_id(c.params) + column;
  if (column < kVocab) out[0] = y[0];
  if (column + 1 < kVocab) out[1] = y[1];
}

// One block of output: RowTiles x ColumnTiles tiles of eight. WarpRows x WarpColumns warps share it.
template <int RowTiles, int ColumnTiles, int WarpRows, int WarpColumns>
class BlockProduct {
 public:
  static constexpr int kTiles = RowTiles + ColumnTiles;
  static constexpr int kStepBlocks = 2, kStepBytes = kTiles * kStepBlocks * kBlockBytes;
  static constexpr int kSteps = smaller(6, kRingPages * kPageBytes / kStepBytes);  // in shared memory at a time
  static constexpr int kRows = RowTiles / WarpRows, kColumns = ColumnTiles / WarpColumns;  // tiles of a warp
  static constexpr int kCopies = divide_up(kTiles, kWarps);
  static_assert(WarpRows * WarpColumns == kWarps && kRows % 2 == 0 && kColumns % 2 == 0 && kSteps >= 3, "a block's shape");

  static __device__ __forceinline__ bool run(Consumer& c, const Product& product, Chunk chunk, int row_tile, int column_tile) {
    const uint8_t* from[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; i++) from[i] = source(c, product, row_tile, column_tile, c.warp() + i * kWarps);
    float sums[kRows / 2][kColumns][4] = {};
    const int steps = divide_up(product.k_blocks, kStepBlocks);
    consumers_meet(kConsumers);  // everybody is done with the block before
#pragma unroll 1
    for (int step = 0; step < kSteps - 1; step++) copy_step(c, from, step, steps, product.k_blocks);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_copy_groups<kSteps - 2>();
      consumers_meet(kConsumers);
      copy_step(c, from, step + kSteps - 1, steps, product.k_blocks);
      multiply_step(c, step % kSteps, sums);
    }
    wait_copy_groups<0>();
    finish(c, product, chunk, row_tile, column_tile, sums);
    return true;
  }

 private:
  static __device__ __forceinline__ uint4* shared_block(Consumer& c, int slot, int tile, int block) {
    return reinterpret_cast<uint4*>(c.shared.ring[0] + slot * kStepBytes + (tile * kStepBlocks + block) * kBlockBytes) + c.lane();
  }

  // Where the first block of a tile of either operand lies; what is past the end is a copy of the last, and not used.
  static __device__ __forceinline__ const uint8_t* source(Consumer& c, const Product& product, int row_tile, int column_tile,
                                                          int tile) {
    if (tile < RowTiles)
      return reinterpret_cast<const uint8_t*>(product.input + static_cast<int64_t>(row_tile + tile) * product.k_blocks * kBlockWords);
    const int column = smaller(column_tile + tile - RowTiles, product.tiles - 1);
    const TilePlace& place = c.params.places[c.params.first_place[static_cast<int>(product.stage)] + column];
    return c.params.tapes + place.start + product.layer * place.stride;
  }

  static __device__ __forceinline__ void copy_step(Consumer& c, const uint8_t* (&from)[kCopies], int step, int steps, int blocks) {
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < kCopies; i++) {
        const int tile = c.warp() + i * kWarps;
        if (kTiles % kWarps && tile >= kTiles) continue;
#pragma unroll
        for (int b = 0; b < kStepBlocks; b++) {
          const int block = step * kStepBlocks + b;
          copy_word(shared_block(c, step % kSteps, tile, b), from[i] + (block < blocks ? block : 0) * kBlockBytes + c.lane() * 16,
                    block < blocks ? 16 : 0);
        }
      }
    }
    end_copy_group();
  }

  static __device__ __forceinline__ void multiply_step(Consumer& c, int slot, float (&sums)[kRows / 2][kColumns][4]) {
    const int first_row = c.warp() / WarpColumns * kRows, first_column = RowTiles + c.warp() % WarpColumns * kColumns;
#pragma unroll
    for (int b = 0; b < kStepBlocks; b++) {
      uint4 x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; i++) x[i] = *shared_block(c, slot, first_row + i, b);
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const uint4 w = *shared_block(c, slot, first_column + j, b);
#pragma unroll
        for (int i = 0; i < kRows; i += 2) {
          multiply_accumulate(sums[i / 2][j], x[i].x, x[i + 1].x, x[i].y, x[i + 1].y, w.x, w.y);
          multiply_accumulate(sums[i / 2][j], x[i].z, x[i + 1].z, x[i].w, x[i + 1].w, w.z, w.w);
        }
      }
    }
  }

  template <class Keep>
  static __device__ __forceinline__ void for_each_pair(Consumer& c, const Product& product, Chunk chunk, int row_tile,
                                                       int column_tile, float (&sums)[kRows / 2][kColumns][4], Keep keep) {
    const int first_row = (row_tile + c.warp() / WarpColumns * kRows) * kTileRows + c.row();
    const int first_tile = column_tile + c.warp() % WarpColumns * kColumns;
#pragma unroll
    for (int i = 0; i < kRows; i++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
        if (first_row + 8 * i < chunk.count && first_tile + j < product.tiles)
          keep(first_row + 8 * i, first_tile + j, sums[i / 2][j] + i % 2 * 2, sums[i / 2][j ^ 1] + i % 2 * 2);
  }

  static __device__ __forceinline__ void finish(Consumer& c, const Product& product, Chunk chunk, int row_tile, int column_tile,
                                                float (&sums)[kRows / 2][kColumns][4]) {
    const auto is_nan = [](const float* y) { return y[0] != y[0] || y[1] != y[1]; };
    bool nan = false;
    for_each_pair(c, product, chunk, row_tile, column_tile, sums,
                  [&](int, int, const float* y, const float*) { nan |= is_nan(y); });
    if (nan) report_nan(c.shared, product.stage, product.layer);
    if (product.stage == Stage::qkv)
      for_each_pair(c, product, chunk, row_tile, column_tile, sums,
                    [&](int row, int tile, const float* y, const float*) { keep_qkv(c, product, row, tile, y); });
    else if (product.stage == Stage::gate_up)
      for_each_pair(c, product, chunk, row_tile, column_tile, sums,
                    [&](int row, int tile, const float* y, const float* up) { keep_activation(c, row, tile, y, up); });
    else if (product.stage == Stage::head)
      for_each_pair(c, product, chunk, row_tile, column_tile, sums,
                    [&](int row, int tile, const float* y, const float*) { keep_logits(c, chunk, row, tile, y); });
    else if constexpr (kRanks == 1)
      for_each_pair(c, product, chunk, row_tile, column_tile, sums,
                    [&](int row, int tile, const float* y, const float*) { add_to_residual(c, row, tile, y); });
    else {
      const RowSums partial(c, chunk, product.stage, product.layer);
      for_each_pair(c, product, chunk, row_tile, column_tile, sums, [&](int row, int tile, const float* y, const float*) {
        partial.keep(row, tile * kTileRows + 2 * c.column(), y);
      });
    }
  }
};

// Large blocks where there are enough of them for all workers, small ones otherwise.
__device__ __forceinline__ void multiply_rows(Consumer& c, Chunk chunk, Stage stage, int layer) {
  using Large = BlockProduct<16, 16, 2, 4>;
  using Small = BlockProduct<8, 4, 4, 2>;
  c.refresh();
  const Product product = product_of(c.params, stage, layer);
  const int row_tiles = divide_up(chunk.count, kTileRows);
  const int large = divide_up(row_tiles, 16) * divide_up(product.tiles, 16);
  const int small = divide_up(row_tiles, 8) * divide_up(product.tiles, 4);
  constexpr int kLargeCost = 4;  // in small blocks: eight times the work at twice the rate
  // Blocks of the same weights are neighbours in time, so that the weights are read from memory once.
  if (divide_up(large, kWorkers) * kLargeCost <= divide_up(small, kWorkers)) {
    const int rows = divide_up(row_tiles, 16);
#pragma unroll 1
    for (int i = blockIdx.x; i < large; i += kWorkers) Large::run(c, product, chunk, i % rows * 16, i / rows * 16);
  } else {
    const int rows = divide_up(row_tiles, 8);
#pragma unroll 1
    for (int i = blockIdx.x; i < small; i += kWorkers) Small::run(c, product, chunk, i % rows * 8, i / rows * 4);
  }
}

}  // namespace monotape
