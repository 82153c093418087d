// A matrix stage of one token: read the input from the exchange, multiply it by this worker's tiles as they come off
// the tape, add up what the eight warps have, and hand each finished row to the stage's own ending.
#pragma once
#include "housekeeping.h"

namespace monotape {

// A warp's share of a stage's k: block w of each page, w + 8, w + 16 ... Its part of the input stays in registers,
// eight blocks to a register word: block b of the warp is with the lanes of row b % 8, and the multiplication puts it
// into that row of the operand. So every block lands in a row of its own, and the rows are added up at the end.
template <Stage S>
struct WarpBlocks {
  using Pages = Paging<S>;
  static constexpr int rounds = kPageBlocks / kWarps;                        // of a full page
  static constexpr int last_rounds = divide_up(Pages::last, kWarps);
  static constexpr int count = (Pages::pieces - 1) * rounds + last_rounds;
  static constexpr int registers = divide_up(count, 8);
  // The block of k that is this warp's number `block`; -1 if there is none.
  static __device__ __forceinline__ int k_block(int block, int warp) {
    const int at = block / rounds * kPageBlocks + block % rounds * kWarps + warp;
    return block < count && at < Pages::blocks ? at : -1;
  }
};

template <Stage S>
struct Input {
  uint4 word[WarpBlocks<S>::registers];
};

// Polls this warp's words of the input and multiplies the norm's gain in. Returns this lane's part of the sum of
// squares, taken before the gain.
template <Stage S, bool Normalised>
__device__ __forceinline__ float read_input(Consumer& c, Input<S>& input, const uint4* buffer, const float* gain,
                                            Stage stage, int layer) {
  constexpr int kCount = WarpBlocks<S>::registers, kWords = divide_up(stage_k(S), 8);
  int index[kCount];
#pragma unroll
  for (int r = 0; r < kCount; r++) {
    const int block = WarpBlocks<S>::k_block(8 * r + c.row, c.warp);
    index[r] = block >= 0 && block * 4 + c.column < kWords ? block * 4 + c.column : -1;
  }
  float gains[Normalised ? kCount * 8 : 1];
  if constexpr (Normalised) {
#pragma unroll
    for (int i = 0; i < kCount * 8; i++) {
      const int at = index[i / 8] * 8 + i % 8;
      gains[i] = index[i / 8] >= 0 && at < kWidth ? gain[at] : 0;
    }
  }
  // Polls must not queue behind pages. But while others attend there is time to fill the ring; then it is quiet anyway.
  if (c.thread == 0) c.shared.waiting = S != Stage::output || kQuietAttention;
  // Every lane waits for a word, needed or not: who has seen one may reset what the turn before has published.
  const bool needed = index[0] >= 0;
  if (!needed) index[0] = 0;
  Patience patience(c.shared, stage, layer);
  poll(buffer, index, input.word, patience);
  if (!needed) input.word[0] = make_uint4(0, 0, 0, 0);
  if (c.thread == 0) c.shared.waiting = 0;
  float squares = 0;
  if constexpr (Normalised) {
#pragma unroll
    for (int r = 0; r < kCount; r++) {
      float value[8];
      unpack8(input.word[r], value);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[i] * value[i], value[i] *= gains[r * 8 + i];
      input.word[r] = pack8(value);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  }
  return squares;
}

// One tile: eight rows times the input, this warp's blocks only. Lanes 0 to 3 end up with two rows each.
template <Stage S>
__device__ __forceinline__ float2 multiply_tile(Consumer& c, const Input<S>& input, int tile, int count) {
  using Pages = Paging<S>;
  using Mine = WarpBlocks<S>;
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  const int in_page = Pages::pieces > 1 ? 0 : tile % Pages::tiles;
#pragma unroll
  for (int piece = 0; piece < Pages::pieces; piece++) {
    const bool last = piece == Pages::pieces - 1;
    const uint4* page = c.pages.take() + in_page * Pages::blocks * kBlockWords + c.lane;
    uint4 w[Mine::rounds];
#pragma unroll
    for (int i = 0; i < Mine::rounds; i++) {
      if (last && i >= Mine::last_rounds) continue;
      const bool there = !last || i * kWarps + c.warp < Pages::last;
      w[i] = there ? page[(i * kWarps + c.warp) * kBlockWords] : make_uint4(0, 0, 0, 0);
    }
    if (Pages::pieces > 1 || in_page == Pages::tiles - 1 || tile == count - 1) c.pages.give_back(c.lane);
    const int row = opaque(c.row);  // else the operands of all blocks would be made before the first page, and spill
#pragma unroll
    for (int i = 0; i < Mine::rounds; i++) {
      if (last && i >= Mine::last_rounds) continue;
      const int block = piece * Mine::rounds + i;
      const uint4 x = input.word[block / 8];
      const bool mine = row == block % 8;
      multiply_accumulate(even, mine ? x.x : 0, 0, mine ? x.y : 0, 0, w[i].x, w[i].y);
      multiply_accumulate(odd, mine ? x.z : 0, 0, mine ? x.w : 0, 0, w[i].z, w[i].w);
    }
  }
  float2 rows = make_float2(even[0] + odd[0], even[1] + odd[1]);
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    rows.x += __shfl_xor_sync(~0u, rows.x, o);
    rows.y += __shfl_xor_sync(~0u, rows.y, o);
  }
  return rows;
}

// Runs a stage of the kind S: resets() once the input is there, then ending(tile, row of the tile, value, whether it is
// real) for every row of a batch, with whole warps so that the ending may shuffle.
template <Stage S, bool Normalised, class Resets, class Ending>
__device__ __forceinline__ bool matrix_stage(Consumer& c, Stage stage, int layer, const uint4* buffer, const float* gain,
                                             Resets resets, Ending ending) {
  const int count = c.span(stage).count;
  if (count == 0) return true;  // only a meeting tells of a failure: all warps must learn it at the same place
  c.begin(stage, layer);
  Input<S> input;
  const float squares = read_input<S, Normalised>(c, input, buffer, gain, stage, layer);
  c.trace.arrived();
  Reset reset = resets();
#pragma unroll 1
  for (int first = 0; first < count; first += kBatchTiles, c.buffer ^= 1) {
    const int batch = smaller(count - first, kBatchTiles);
    const int mine = c.thread / kTileRows, row = c.thread % kTileRows;  // the tile and row that this thread will finish
#pragma unroll 1
    for (int t = 0; t < batch; t++) {
      const float2 rows = multiply_tile<S>(c, input, first + t, count);
      if (c.lane < 4) *reinterpret_cast<float2*>(&c.shared.sums[c.buffer][t][c.warp][2 * c.lane]) = rows;
    }
    if (Normalised && c.lane == 0) c.shared.squares[c.buffer][c.warp] = squares;
    if (first == 0) reset.confirm(c.shared);
    if (!c.meet()) return false;
    if (c.thread < divide_up(batch * kTileRows, 32) * 32) {
      float scale = 1, y = 0;
      if constexpr (Normalised) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) total += c.shared.squares[c.buffer][w];
        scale = rsqrtf(total / kWidth + kNormEps);
      }
#pragma unroll
      for (int w = 0; w < kWarps; w++) y += c.shared.sums[c.buffer][mine][w][row];
      y *= scale;
      if (mine < batch && y != y) report_nan(c.shared, stage, layer);
      ending(first + mine, row, y, mine < batch);
    }
  }
  c.trace.end();
  return true;
}

}  // namespace monotape
