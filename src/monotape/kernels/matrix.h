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
  int in_page;               // tiles that share a page; 1: a tile takes one or more
  const uint4* input;   // words of the exchange
  const float* gain;    // of the norm; null: the input is not normalised
  uint4* output;        // where this worker's first word goes; null: not into the exchange
};

// Warp w has the blocks w, w + 8, w + 16 ... of k. A lane polls word lane % 4 of every eighth of them.
constexpr int kRounds = 4;  // words that a lane polls together
constexpr int kNormRounds = divide_up(k_blocks(Stage::qkv), kWarps * 8);
static_assert(kNormRounds <= kRounds, "a normalised input is polled at once");

// Tiles that share a page, at least one. (Divisions of constants: a stage is known only when it runs.)
__device__ constexpr int tiles_in_page(Stage s) {
  return s == Stage::output ? larger(1, kPageBlocks / k_blocks(Stage::output))
         : s == Stage::down ? larger(1, kPageBlocks / k_blocks(Stage::down))
                            : larger(1, kPageBlocks / k_blocks(Stage::qkv));
}
// Whether no stage has a page that is not full: then nobody needs to look.
constexpr bool kWholePages = k_blocks(Stage::qkv) % kPageBlocks == 0 && k_blocks(Stage::output) % kPageBlocks == 0 &&
                             k_blocks(Stage::down) % kPageBlocks == 0;

__device__ __forceinline__ int input_word(Consumer& c, int round) {
  return ((round * 8 + c.row()) * kWarps + c.warp()) * 4 + c.column();
}

// A word in the order in which products want it: its first and third pair, then its second and fourth.
__device__ __forceinline__ uint4 in_halves(uint4 word) { return make_uint4(word.x, word.z, word.y, word.w); }

// Polls this warp's words of the input and leaves them in shared memory, in the order of k, multiplied by the norm's
// gain. Returns the lane's sum of squares, taken before the gain.
__device__ __forceinline__ float read_input(Consumer& c, const Matrix& matrix) {
  c.set_pace(matrix.stage == Stage::output ? kAttending : kPolling);
  const int words = matrix.blocks * 4;
  float gains[kNormRounds * 8];
#pragma unroll
  for (int i = 0; i < kNormRounds * 8; i++) {
    const int at = input_word(c, i / 8) * 8 + i % 8;
    gains[i] = matrix.gain && at < kWidth ? matrix.gain[at] : 1;
  }
  Patience patience(c.shared, c.lost, matrix.stage, matrix.layer);
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
      if (at < words) c.shared.x[at] = at < matrix.words ? in_halves(word[r]) : make_uint4(0, 0, 0, 0);
    }
  }
  c.set_pace(kWorking, matrix.layer * 4 + static_cast<int>(matrix.stage) % 4);
  __syncwarp();
  return squares;
}

// A batch of tiles, eight rows each, times the input: this warp's blocks only, into the buffer of sums. All of a warp's
// time goes into this loop, so it is short. `meanwhile` is called once something is under way.
//
// Weights are the first operand of a product, which has 16 rows: eight rows of the tile with a half of each lane's
// values, and the same eight with the other half. The input's halves are columns 0 and 1 of the other operand, so one
// product takes a whole block, and row r's result is the sum of two values in lane 4r.
constexpr bool kKeepsInput = kHeadDim <= 64;  // from tile to tile; with longer heads there are no registers for it

template <class Meanwhile>
__device__ __forceinline__ void multiply_batch(Consumer& c, const Matrix& matrix, int batch, bool final, int& in_page,
                                               Meanwhile meanwhile) {
  constexpr int kBlocksAtOnce = kPageBlocks / kWarps;
  const uint2* input = reinterpret_cast<const uint2*>(c.shared.x) + c.warp() * 8 + c.column() * 2 + c.row() % 2;
  uint2 x[kBlocksAtOnce];
#pragma unroll 1
  for (int tile = 0; tile < batch; tile++) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < matrix.blocks; first += kPageBlocks) {
      const uint4* page = c.pages.take(c.lost) + (in_page * matrix.blocks + c.warp()) * kBlockWords + c.lane();
      const auto there = [&](int i) { return kWholePages || first + i * kWarps + c.warp() < matrix.blocks; };
      uint4 w[kBlocksAtOnce];
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; i++) w[i] = there(i) ? page[i * kWarps * kBlockWords] : make_uint4(0, 0, 0, 0);
      if (tile == 0 || matrix.blocks > kPageBlocks || !kKeepsInput) {
#pragma unroll
        for (int i = 0; i < kBlocksAtOnce; i++) x[i] = there(i) ? input[(first + i * kWarps) * 8] : make_uint2(0, 0);
      }
      const bool page_ends = in_page == matrix.in_page - 1 || (final && tile == batch - 1);
      if (page_ends) c.pages.give_back(c.lane(), c.lost);
      in_page = page_ends ? 0 : in_page + 1;
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; i++)
        multiply_accumulate(i % 2 ? odd : even, w[i].x, w[i].y, w[i].z, w[i].w, x[i].x, x[i].y);
      if (tile == 0 && first == 0) meanwhile();
    }
    if (c.column() == 0) c.shared.sums[c.buffer][tile][c.warp()][c.row()] = (even[0] + even[3]) + (odd[0] + odd[3]);
  }
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
  float squares = read_input(c, matrix);
  c.trace.arrived();
  int in_page = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatchTiles, c.buffer ^= 1) {
    const int batch = smaller(count - first, kBatchTiles);
    const int mine = c.thread / kTileRows, row = c.thread % kTileRows;  // the tile and row that this thread will finish
    multiply_batch(c, matrix, batch, first + batch == count, in_page, [&] {
      if (first > 0) return;
      if (!early) reset = resets();
      squares = warp_sum(squares);
    });
    if (c.lane() == 0) c.shared.squares[c.buffer][c.warp()] = squares;
    if (first == 0) reset.confirm(c.shared, c.lost);
    if (!c.meet()) return false;
    if (c.thread < divide_up(batch * kTileRows, 32) * 32) {
      float total = 0, y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += c.shared.squares[c.buffer][w], y += c.shared.sums[c.buffer][mine][w][row];
      if (matrix.gain) y *= rsqrtf(total * (1.0f / kWidth) + kNormEps);
      if (mine < batch && y != y) report_nan(c.shared, matrix.stage, matrix.layer);
      ending(first + mine, row, y, mine < batch);
    }
  }
  c.trace.end();
  return true;
}

}  // namespace monotape
