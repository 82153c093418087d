// A matrix product over rows: blocks of output are dealt out to workers; each block's operands stream through shared
// memory, weights and activations alike, because both lie in the same blocks of 8 x 32, and groups of four warps
// multiply them there.
#pragma once
#include "ranks_rows.h"

namespace monotape {

// Products whose pieces of k the part after them adds up. What the others leave is not a sum.
__device__ constexpr bool leaves_pieces(Stage s) { return s == Stage::qkv || s == Stage::output || s == Stage::down; }
__device__ constexpr int tiles_of(Stage s) {
  return s == Stage::qkv       ? kQkvRows / kTileRows
         : s == Stage::gate_up ? 2 * divide_up(kFfn, kTileRows)
         : s == Stage::head    ? divide_up(kVocab, kTileRows)
                               : kWidthWords;
}

// A block of work, in tiles.
struct Shape {
  int row_tiles, column_tiles;
};
constexpr int kShapes = 4;
__device__ constexpr Shape shape_of(int number) {
  return number == 0 ? Shape{8, 16} : number == 1 ? Shape{16, 16} : number == 2 ? Shape{16, 24} : Shape{16, 32};
}

// The shape that is done first. A block's time is what it reads, and some more to begin and to end; sums of pieces are
// written and read once more.
__device__ __forceinline__ Cut cut_of(Stage stage, int rows) {
  constexpr int kBeginning = 250;  // in blocks of 8 x 32 that a worker could read
  const int tiles = tiles_of(stage), blocks = k_blocks(stage);
  Cut best = {0, 1};
  int least = 0x7fffffff;
#pragma unroll 1
  for (int i = 0; i < kShapes; i++) {
    const Shape shape = shape_of(i);
    const int items = divide_up(rows, shape.row_tiles * kTileRows) * divide_up(tiles, shape.column_tiles);
    const int most = leaves_pieces(stage) ? larger(1, smaller(kWorkers / items, blocks / 4)) : 1;
    const int each = divide_up(blocks, most), pieces = divide_up(blocks, each);  // none is empty
    const int sums = pieces * rows * tiles * 2 / (kBlockWords / 2 * kWorkers);
    const int time = divide_up(items * pieces, kWorkers) * ((shape.row_tiles + shape.column_tiles) * each + kBeginning) + sums;
    if (time < least) least = time, best = {i, pieces};
  }
  return best;
}

// A new chunk begins. Its cuts are found out once.
__device__ __forceinline__ bool begin_chunk(Consumer& c, int start) {
  if (!c.meet()) return false;  // nobody looks at the chunk before any more
  RowsState& state = rows_state(c);
  const Chunk chunk = {start, smaller(c.params.chunk, c.params.prompt_length - start)};
  if (c.thread == 0) state.chunk = chunk, state.number = 0;
  if (c.thread < kMatrixStages) state.cuts[c.thread] = cut_of(static_cast<Stage>(c.thread), chunk.count);
  return c.meet();
}

__device__ __forceinline__ Stage stage_of(const RowsState& state) {
  const Part part = state.part();
  if (state.layer() == kLayers) return Stage::head;  // for tests: logits of all rows
  return part == Part::qkv ? Stage::qkv : part == Part::output ? Stage::output : part == Part::down ? Stage::down : Stage::gate_up;
}
__device__ __forceinline__ Pieces pieces_of(Consumer& c, Stage stage) {
  const RowsState& state = rows_state(c);
  return {state.cuts[static_cast<int>(stage)].pieces, state.chunk.count, tiles_of(stage)};
}

// The product at hand.
struct Product {
  Chunk chunk;
  Stage stage;
  int layer, tiles, blocks;  // tiles: of eight outputs
  const uint4* input;        // rows in blocks
  Pieces pieces;
  int shape;
};

__device__ __forceinline__ Product product_of(Consumer& c) {
  const RowsState& state = rows_state(c);
  const Rows& rows = c.params.rows;
  const Stage stage = stage_of(state);
  const uint4* input = stage == Stage::output ? rows.attended : stage == Stage::down ? rows.activation : rows.normed;
  const int layer = stage == Stage::head ? 0 : state.layer();
  return {state.chunk, stage, layer, tiles_of(stage), k_blocks(stage), input, pieces_of(c, stage), state.cuts[static_cast<int>(stage)].shape};
}

// A block of work, and where its output begins.
struct Block {
  int row_tile, column_tile, piece;
};

// What becomes of eight neighbouring outputs of a row, by stage.
__device__ __forceinline__ void keep_activation(Consumer& c, int row, int tile, const float (&gate)[8], const float (&up)[8]) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = __fdividef(gate[i], 1 + __expf(-gate[i])) * up[i];
  c.params.rows.activation[block_word(row, tile / 2, k_blocks(Stage::down))] = pack8(value);
}
__device__ __forceinline__ void keep_logits(Consumer& c, const Chunk& chunk, int row, int tile, const float (&y)[8]) {
  float* out = c.params.logits_out + static_cast<int64_t>(chunk.start - c.params.cached + row) * kAllVocab + first_id(c.params);
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (tile * kTileRows + i < kVocab) out[tile * kTileRows + i] = y[i];
}

// A finished block goes through shared memory, so that whole words leave it. Floats of a row: the next is on other banks.
__device__ constexpr int finished_stride(int column_tiles) { return column_tiles * kTileRows + 8; }
__device__ __forceinline__ float* finished_row(Consumer& c, int row, int column_tiles) {
  return reinterpret_cast<float*>(c.shared.ring[0]) + row * finished_stride(column_tiles);
}

// One block of output: RowTiles x ColumnTiles tiles of eight. Two groups of warps share it, by rows or by columns.
template <int RowTiles, int ColumnTiles>
class BlockProduct {
 public:
  static constexpr int kTiles = RowTiles + ColumnTiles, kRowCopies = RowTiles / kWarps, kColumnCopies = ColumnTiles / kWarps;
  static constexpr int kStepBlocks = kTiles > 32 ? 1 : 2, kStepBytes = kTiles * kStepBlocks * kBlockBytes;
  static constexpr int kSteps = smaller(8, kRingPages * kPageBytes / kStepBytes);  // in shared memory at a time
  static constexpr bool kByRows = RowTiles == 16;
  static constexpr int kColumns = kByRows ? ColumnTiles : ColumnTiles / 2;  // tiles of a group
  static_assert(RowTiles == 8 || RowTiles == 16, "a group has 64 rows");
  static_assert(kTiles % kWarps == 0 && kColumns % 8 == 0 && kSteps >= 4, "a block's shape");
  static_assert(RowTiles * kTileRows * finished_stride(ColumnTiles) * 4 <= kRingPages * kPageBytes, "a finished block fits the ring");

  // Leaves the finished block in shared memory.
  static __device__ __forceinline__ void run(Consumer& c, const Product& product, Block at) {
    const int each = divide_up(product.blocks, product.pieces.count), first = at.piece * each;
    const int last = smaller(product.blocks, first + each), steps = divide_up(last - first, kStepBlocks);
    uint32_t from[1 + kColumnCopies];  // rows follow each other, columns are on the tapes of their owners
    from[0] = (at.row_tile + c.warp()) * product.blocks * kBlockWords + c.lane();
#pragma unroll
    for (int i = 0; i < kColumnCopies; i++) from[1 + i] = column_source(c, product, at, i) + c.lane();
    float sums[kColumns][4];
    clear_sums(sums);
    consumers_meet(kConsumers);  // everybody is done with the block before
#pragma unroll 1
    for (int step = 0; step < kSteps - 2; step++) copy_step(c, product, from, step, first + step * kStepBlocks, last);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_copy_groups<kSteps - 3>();
      fence_shared_copies();
      consumers_meet(kConsumers);
      multiply_step(c, step % kSteps, sums);
      // Everybody has waited for the products of two steps ago before they met.
      const int next = step + kSteps - 2;
      copy_step(c, product, from, next % kSteps, first + next * kStepBlocks, last);
      wait_operands();
    }
    wait_products(sums);
    wait_copy_groups<0>();
    consumers_meet(kConsumers);
    leave(c, sums);
    consumers_meet(kConsumers);
  }

 private:
  static __device__ __forceinline__ uint8_t* step_place(Consumer& c, int slot) { return c.shared.ring[0] + slot * kStepBytes; }

  // Where the first block of a tile of weights lies, in words; what is past the end is a copy of the last, and not used.
  static __device__ __forceinline__ uint32_t column_source(Consumer& c, const Product& product, Block at, int i) {
    const int column = smaller(at.column_tile + c.warp() + i * kWarps, product.tiles - 1);
    const TilePlace& place = c.params.places[c.params.first_place[static_cast<int>(product.stage)] + column];
    return static_cast<uint32_t>((place.start + product.layer * place.stride) / 16);
  }

  static __device__ __forceinline__ void copy_step(Consumer& c, const Product& product, const uint32_t (&from)[1 + kColumnCopies],
                                                   int slot, int block, int last) {
    if (block < last) {
      uint8_t* to = step_place(c, slot) + c.warp() * kBlockBytes + operand_place(c.lane()) * 16;
#pragma unroll
      for (int b = 0; b < kStepBlocks; b++) {
        const uint32_t bytes = block + b < last ? 16 : 0;
        const uint32_t word = (bytes ? block + b : block) * kBlockWords;
#pragma unroll
        for (int i = 0; i < kRowCopies; i++)
          copy_word(to + (b * kTiles + i * kWarps) * kBlockBytes,
                    product.input + (from[0] + word + i * kWarps * product.blocks * kBlockWords), bytes);
#pragma unroll
        for (int i = 0; i < kColumnCopies; i++)
          copy_word(to + (b * kTiles + RowTiles + i * kWarps) * kBlockBytes,
                    reinterpret_cast<const uint4*>(c.params.tapes) + (from[1 + i] + word), bytes);
      }
    }
    end_copy_group();
  }

  static __device__ __forceinline__ void multiply_step(Consumer& c, int slot, float (&sums)[kColumns][4]) {
    const int group = c.warp() / 4;
    const uint8_t* rows = step_place(c, slot) + (kByRows ? group * 8 : 0) * kBlockBytes;
    const uint8_t* columns = step_place(c, slot) + (RowTiles + (kByRows ? 0 : group * kColumns)) * kBlockBytes;
    fence_products();
#pragma unroll
    for (int b = 0; b < kStepBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint8_t* x = rows + b * kTiles * kBlockBytes;
        const uint8_t* w = columns + b * kTiles * kBlockBytes;
#pragma unroll
        for (int j = 0; j + 16 <= kColumns; j += 16) begin_product<16>(sums + j, x, w + j * kBlockBytes, half);
        if constexpr (kColumns % 16) begin_product<8>(sums + kColumns - 8, x, w + (kColumns - 8) * kBlockBytes, half);
      }
    end_product_group();
  }

  static __device__ __forceinline__ void leave(Consumer& c, const float (&sums)[kColumns][4]) {
    const int row = (kByRows ? c.warp() : c.warp() % 4) * 16 + c.row();
    const int column = (kByRows ? 0 : c.warp() / 4 * kColumns * kTileRows) + 2 * c.column();
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(finished_row(c, row + 8 * half, ColumnTiles) + column + j * kTileRows) =
            make_float2(sums[j][2 * half], sums[j][2 * half + 1]);
  }
};

// Eight values of a finished row; true if one of them is not a number.
__device__ __forceinline__ bool take(const float* from, float (&value)[8]) {
  load8(from, value);
  bool nan = false;
#pragma unroll
  for (int i = 0; i < 8; i++) nan |= value[i] != value[i];
  return nan;
}

// The finished block leaves shared memory. Rows and tiles past the end are left out.
__device__ __forceinline__ void finish_block(Consumer& c, const Product& product, Block at) {
  const Shape shape = shape_of(product.shape);
  const int rows = smaller(shape.row_tiles * kTileRows, product.chunk.count - at.row_tile * kTileRows);
  const int each = product.stage == Stage::gate_up ? 2 : 1, across = shape.column_tiles / each;
  bool nan = false;
#pragma unroll 1
  for (int i = c.thread; i < rows * across; i += kConsumers) {
    const int row = at.row_tile * kTileRows + i / across, tile = at.column_tile + i % across * each;
    if (tile >= product.tiles) continue;
    const float* from = finished_row(c, i / across, shape.column_tiles) + i % across * each * kTileRows;
    float value[8];
    nan |= take(from, value);
    if (product.stage == Stage::gate_up) {  // gate tiles are even, their up tiles follow
      float up[8];
      nan |= take(from + kTileRows, up);
      keep_activation(c, row, tile, value, up);
    } else if (product.stage == Stage::head) {
      keep_logits(c, product.chunk, row, tile, value);
    } else if (kRanks > 1 && product.stage != Stage::qkv && product.pieces.count == 1) {
      RowSums(c, product.stage).keep(row, tile, value);
    } else {
      store_row_values(piece_values(c.params, product.pieces, at.piece, row, tile), value);
    }
  }
  if (nan) report_nan(c.shared, product.stage, product.layer);
}

template <int Number>
__device__ __forceinline__ void multiply_block(Consumer& c, const Product& product, Block at) {
  BlockProduct<shape_of(Number).row_tiles, shape_of(Number).column_tiles>::run(c, product, at);
}

__device__ __forceinline__ int blocks_of(const Product& product) {
  const Shape shape = shape_of(product.shape);
  return divide_up(product.chunk.count, shape.row_tiles * kTileRows) * divide_up(product.tiles, shape.column_tiles) * product.pieces.count;
}
// Which block of output the i-th one is. Blocks of the same weights are neighbours in time, so that the weights are read
// from memory once.
__device__ __forceinline__ Block block_of(const Product& product, int i) {
  const Shape shape = shape_of(product.shape);
  const int rows = divide_up(product.chunk.count, shape.row_tiles * kTileRows);
  return {i % rows * shape.row_tiles, i / rows / product.pieces.count * shape.column_tiles, i / rows % product.pieces.count};
}

__device__ __forceinline__ void multiply_rows(Consumer& c) {
#pragma unroll 1
  for (int i = blockIdx.x;; i += kWorkers) {
    {
      c.refresh();
      const Product product = product_of(c);
      if (i >= blocks_of(product)) return;
      const Block at = block_of(product, i);
      if (product.shape == 0) multiply_block<0>(c, product, at);
      else if (product.shape == 1) multiply_block<1>(c, product, at);
      else if (product.shape == 2) multiply_block<2>(c, product, at);
      else multiply_block<3>(c, product, at);
    }
    c.refresh();
    const Product product = product_of(c);
    finish_block(c, product, block_of(product, i));
  }
}

}  // namespace monotape
