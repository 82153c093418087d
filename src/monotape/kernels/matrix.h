// A matrix stage of one token: read the input from the exchange, multiply it by this worker's tiles as they come off
// the tape, add up what the eight warps have, and hand each finished row to the stage's ending.
//
// All stages are this one piece of code: a layer runs through it four times.
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

// The norm's gain of a word's eight values; nothing past the end.
__device__ __forceinline__ void read_gains(const float* gain, int at, float (&out)[8]) {
  if (!gain) return;
  if constexpr (kWidth % 8 == 0) {
    if (at < kWidth) load8(gain + at, out);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (at + i < kWidth) out[i] = gain[at + i];
  }
}

// Polls this warp's words of the input and leaves them in shared memory, in the order of k, multiplied by the norm's
// gain. Returns the lane's sum of squares, taken before the gain.
__device__ __forceinline__ float read_input(Consumer& c, const Matrix& matrix) {
  c.set_pace(matrix.stage == Stage::output ? kAttending : kPolling);
  const int words = matrix.blocks * 4;
  float gains[kNormRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kNormRounds; r++) read_gains(matrix.gain, input_word(c, r) * 8, gains[r]);
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
          value[i] *= gains[r][i];
        }
        word[r] = pack8(value);
      }
      const int at = input_word(c, first + r);
      if (at < words) c.shared.x[at] = at < matrix.words ? in_halves(word[r]) : make_uint4(0, 0, 0, 0);
    }
  }
  c.set_pace(kWorking, step_of(c, matrix.stage, matrix.layer));
  __syncwarp();
  return squares;
}

// A batch of tiles, eight rows each, times the input: this warp's blocks only, into the buffer of sums. All of a warp's
// time goes into this loop, so it is short, and fetches the next page while this one is multiplied. `meanwhile` is
// called once something is under way.
//
// Weights are the first operand of a product, which has 16 rows: eight rows of the tile with a half of each lane's
// values, and the same eight with the other half. The input's halves are columns 0 and 1 of the other operand, so one
// product takes a whole block, and row r's result is the sum of two values in lane 4r.
class BatchProduct {
 public:
  __device__ __forceinline__ BatchProduct(Consumer& c, const Matrix& matrix, int batch, bool final, int& in_page)
      : c_(c), matrix_(matrix), batch_(batch), final_(final), in_page_(in_page),
        input_(reinterpret_cast<const uint2*>(c.shared.x) + c.warp() * 8 + c.column() * 2 + c.row() % 2) {}

  template <class Meanwhile>
  __device__ __forceinline__ void run(Meanwhile meanwhile) {
    Weights even, odd;
    clear();
    fetch(even);
    bool more = step(even, odd);
    meanwhile();
#pragma unroll 1
    while (more) {
      if (!step(odd, even)) break;
      more = step(even, odd);
    }
  }

 private:
  static constexpr int kAtOnce = kPageBlocks / kWarps, kChains = 4;  // chains of products that do not wait for each other
  struct Weights {
    uint4 block[kAtOnce];
  };

  // Multiplies what has been fetched, and fetches what follows. False: that was the last.
  __device__ __forceinline__ bool step(const Weights& now, Weights& next) {
    uint2 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) x[i] = there(k_, i) ? input_[(k_ + i * kWarps) * 8] : make_uint2(0, 0);
    if (page_ends_) c_.pages.give_back(c_.lane(), c_.lost);
    const bool more = next_tile_ < batch_, tile_ends = next_k_ == 0;
    if (more) fetch(next);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
      multiply_accumulate(sums_[i % kChains], now.block[i].x, now.block[i].y, now.block[i].z, now.block[i].w, x[i].x, x[i].y);
    if (tile_ends) {
      float y = 0;
#pragma unroll
      for (int i = 0; i < kChains; i += 2) y += (sums_[i][0] + sums_[i][3]) + (sums_[i + 1][0] + sums_[i + 1][3]);
      if (c_.column() == 0) c_.shared.sums[c_.buffer][tile_][c_.row()][c_.warp()] = y;
      tile_++;
      clear();
    }
    return more;
  }

  __device__ __forceinline__ void fetch(Weights& to) {
    const uint4* page = c_.pages.take(c_.lost) + (in_page_ * matrix_.blocks + c_.warp()) * kBlockWords + c_.lane();
    k_ = next_k_;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) to.block[i] = there(k_, i) ? page[i * kWarps * kBlockWords] : make_uint4(0, 0, 0, 0);
    page_ends_ = in_page_ == matrix_.in_page - 1 || (final_ && next_tile_ == batch_ - 1);
    in_page_ = page_ends_ ? 0 : in_page_ + 1;
    next_k_ += kPageBlocks;
    if (next_k_ >= matrix_.blocks) next_k_ = 0, next_tile_++;
  }

  __device__ __forceinline__ bool there(int k, int i) const { return kWholePages || k + i * kWarps + c_.warp() < matrix_.blocks; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kChains; i++) sums_[i][0] = sums_[i][1] = sums_[i][2] = sums_[i][3] = 0;
  }

  Consumer& c_;
  const Matrix& matrix_;
  const int batch_;
  const bool final_;
  int& in_page_;  // tiles of the page at hand that have been fetched
  const uint2* const input_;
  float sums_[kChains][4];
  int k_ = 0;                                  // of what was fetched last
  int tile_ = 0, next_tile_ = 0, next_k_ = 0;  // next: of what is fetched next; a tile may take several pages
  bool page_ends_ = false;                     // with what was fetched last
};

__device__ __forceinline__ float sum_of_warps(const float (&parts)[kWarps]) {
  float part[kWarps];
  load8(parts, part);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

// Runs the stage: ending(tile, row of the tile, value, whether it is real) for every row of a batch, with whole warps so
// that the ending may shuffle.
template <class Ending>
__device__ __forceinline__ bool run_matrix(Consumer& c, const Matrix& matrix, Ending ending) {
  const int count = c.span(matrix.stage).count;
  if (count == 0) return true;  // only a meeting tells of a failure: all warps must learn it at the same place
  c.begin(matrix.stage, matrix.layer);
  float squares = read_input(c, matrix);
  c.trace.arrived();
  int in_page = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatchTiles, c.buffer ^= 1) {
    const int batch = smaller(count - first, kBatchTiles);
    const int mine = c.thread / kTileRows, row = c.thread % kTileRows;  // the tile and row that this thread will finish
    BatchProduct(c, matrix, batch, first + batch == count, in_page).run([&] {
      if (first == 0 && matrix.gain) squares = warp_sum(squares);
    });
    if (c.lane() == 0) c.shared.squares[c.buffer][c.warp()] = squares;
    if (first == 0 && c.thread == 0) await_resets(c, step_of(c, matrix.stage, matrix.layer));
    if (!c.meet()) return false;
    if (c.thread < divide_up(batch * kTileRows, 32) * 32) {
      float y = sum_of_warps(c.shared.sums[c.buffer][mine][row]);
      if (matrix.gain) y *= rsqrtf(sum_of_warps(c.shared.squares[c.buffer]) * (1.0f / kWidth) + kNormEps);
      if (mine < batch && y != y) report_nan(c.shared, matrix.stage, matrix.layer);
      ending(first + mine, row, y, mine < batch);
    }
  }
  c.trace.end();
  return true;
}

}  // namespace monotape
