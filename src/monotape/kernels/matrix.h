// A matrix stage of one token: read the input from the exchange, multiply it by this worker's tiles as they come off
// the tape, add up what the eight warps have, and hand each finished row to the stage's ending.
//
// All stages are this one piece of code. It must be small: a layer runs through it five times, and instructions that
// have left the cache meanwhile cost more than the arithmetic.
#pragma once
#include "housekeeping.h"

namespace monotape {

// What distinguishes a stage while a token passes it.
struct Matrix {
  Stage stage;
  int layer, blocks, words;  // blocks of k, and words of the input: the last block may be padded
  const uint4* input;   // words of the exchange
  const float* gain;    // of the norm; null: the input is not normalised
};

// Warp w has the blocks w, w + 8, w + 16 ... of k. A lane polls word lane % 4 of every eighth of them.
constexpr int kRounds = 4;  // words that a lane polls together
constexpr int kNormRounds = divide_up(k_blocks(Stage::qkv), kWarps * 8);
static_assert(kNormRounds <= kRounds, "a normalised input is polled at once");

__device__ __forceinline__ int input_word(Consumer& c, int round) {
  return ((round * 8 + c.row()) * kWarps + c.warp()) * 4 + c.column();
}

// Polls this warp's words of the input and leaves them in shared memory, in the order of k, multiplied by the norm's
// gain. Returns the warp's sum of squares, taken before the gain.
__device__ __forceinline__ float read_input(Consumer& c, const Matrix& matrix) {
  // Polls must not queue behind pages. But while others attend there is time to fill the ring; then it is quiet anyway.
  if (c.thread == 0) c.shared.waiting = matrix.stage != Stage::output || kQuietAttention;
  const int words = matrix.blocks * 4;
  float gains[kNormRounds * 8];
#pragma unroll
  for (int i = 0; i < kNormRounds * 8; i++) {
    const int at = input_word(c, i / 8) * 8 + i % 8;
    gains[i] = matrix.gain && at < kWidth ? matrix.gain[at] : 1;
  }
  Patience patience(c.shared, matrix.stage, matrix.layer);
  float squares = 0;
#pragma unroll 1
  for (int first = 0; first * kWarps * 8 < matrix.blocks; first += kRounds) {
    int index[kRounds];
    uint4 word[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      const int at = input_word(c, first + r);
      index[r] = at < matrix.words ? at : -1;
    }
    // Every lane waits for a word, needed or not: who has seen one may reset what the turn before has published.
    if (index[0] < 0) index[0] = 0;
    poll(matrix.input, index, word, patience);
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      if (r < kNormRounds && matrix.gain) {
        float value[8];
        unpack8(word[r], value);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (input_word(c, r) < matrix.words) squares += value[i] * value[i];
          value[i] *= gains[r * 8 + i];
        }
        word[r] = pack8(value);
      }
      const int at = input_word(c, first + r);
      if (at < words) c.shared.x[at] = at < matrix.words ? word[r] : make_uint4(0, 0, 0, 0);
    }
  }
  if (c.thread == 0) c.shared.waiting = 0;
#pragma unroll
  for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  __syncwarp();
  return squares;
}

// One tile: eight rows times the input, this warp's blocks only. x is row 0 of the operand, the other rows are zero, so
// lanes 0 to 3 end up with two results each.
__device__ __forceinline__ float2 multiply_tile(Consumer& c, const Matrix& matrix, int tile, int count) {
  constexpr int kBlocksAtOnce = kPageBlocks / kWarps;
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  const bool whole = matrix.blocks <= kPageBlocks;  // short tiles share a page, long ones take several
  const int tiles = whole ? kPageBlocks / matrix.blocks : 1, in_page = whole ? tile % tiles : 0;
#pragma unroll 1
  for (int first = 0; first < matrix.blocks; first += kPageBlocks) {
    const uint4* page = c.pages.take() + in_page * matrix.blocks * kBlockWords + c.lane();
    uint4 w[kBlocksAtOnce], x[kBlocksAtOnce];
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; i++) {
      const int block = i * kWarps + c.warp();
      const bool there = first + block < matrix.blocks;
      w[i] = there ? page[block * kBlockWords] : make_uint4(0, 0, 0, 0);
      x[i] = there && c.lane() < 4 ? c.shared.x[(first + block) * 4 + c.lane()] : make_uint4(0, 0, 0, 0);
    }
    if (!whole || in_page == tiles - 1 || tile == count - 1) c.pages.give_back(c.lane());
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; i++) {
      multiply_accumulate(even, x[i].x, 0, x[i].y, 0, w[i].x, w[i].y);
      multiply_accumulate(odd, x[i].z, 0, x[i].w, 0, w[i].z, w[i].w);
    }
  }
  return make_float2(even[0] + odd[0], even[1] + odd[1]);
}

// Runs the stage: resets() when it may, then ending(tile, row of the tile, value, whether it is real) for
// every row of a batch, with whole warps so that the ending may shuffle.
template <class Resets, class Ending>
__device__ __forceinline__ bool run_matrix(Consumer& c, const Matrix& matrix, Resets resets, Ending ending) {
  const int count = c.span(matrix.stage).count;
  if (count == 0) return true;  // only a meeting tells of a failure: all warps must learn it at the same place
  c.begin(matrix.stage, matrix.layer);
  // Who has read this turn's residual stream need not wait for more to reset the words of `output`: the wait for what is
  // attended to hides it.
  const bool early = matrix.stage == Stage::output && c.span(Stage::qkv).count > 0;
  Reset reset;
  if (early) reset = resets();
  const float squares = read_input(c, matrix);
  c.trace.arrived();
  if (!early) reset = resets();
#pragma unroll 1
  for (int first = 0; first < count; first += kBatchTiles, c.buffer ^= 1) {
    const int batch = smaller(count - first, kBatchTiles);
    const int mine = c.thread / kTileRows, row = c.thread % kTileRows;  // the tile and row that this thread will finish
#pragma unroll 1
    for (int t = 0; t < batch; t++) {
      const float2 rows = multiply_tile(c, matrix, first + t, count);
      if (c.lane() < 4) *reinterpret_cast<float2*>(&c.shared.sums[c.buffer][t][c.warp()][2 * c.lane()]) = rows;
    }
    if (c.lane() == 0) c.shared.squares[c.buffer][c.warp()] = squares;
    if (first == 0) reset.confirm(c.shared);
    if (!c.meet()) return false;
    if (c.thread < divide_up(batch * kTileRows, 32) * 32) {
      float total = 0, y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += c.shared.squares[c.buffer][w], y += c.shared.sums[c.buffer][mine][w][row];
      if (matrix.gain) y *= rsqrtf(total / kWidth + kNormEps);
      if (mine < batch && y != y) report_nan(c.shared, matrix.stage, matrix.layer);
      ending(first + mine, row, y, mine < batch);
    }
  }
  c.trace.end();
  return true;
}

}  // namespace monotape
