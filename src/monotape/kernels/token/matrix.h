// A matrix stage of one token: polls the input from the exchange, multiplies it by this worker's tiles as they come off the
// tape, adds up the sums of the eight warps, and passes each finished row to the epilogue.
//
// All matrix stages share this code. A pass may have several rows (kRows): their inputs follow each other in the exchange
// and in shared memory, and the same weights multiply all of them.
#pragma once
#include "token/tiles.h"

namespace monotape {

__device__ __forceinline__ float sum_of_warps(const float (&parts)[kWarps]) {
  float part[kWarps];
  load8(parts, part);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

__device__ __forceinline__ void sum_squares(float (&squares)[kRows]) {
#pragma unroll
  for (int p = 0; p < kRows; p++) squares[p] = warp_sum(squares[p]);
}

// The tile of the batch from tile `first` on that a thread finishes. Tile t of a worker is always finished by the same
// threads, whatever the batch: the memory order in ranks/words.h depends on it.
static_assert((kBatchTiles & (kBatchTiles - 1)) == 0, "a power of two");
__device__ __forceinline__ int own_tile(const Consumer& c, int first) { return (c.part(kTileRows) - first) & (kBatchTiles - 1); }

__device__ __forceinline__ float of_own_row(const Consumer& c, const float* values, int first, int count) {
  const int tile = first + own_tile(c, first);
  return values && tile < count ? values[tile * kTileRows + c.within(kTileRows)] : 0;
}

// Of experts: the bias and the scale of the row that a thread finishes. Where a worker adds up experts, their scales have been
// applied before (TileProduct), and their biases are added up here.
__device__ __forceinline__ float expert_bias(const Consumer& c, const Matrix& matrix, int first, int count) {
  const int position = first + own_tile(c, first);
  if (!matrix.bias || position >= count) return 0;
  if (!is_dealt(matrix.stage)) return expert_values(c, matrix.bias, matrix.stage, c.span(matrix.stage).first + position);
  const Dealing::Place place = dealing_of(c, matrix.stage).place_of(position);
  return place.real ? expert_value(c, matrix.bias, matrix.stage, place.slot, place.within) : 0;
}
__device__ __forceinline__ float expert_scale(const Consumer& c, const Matrix& matrix, int first, int count) {
  const int position = first + own_tile(c, first);
  const Dealing::Place place = dealing_of(c, matrix.stage).place_of(position);
  const bool scaled = matrix.scale && is_dealt(matrix.stage) && position < count && place.real;
  return (scaled ? expert_value(c, matrix.scale, matrix.stage, place.slot, place.within) : 1) * output_factor(matrix.stage);
}

__device__ __forceinline__ float bias_of(const Consumer& c, const Matrix& matrix, int first, int count) {
  if constexpr (kExperts > 0)
    if (is_routed(matrix.stage)) return expert_bias(c, matrix, first, count);
  return of_own_row(c, matrix.bias, first, count);
}

__device__ __forceinline__ float scale_of(const Consumer& c, const Matrix& matrix, int first, int count) {
  if constexpr (kExperts > 0)
    if (is_routed(matrix.stage)) return expert_scale(c, matrix, first, count);
  return (matrix.scale ? of_own_row(c, matrix.scale, first, count) : 1) * output_factor(matrix.stage);
}

// Runs the stage: ending(row of the pass, tile, row of the tile, value, whether it is real) for every row of a batch, with
// whole warps so that the ending may shuffle.
template <class Ending>
__device__ __forceinline__ bool run_matrix(Consumer& c, const Matrix& matrix, Ending ending) {
  const int count = positions_of(c, matrix.stage), number = product_number(matrix.stage);
  const int most = of_stage(matrix.stage, [](StageRow row) { return product(row.product).batch; });
  if (count == 0) return !needs_choice(c, matrix.stage) || choose_experts(c, matrix.layer);  // all warps must learn of a failure at the same barrier
  c.begin(matrix.stage, matrix.layer);
  c.set_pace(matrix.stage == kAfterAttention ? kAttending : kPolling);
  Progress progress;
  float squares[kRows], bias, scale;
  const bool chooses = kExperts > 0 && matrix.stage == kFirstRouted;
  if (chooses) {  // its input was the router's: it has come, the choice has not
    read_input(c, matrix, squares);
    if (!choose_experts(c, matrix.layer)) return false;
  }
  bias = bias_of(c, matrix, 0, count);  // in flight while the input is polled
  scale = kScalesOutputs ? scale_of(c, matrix, 0, count) : 1;
  if constexpr (kExperts > 0) begin_runs(c, progress, matrix.stage);
  c.pages.go_to(c, matrix.stage, matrix.layer);
  prepare_tiles(c, progress, number, count);
  if (!chooses) read_input(c, matrix, squares);
  c.trace.arrived();
  const int64_t starved = c.pages.waited_ns;
  c.trace.part();
#pragma unroll 1
  for (int first = 0; first < count; first += most, c.buffer ^= 1) {
    const int batch = smaller(count - first, most);
    const int mine = own_tile(c, first), row = c.within(kTileRows);  // the element that this thread finishes
    if constexpr (kScalesExperts)
      if (is_routed(matrix.stage) && !is_dealt(matrix.stage)) {
        if (first > 0) fetch_expert_scales(c, matrix.layer, first);
        if (!have_expert_scales(c)) return false;
      }
    multiply_tiles(c, progress, number, count, first + batch, [&] {
      if (first == 0 && matrix.gain) sum_squares(squares);
    });
#pragma unroll
    for (int p = 0; p < kRows; p++)
      if (c.lane() == 0) c.shared.squares[c.buffer][p][c.warp()] = squares[p];
    if (first == 0 && c.thread == 0) await_resets(c, step_of(c, matrix.stage, matrix.layer));
    c.trace.part_ends(kMultiplied);
    if (!c.meet()) return false;
    c.trace.part_ends(kMet);
    if (c.thread < kBatchTiles * kTileRows) {
#pragma unroll
      for (int p = 0; p < kRows; p++) {
        float y = sum_of_warps(c.shared.sums[c.buffer][p][mine][row]);
        if (matrix.gain) y *= inverse_root(sum_of_warps(c.shared.squares[c.buffer][p]) * (1.0f / kWidth) + kNormEps);
        if constexpr (kScalesOutputs) y *= scale;
        if constexpr (kQkvBias) y += bias;
        int tile = first + mine;
        bool real = mine < batch;
        if constexpr (kExperts > 0)
          if (is_dealt(matrix.stage)) {
            const Dealing::Place place = dealing_of(c, matrix.stage).place_of(tile);
            tile = place.tile, real = real && place.real;
          }
        if (real && y != y) report_nan(c.shared, matrix.stage, matrix.layer);
        ending(p, tile, row, y, real);
      }
    }
    if constexpr (kQkvBias) bias = bias_of(c, matrix, first + most, count);
    if constexpr (kScalesOutputs) scale = scale_of(c, matrix, first + most, count);
    c.trace.part();
  }
  c.trace.add(kStarved, c.pages.waited_ns - starved);
  c.trace.end();
  return true;
}

}  // namespace monotape
