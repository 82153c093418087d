// A matrix stage of one token: polls the input from the exchange, multiplies it by this worker's tiles as they come off the
// tape, adds up the sums of the eight warps, and passes each finished row to the epilogue.
//
// All matrix stages share this code. A pass may have several rows, `rows` of at most `Rows`: the same weights multiply all of
// them, and each gets the bits of a pass of its own.
#pragma once
#include "token/tiles.h"

namespace monotape {

__device__ __forceinline__ float sum_of_warps(const float (&part)[kWarps]) {
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <int Rows>
__device__ __forceinline__ void sum_squares(float (&squares)[Rows]) {
#pragma unroll
  for (int p = 0; p < Rows; p++) squares[p] = warp_sum(squares[p]);
}

// The tile of the batch from tile `first` on that a thread finishes. Tile t of a worker is always finished by the same
// threads, whatever the batch: the memory order in ranks/words.h depends on it.
static_assert((kBatchTiles & (kBatchTiles - 1)) == 0, "a power of two");
template <int Rows>
__device__ __forceinline__ int own_tile(const Consumer& c, int first) {
  if constexpr (Rows > 1) return c.part(kTileRows) % kMostRowBatch;
  return (c.part(kTileRows) - first) & (kBatchTiles - 1);
}
// The row of the pass that a thread finishes. Eight tiles of four rows are as many elements as there are consumers, and a
// row's threads are whole warps.
static_assert(kRowBatch <= kMostRowBatch && kRows * kMostRowBatch * kTileRows <= kConsumers, "a thread for each element of a batch");
template <int Rows>
__device__ __forceinline__ int own_row_of_pass(const Consumer& c) {
  if constexpr (Rows > 1) return c.part(kMostRowBatch * kTileRows);
  return 0;
}

template <int Rows>
__device__ __forceinline__ float of_own_row(const Consumer& c, const float* values, int first, int count) {
  const int tile = first + own_tile<Rows>(c, first);
  return values && tile < count ? values[tile * kTileRows + c.within(kTileRows)] : 0;
}

// Of experts: the bias and the scale of the row that a thread finishes. Where a worker adds up experts, their scales have been
// applied before (TileProduct), and their biases are added up here.
__device__ __forceinline__ float expert_bias(const Consumer& c, const Matrix& matrix, int first, int count) {
  const int position = first + own_tile<1>(c, first);
  if (!matrix.bias || position >= count) return 0;
  if (!is_dealt(matrix.stage)) return expert_values(c, matrix.bias, matrix.stage, c.span(matrix.stage).first + position);
  const Dealing::Place place = dealing_of(c, matrix.stage).place_of(position);
  return place.real ? expert_value(c, matrix.bias, matrix.stage, place.slot, place.within) : 0;
}
__device__ __forceinline__ float expert_scale(const Consumer& c, const Matrix& matrix, int first, int count) {
  const int position = first + own_tile<1>(c, first);
  const Dealing::Place place = dealing_of(c, matrix.stage).place_of(position);
  const bool scaled = matrix.scale && is_dealt(matrix.stage) && position < count && place.real;
  return (scaled ? expert_value(c, matrix.scale, matrix.stage, place.slot, place.within) : 1) * output_factor(matrix.stage);
}

template <int Rows>
__device__ __forceinline__ float bias_of(const Consumer& c, const Matrix& matrix, int first, int count) {
  if constexpr (kExperts > 0)
    if (is_routed(matrix.stage)) return expert_bias(c, matrix, first, count);
  return of_own_row<Rows>(c, matrix.bias, first, count);
}

template <int Rows>
__device__ __forceinline__ float scale_of(const Consumer& c, const Matrix& matrix, int first, int count) {
  if constexpr (kExperts > 0)
    if (is_routed(matrix.stage)) return expert_scale(c, matrix, first, count);
  return (matrix.scale ? of_own_row<Rows>(c, matrix.scale, first, count) : 1) * output_factor(matrix.stage);
}

// Tiles whose sums are kept before warps add them up: an even number of steps.
__host__ __device__ constexpr int batch_of(int rows, Product p) { return rows == 1 ? p.batch : kRowBatch / (2 * p.together) * 2 * p.together; }

// The first words of an input that stays in the exchange: from then on the stage has its input, as the janitor counts.
template <int Rows>
__device__ __forceinline__ void hear_directly(Consumer& c, Progress& progress, const Matrix& matrix, int count, float (&squares)[Rows]) {
#pragma unroll
  for (int row = 0; row < Rows; row++) squares[row] = 0;
  hear_first<Rows>(c, progress, product_number(matrix.stage), count);
  c.set_pace(kWorking, step_of(c, matrix.stage, matrix.layer));
  warp_meets();
}

// Runs the stage: ending(row of the pass, tile, row of the tile, value, whether it is real) for every row of a batch, with
// whole warps so that the ending may shuffle.
template <int Rows, class Ending>
__device__ __forceinline__ bool run_matrix(Consumer& c, const Matrix& matrix, int rows, Ending ending) {
  const int count = positions_of(c, matrix.stage), number = product_number(matrix.stage);
  const int most = of_stage(matrix.stage, [](StageRow row) { return batch_of(Rows, product(row.product)); });
  if (count == 0) return !needs_choice(c, matrix.stage) || choose_experts(c, matrix.layer);  // all warps must learn of a failure at the same barrier
  c.begin(matrix.stage, matrix.layer);
  c.set_pace(matrix.stage == kAfterAttention ? kAttending : kPolling);
  Progress progress;
  float squares[Rows], bias, scale;
  const bool chooses = kExperts > 0 && matrix.stage == kFirstRouted;
  if (chooses) {  // its input was the router's: it has come, the choice has not
    read_input<Rows>(c, matrix, rows, squares);
    if (!choose_experts(c, matrix.layer)) return false;
  }
  bias = bias_of<Rows>(c, matrix, 0, count);  // in flight while the input is polled
  scale = kScalesOutputs ? scale_of<Rows>(c, matrix, 0, count) : 1;
  if constexpr (kExperts > 0) begin_runs(c, progress, matrix.stage);
  c.pages.go_to(c, matrix.stage, matrix.layer);
  if constexpr (Rows > 1) {
    RowsInput& input = rows_input(progress);
    input.stage = matrix.stage, input.layer = matrix.layer, input.rows = rows, input.words = matrix.words;
    if (is_direct(Rows, matrix.blocks)) {
      const uint4* word = matrix.input + own_input_row(c.lane(), rows) * kRowWords + (c.warp() * kSide + c.side()) * 4 + c.column();
      input.first = kept_pointer(input_place(word, c.lane()));
    }
  }
  prepare_tiles<Rows>(c, progress, number, count);
  if (!chooses && !is_direct(Rows, matrix.blocks)) read_input<Rows>(c, matrix, rows, squares);
  if constexpr (Rows > 1)
    if (is_direct(Rows, matrix.blocks)) hear_directly<Rows>(c, progress, matrix, count, squares);
  c.trace.arrived();
  const int64_t starved = c.pages.waited_ns;
  c.trace.part();
#pragma unroll 1
  for (int first = 0; first < count; first += most, c.buffer ^= 1) {
    const int batch = smaller(count - first, most);
    const int mine = own_tile<Rows>(c, first), row = c.within(kTileRows);  // the element that this thread finishes
    if constexpr (kScalesExperts)
      if (is_routed(matrix.stage) && !is_dealt(matrix.stage)) {
        if (first > 0) fetch_expert_scales(c, matrix.layer, first);
        if (!have_expert_scales(c)) return false;
      }
    const auto meanwhile = [&] {
      if (first == 0 && matrix.gain) sum_squares(squares);
    };
    const int swept = c.shared.swept;  // looked up here, so that it is at hand when it is wanted
    multiply_tiles<Rows>(c, progress, number, count, first + batch, meanwhile);
#pragma unroll
    for (int p = 0; p < Rows; p++)
      if (c.lane() == 0) c.shared.squares[c.buffer][p][c.warp()] = squares[p];
    if (first == 0 && c.thread == 0) await_resets(c, step_of(c, matrix.stage, matrix.layer), swept);
    c.trace.part_ends(kMultiplied);
    if (!c.meet()) return false;
    c.trace.part_ends(kMet);
    const int p = own_row_of_pass<Rows>(c);
    if (c.thread < (Rows == 1 ? kBatchTiles : rows * kMostRowBatch) * kTileRows) {
      float part[kWarps], squared[kWarps];  // loaded together: one after the other would take twice as long
      load8(c.shared.sums[c.buffer][Rows == 1 ? mine : p * kRowBatch + smaller(mine, kRowBatch - 1)][row], part);
      if (matrix.gain) load8(c.shared.squares[c.buffer][p], squared);
      float y = sum_of_warps(part);
      if (matrix.gain) y *= inverse_root(sum_of_warps(squared) * (1.0f / kWidth) + kNormEps);
      if constexpr (kScalesOutputs) y *= scale;
      if constexpr (kQkvBias) y += bias;
      int tile = first + mine;
      bool real = mine < batch;
      if constexpr (kExperts > 0)
        if (is_dealt(matrix.stage)) {
          const Dealing::Place place = dealing_of(c, matrix.stage).place_of(tile);
          tile = place.tile, real = real && place.real;
        }
      ending(p, tile, row, y, real);
      if (real && y != y) report_nan(c.shared, matrix.stage, matrix.layer);  // after the word is out, which others wait for
    }
    if constexpr (kQkvBias) bias = bias_of<Rows>(c, matrix, first + most, count);
    if constexpr (kScalesOutputs) scale = scale_of<Rows>(c, matrix, first + most, count);
    c.trace.part();
  }
  c.trace.add(kStarved, c.pages.waited_ns - starved);
  c.trace.end();
  if (!is_direct(Rows, matrix.blocks)) FirstLook::learn(c.shared, matrix.stage, c.warp(), c.lane(), c.early);
  return true;
}

}  // namespace monotape
