// A matrix product over rows: blocks of output are dealt out to workers; each block's operands stream through shared
// memory, weights and activations alike, because both lie in the same blocks of 8 x 32, and groups of four warps
// multiply them there.
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

// A finished block goes through shared memory, so that whole words are stored. Floats per row: padded, so that rows start on
// different banks.
__device__ constexpr int finished_stride(int column_tiles) { return column_tiles * kTileRows + 8; }
__device__ __forceinline__ float* finished_row(Consumer& c, int row, int column_tiles) {
  return reinterpret_cast<float*>(c.shared.ring[0]) + row * finished_stride(column_tiles);
}

// One block of output: RowTiles x ColumnTiles tiles of eight. Two groups of warps share it, by rows or by columns.
template <int RowTiles, int ColumnTiles, Format F>
class BlockProduct {
 public:
  static constexpr int kTiles = RowTiles + ColumnTiles, kRowCopies = divide_up(RowTiles, kWarps * kSide), kColumnCopies = divide_up(ColumnTiles, kWarps * kSide);
  static constexpr int kStepBlocks = step_blocks(kTiles), kStepBytes = kTiles * kStepBlocks * kBlockBytes;
  static constexpr int kSteps = smaller(8, kPrefillBytes / kStepBytes);  // in shared memory at a time
  static constexpr bool kByRows = RowTiles == 16;
  static constexpr int kColumns = kByRows ? ColumnTiles : ColumnTiles / 2;  // tiles of a group
  static_assert(RowTiles == 8 || RowTiles == 16, "a group has 64 rows");
  static_assert(kTiles % kWarps == 0 && kColumns % 8 == 0 && kSteps >= kLeastSteps, "a block's shape");
  static_assert(RowTiles * kTileRows * finished_stride(ColumnTiles) * 4 <= kPrefillBytes, "a finished block fits the ring");

  // Leaves the finished block in shared memory.
  static __device__ __forceinline__ void run(Consumer& c, const RowProduct& product, Block at) {
    const int each = divide_up(product.blocks, product.pieces.count), first = at.piece * each;
    const int last = smaller(product.blocks, first + each), steps = divide_up(last - first, kStepBlocks);
    Sources from;  // rows follow each other, columns are on the tapes of their owners
    if constexpr (kExperts > 0) find_rows(c, product, at, from);
    else from.rows = (at.row_tile + own_tile(c)) * product.blocks * kBlockWords + c.word();
#pragma unroll
    for (int i = 0; i < kColumnCopies; i++) from.columns[i] = column_source(c, product, at, i) + c.word();
    float sums[kSumTiles<kColumns>][4];
    clear_sums(sums);
    consumers_meet(kConsumers);  // all warps are done with the block before
#pragma unroll 1
    for (int step = 0; step < kSteps - 2; step++) copy_step(c, product, from, step, first + step * kStepBlocks, last);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_copy_groups<kSteps - 3>();
      fence_shared_copies();
      consumers_meet(kConsumers);
      multiply_step(c, step % kSteps, sums);
      // All warps awaited the products of two steps ago before this barrier.
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
  using Weight = Stored<F>;
  // Numbers of 16-byte words; those of the tapes have 64 bits only where tapes are so large.
  using TapeWord = Chosen<kLargeTapes, uint64_t, uint32_t>;
  struct Sources : RowSources<kExperts ? kRowCopies : 0> {
    uint32_t rows;
    TapeWord columns[kColumnCopies];
  };

  // Where a lane's rows lie: one after the other, or those of an expert's list. Past the end it is the last one again.
  static __device__ __forceinline__ void find_rows(Consumer& c, const RowProduct& product, Block at, Sources& from) {
#pragma unroll
    for (int i = 0; i < kRowCopies; i++) {
      int row = (at.row_tile + own_tile(c) + i * kWarps * kSide) * kTileRows + c.row();
      if (is_routed(product.stage)) row = input_row(c, product, at.expert, row);
      from.row(i) = (row / kTileRows * product.blocks) * kBlockWords + row % kTileRows * 4 + c.column();
    }
  }

  static __device__ __forceinline__ uint32_t row_word(const RowProduct& product, const Sources& from, uint32_t word, int i) {
    if constexpr (kExperts > 0) return from.row(i) + word;
    else return from.rows + word + i * kWarps * kSide * product.blocks * kBlockWords;
  }

  // The first of the tiles that a lane copies; each kWarps * kSide-th follows.
  static __device__ __forceinline__ int own_tile(const Consumer& c) { return c.warp() + c.side() * kWarps; }

  static __device__ __forceinline__ uint8_t* step_place(Consumer& c, int slot) { return c.shared.ring[0] + slot * kStepBytes; }

  // The first block of a tile of weights, in words; past the end it is the last tile again, and not used.
  static __device__ __forceinline__ TapeWord column_source(Consumer& c, const RowProduct& product, Block at, int i) {
    const int column = smaller(at.column_tile + own_tile(c) + i * kWarps * kSide, product.tiles - 1);
    const TilePlace& place = c.params.places[c.params.first_place[static_cast<int>(product.stage)] + column];
    int64_t start = place.start + product.layer * place.stride;
    if constexpr (kExperts > 0) start += static_cast<int64_t>(at.expert) * kExpertBytes;
    return static_cast<TapeWord>(start / 16);
  }

  static __device__ __forceinline__ void copy_step(Consumer& c, const RowProduct& product, const Sources& from, int slot,
                                                    int block, int last) {
    if (block < last) {
      uint8_t* to = step_place(c, slot) + own_tile(c) * kBlockBytes + operand_place(c.word()) * 16;
#pragma unroll
      for (int b = 0; b < kStepBlocks; b++) {
        const uint32_t bytes = block + b < last ? 16 : 0;
        const uint32_t word = (bytes ? block + b : block) * kBlockWords;
#pragma unroll
        for (int i = 0; i < kRowCopies; i++) {
          if (RowTiles % (kWarps * kSide) && own_tile(c) + i * kWarps * kSide >= RowTiles) continue;
          copy_word(to + (b * kTiles + i * kWarps * kSide) * kBlockBytes, product.input + row_word(product, from, word, i), bytes);
        }
#pragma unroll
        for (int i = 0; i < kColumnCopies; i++) {
          if (ColumnTiles % (kWarps * kSide) && own_tile(c) + i * kWarps * kSide >= ColumnTiles) continue;
          copy_weights(c, to + (b * kTiles + RowTiles + i * kWarps * kSide) * kBlockBytes, from.columns[i], word, bytes);
        }
      }
    }
    end_copy_group();
  }

  // A lane's 16 bytes of a block of weights. Formats that must be converted go through registers.
  // `word` is where it would lie in a tile of 16-bit values.
  static __device__ __forceinline__ void copy_weights(Consumer& c, uint8_t* to, TapeWord tile, uint32_t word, uint32_t bytes) {
    const uint4* tapes = reinterpret_cast<const uint4*>(c.params.tapes);
    if constexpr (Weight::kAsMultiplied) {
      copy_word(to, tapes + (tile + word), bytes);
    } else {
      const uint32_t block = word / kBlockWords;
      const uint8_t* stored = reinterpret_cast<const uint8_t*>(tapes + (tile - c.word())) + block / Weight::kSub * Weight::kBlockBytes;
      *reinterpret_cast<uint4*>(to) = bytes ? Weight::row_operand(stored, c.word(), block % Weight::kSub) : make_uint4(0, 0, 0, 0);
    }
  }

  static __device__ __forceinline__ void multiply_step(Consumer& c, int slot, float (&sums)[kSumTiles<kColumns>][4]) {
    const int group = c.warp() / 4;
    const uint8_t* rows = step_place(c, slot) + (kByRows ? group * 8 : 0) * kBlockBytes;
    const uint8_t* columns = step_place(c, slot) + (RowTiles + (kByRows ? 0 : group * kColumns)) * kBlockBytes;
    fence_products();
#pragma unroll
    for (int b = 0; b < kStepBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        begin_product<kColumns, Weight::kFloat16>(sums, rows + b * kTiles * kBlockBytes, columns + b * kTiles * kBlockBytes, half);
    end_product_group();
  }

  static __device__ __forceinline__ void leave(Consumer& c, const float (&sums)[kSumTiles<kColumns>][4]) {
    const int row = (kByRows ? c.warp() : c.warp() % 4) * 16 + sum_row(c.lane());
    const int column = (kByRows ? 0 : c.warp() / 4 * kColumns * kTileRows) + sum_column(c.lane());
#pragma unroll
    for (int j = 0; j < kSumTiles<kColumns>; j++)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float2*>(finished_row(c, row + 8 * (i / kRowSums), ColumnTiles) + column + sum_step(j, i)) =
            make_float2(sums[j][i], sums[j][i + 1]);
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
