// The product at hand of a pass over many rows: how it is cut into pieces and blocks of output, and which rows a block has.
#pragma once
#include "ranks/rows.h"
#include "rows/experts.h"

namespace monotape {

__device__ __forceinline__ int tiles_of(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.tiles; });
}

// How a product of so many rows is cut: see compiler/gpu/rows.py.
__device__ __forceinline__ Cut cut_of(int stage, int rows) {
  const unsigned char(&cut)[2] = kCuts[stage][divide_up(rows, kCutRows) - 1];
  return {cut[0], cut[1]};
}

// A new chunk begins.
constexpr int kFewChunks = 8;  // a chunk has few rows if this many are no more than a whole one
__device__ __forceinline__ bool begin_chunk(Consumer& c, int start) {
  if (!c.meet()) return false;  // no thread reads the state of the chunk before any more
  RowsState& state = rows_state(c);
  const Chunk chunk = {start, smaller(c.params.chunk, c.params.prompt_length - start)};
  // Of a chunk of few rows all are computed: the products of a single row take no less time, with fewer workers.
  const bool all = c.params.logits_out || chunk.count * kFewChunks <= c.params.chunk;
  const int read = all ? chunk.count : end_of(chunk) == c.params.prompt_length ? 1 : 0;  // rows, the last ones
  if (c.thread == 0) state.chunk = chunk, state.read_from = chunk.count - read, state.go_to(0, 0);
  if (c.thread < kMatrixStages) state.cuts[c.thread] = cut_of(c.thread, chunk.count);
  return c.meet();
}

// The pieces of k in which a product is cut.
__device__ __forceinline__ Pieces cut_pieces(Consumer& c, Stage stage) {
  const RowsState& state = rows_state(c);
  return {state.cuts[static_cast<int>(stage)].pieces, state.chunk.count, tiles_of(stage)};
}
// The pieces of a sum: those, or one of each of a row's experts.
__device__ __forceinline__ Pieces pieces_of(Consumer& c, Stage stage) {
  if constexpr (kExperts > 0)
    if (is_routed(stage)) return {kChosen, rows_state(c).chunk.count, tiles_of(stage)};
  return cut_pieces(c, stage);
}

// The current product.
struct RowProduct {
  Chunk chunk;
  Stage stage;
  int layer, tiles, blocks;  // tiles: of eight outputs
  const uint4* input;        // rows in blocks
  Pieces pieces;
  int shape;
  Format format;
  int narrow_tiles, first_row;  // the first so many tiles are computed from that row on only
};

// One row is read by the shape that reads least beside it. The pieces of k stay those of the whole chunk, because bits depend
// on them and not on the shape.
constexpr int kOneRowShape = 0;
static_assert(shape_row(kOneRowShape).row_tiles <= shape_row(kShapes - 1).row_tiles, "shapes begin with the smallest");
__device__ __forceinline__ int narrow_tiles_of(const RowsState& state) {
  if (is_routed(state.part.stage)) return 0;  // the lists have the rows
  if (state.first_row() > 0) return tiles_of(state.part.stage);
  return state.part.stage == kAttends && state.first_query() > 0 ? kHeads * kHeadDim / kTileRows : 0;
}

__device__ __forceinline__ RowProduct product_of(Consumer& c) {
  const RowsState& state = rows_state(c);
  const Rows& rows = c.params.rows;
  const Stage stage = state.part.stage;
  const Buffer reads = of_stage(stage, [](StageRow row) { return row.reads; });
  const uint4* input = reads == Buffer::attended ? rows.attended : reads == Buffer::activation ? rows.activation : rows.normed;
  const int layer = stage == Stage::head ? 0 : state.layer;
  const int blocks = of_stage(stage, [](StageRow row) { return divide_up(row.k, kBlockK); });
  const int shape = state.first_row() > 0 ? kOneRowShape : state.cuts[static_cast<int>(stage)].shape;
  return {state.chunk, stage, layer, tiles_of(stage), blocks, input, cut_pieces(c, stage), shape,
          of_stage(stage, [](StageRow row) { return monotape::product(row.product).format; }), narrow_tiles_of(state), state.first_query()};
}

// The shape of its blocks, chosen among constants.
template <int Number = 0>
__device__ __forceinline__ Shape shape_of(const RowProduct& product) {
  constexpr Shape kShape = shape_row(Number);
  if constexpr (Number + 1 == kShapes) return kShape;
  else return product.shape == Number ? kShape : shape_of<Number + 1>(product);
}

// A block of work, and where its output begins.
struct Block {
  int row_tile, column_tile, piece;
  int expert = 0;  // of a routed stage
};

// The blocks of output: in the first `narrow` columns only the last `few` blocks of rows are computed.
struct Grid {
  int rows, columns, few, narrow;
};
__device__ __forceinline__ Grid grid_of(const RowProduct& product, Shape shape) {
  const int each = shape.row_tiles * kTileRows, rows = divide_up(product.chunk.count, each), columns = divide_up(product.tiles, shape.column_tiles);
  const int few = product.first_row < product.chunk.count ? rows - product.first_row / each : 0;
  return {rows, columns, few, product.narrow_tiles == product.tiles ? columns : product.narrow_tiles / shape.column_tiles};
}

// Numbers of 16-byte words of a lane's rows, where rows do not follow each other.
template <int Count>
struct RowSources {
  uint32_t row_[Count];
  __device__ __forceinline__ uint32_t& row(int i) { return row_[i]; }
  __device__ __forceinline__ uint32_t row(int i) const { return row_[i]; }
};
template <>
struct RowSources<0> {
  static __device__ __forceinline__ uint32_t& row(int) { return *static_cast<uint32_t*>(nullptr); }
};

// The pair in a place of an expert's list, and the row of the stage's input that it takes: a pair has an activation of its own.
__device__ __forceinline__ int pair_of(Consumer& c, int expert, int place) {
  const ExpertRows rows = expert_rows(c.params);
  const int count = load_row_number(rows.counts + expert);
  return load_row_number(rows.lists + expert * kChunkRows + smaller(place, count - 1));
}
__device__ __forceinline__ int input_row(Consumer& c, const RowProduct& product, int expert, int place) {
  const int pair = pair_of(c, expert, place);
  return product.stage == kFirstRouted ? pair % product.chunk.count : pair;
}

// Rows that a block's product has in all, and where the output of one of them goes.
__device__ __forceinline__ int row_count(Consumer& c, const RowProduct& product, Block at) {
  if constexpr (kExperts > 0)
    if (is_routed(product.stage)) return load_row_number(expert_rows(c.params).counts + at.expert);
  return product.chunk.count;
}
__device__ __forceinline__ int output_row(Consumer& c, const RowProduct& product, Block at, int row) {
  if constexpr (kExperts > 0)
    if (is_routed(product.stage)) return pair_of(c, at.expert, row);
  return row;
}

// A finished block goes through shared memory, so that whole words are stored. Floats per row: padded, so that rows start on
// different banks.
__device__ constexpr int finished_stride(int column_tiles) { return column_tiles * kTileRows + 8; }
__device__ __forceinline__ float* finished_row(Consumer& c, int row, int column_tiles) {
  return reinterpret_cast<float*>(c.shared.ring[0]) + row * finished_stride(column_tiles);
}

}  // namespace monotape
