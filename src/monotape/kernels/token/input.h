// The input of a matrix stage: polled from the exchange, normalised where the stage wants it, and left in shared memory in the
// order and the numbers of the stage's products.
#pragma once
#include "exchange/janitor.h"
#include "formats/integers.h"
#include "worker/consumer.h"
#ifdef MONOTAPE_DIE_COPIES
#include "exchange/dies.h"
#endif

namespace monotape {

// The addresses and sizes of one stage.
struct Matrix {
  Stage stage;
  int layer, blocks, words;  // blocks of k, and words of the input: the last block may be padded
  const uint4* input;   // words of the exchange, row after row
  const float* gain;    // of the norm; null: the input is not normalised
  const float* bias;    // of this worker's rows; null: none
  const float* scale;   // likewise
  uint4* output;        // where this worker's first word goes; null: not into the exchange
};

// Warp w has the blocks w, w + 8, w + 16 ... of k (or as many pairs, where two lie side by side). A lane polls its own of
// four words of every eighth of them.
constexpr int kRounds = 4;  // words that a lane polls together of long inputs
__host__ __device__ constexpr int norm_rounds() {
  int most = 1;
  for (int i = 0; i < kProducts; i++) {
    const int group = format_row(product(i).format).sub;
    most = larger(most, divide_up(divide_up(divide_up(kWidth, kBlockK * group), kWarps * kSide) * group, 8));
  }
  return most;
}
constexpr int kNormRounds = norm_rounds();
static_assert(kNormRounds <= kRounds, "words of a normalised input that registers can hold");
// Groups of 32 values in a block of a stage's weights: a warp has all groups of its blocks.
__device__ __forceinline__ unsigned groups_of(Stage stage) {
  return of_stage(stage, [](StageRow row) { return static_cast<unsigned>(format_of(row).sub); });
}
__device__ __forceinline__ int input_word(Consumer& c, Stage stage, int round) {
  const int at = round * 8 + c.row();
  if constexpr (kOneGroup) return ((at * kWarps + c.warp()) * kSide + c.side()) * 4 + c.column();
  const unsigned groups = groups_of(stage), block = static_cast<unsigned>(at) / groups;  // powers of two
  return static_cast<int>((((block * kWarps + c.warp()) * kSide + c.side()) * groups + at % groups) * 4 + c.column());
}

// Experts have inputs of their own, one after the other in the exchange and, each in whole blocks, in shared memory. Where in
// the exchange the word lies that goes to `at` in shared memory; -1: it is zero.
__device__ __forceinline__ bool has_inputs(Stage stage) {
  return kExperts > 0 && of_stage(stage, [](StageRow row) { return product(row.product).inputs > 0; });
}
__device__ __forceinline__ int expert_word(const Matrix& matrix, int at) {
  const int stride = of_stage(matrix.stage, [](StageRow row) { return expert_blocks(product(row.product)) * format_of(row).sub * 4; });
  const int input = at / stride, word = at % stride;
  return word < matrix.words && input < kChosen ? input * matrix.words + word : -1;
}

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

// Products of integers: words of one row, as integers of 16 bits with the scale of each block. Two blocks of a warp's, which its
// lanes poll together, have one scale.
template <int Rounds>
__device__ __forceinline__ float keep_integers(Consumer& c, const Matrix& matrix, int first, const float (&gains)[kNormRounds][8],
                                               const uint4 (&word)[Rounds]) {
  float squares = 0;
#pragma unroll
  for (int r = 0; r < Rounds; r++) {
    float value[8];
    unpack8(word[r], value);
    if (Rounds == kNormRounds && matrix.gain)
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[i] * value[i], value[i] *= gains[r][i];
    const float most = float_of(most_of_lanes(magnitude(value)));
    const int at = input_word(c, matrix.stage, first + r);
    if (at >= matrix.blocks * 4) continue;
    c.shared.x[at] = integer_word(value, quotient(kMostActivation, most));
    if (at % 16 == 0) c.shared.input_scale[at / 16] = most * (1 / kMostActivation);
  }
  return squares;
}

// Polls this warp's words of a row's input from round `first` on, and leaves them in shared memory, in the order of k,
// multiplied by the norm's gain. Returns the lane's sum of squares, taken before the gain.
template <int Rounds>
__device__ __forceinline__ float read_rounds(Consumer& c, const Matrix& matrix, int first, const float (&gains)[kNormRounds][8],
                                             Patience& patience) {
  int index[Rounds];
  uint4 word[Rounds];
#pragma unroll
  for (int r = 0; r < Rounds; r++) {
    const int at = input_word(c, matrix.stage, first + r);
    index[r] = at < matrix.words ? at : -1;
    if constexpr (kExperts > 0)
      if (has_inputs(matrix.stage)) index[r] = expert_word(matrix, at);
  }
#ifdef MONOTAPE_DIE_COPIES
  poll_on_die(matrix.input, copy_of_input(c, matrix.stage), index, word, patience,
              [&](int i) { return brings_over(c, static_cast<int>(matrix.stage), index[i]); });
#else
  poll(matrix.input, index, word, patience);
#endif
  if constexpr (kIntegerProducts)
    if (takes_integers(matrix.stage)) return keep_integers<Rounds>(c, matrix, first, gains, word);
  float squares = 0;
#pragma unroll
  for (int r = 0; r < Rounds; r++) {
    if (Rounds == kNormRounds && matrix.gain) {  // a normalised input is never longer than that
      float value[8];
      unpack8(word[r], value);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[i] * value[i], value[i] *= gains[r][i];
      word[r] = pack8_for(matrix.stage, value);
    } else if constexpr (!kOneHalf || kScalesInputs) {
      float value[8];
      unpack8(word[r], value);
#pragma unroll
      for (int i = 0; i < 8; i++) value[i] *= input_factor(matrix.stage);
      word[r] = pack8_for(matrix.stage, value);
    }
    const int at = input_word(c, matrix.stage, first + r);
    if (at < matrix.blocks * 4) c.shared.x[at] = input_order(word[r]);  // past the last word there are zeros
  }
  return squares;
}

// The same of all rows of a pass at once: a poll costs the way to the L2 and back, however many words it is for.
template <int Rows>
__device__ __forceinline__ void read_rows(Consumer& c, const Matrix& matrix, int rows, const float (&gains)[kNormRounds][8], float (&squares)[Rows],
                                          Patience& patience) {
  int index[Rows * kNormRounds];
  uint4 word[Rows * kNormRounds];
#pragma unroll
  for (int i = 0; i < Rows * kNormRounds; i++) {
    const int row = i / kNormRounds, at = input_word(c, matrix.stage, i % kNormRounds);
    index[i] = row < rows && at < matrix.words ? row * kRowWords + at : -1;
  }
#ifdef MONOTAPE_DIE_COPIES
  poll_on_die(matrix.input, copy_of_input(c, matrix.stage), index, word, patience,
              [&](int i) { return brings_over(c, static_cast<int>(matrix.stage), index[i] % kRowWords); });
#else
  poll(matrix.input, index, word, patience);
#endif
#pragma unroll
  for (int i = 0; i < Rows * kNormRounds; i++) {
    const int row = i / kNormRounds, r = i % kNormRounds, at = input_word(c, matrix.stage, r);
    float value[8], factor[8];
    unpack8(word[i], value);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (matrix.gain) squares[row] += value[k] * value[k];
      factor[k] = matrix.gain ? gains[r][k] : input_factor(matrix.stage);
      value[k] *= factor[k];
    }
    if (matrix.gain || !kOneHalf || kScalesInputs) word[i] = pack8_for(matrix.stage, value);
    if (at < matrix.blocks * 4) c.shared.x[row * kRowBlocks * 4 + at] = input_order(word[i]);
  }
}

// The whole input, and each row's squares. A short input, normalised or not, is polled in one go: the time from input to
// output is mostly the number of instructions in between.
template <int Rows>
__device__ __forceinline__ void read_input(Consumer& c, const Matrix& matrix, int rows, float (&squares)[Rows]) {
  float gains[kNormRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kNormRounds; r++) {
    read_gains(matrix.gain, input_word(c, matrix.stage, r) * 8, gains[r]);
    if constexpr (kScalesInputs)
#pragma unroll
      for (int i = 0; i < 8; i++) gains[r][i] *= input_factor(matrix.stage);
  }
  Patience patience(c.shared, c.lost, matrix.stage, matrix.layer);
  FirstLook::wait(c.shared, matrix.stage, c.warp());
  if constexpr (Rows > 1) {
#pragma unroll
    for (int row = 0; row < Rows; row++) squares[row] = 0;
    read_rows<Rows>(c, matrix, rows, gains, squares, patience);
  } else if (matrix.blocks <= kNormRounds * kWarps * kSide * 8) {
    squares[0] = read_rounds<kNormRounds>(c, matrix, 0, gains, patience);
  } else {
    squares[0] = 0;
#pragma unroll 1
    for (int first = 0; first * kWarps * kSide * 8 < matrix.blocks; first += kRounds) read_rounds<kRounds>(c, matrix, first, gains, patience);
  }
  c.early = patience.was_early();
  c.set_pace(kWorking, step_of(c, matrix.stage, matrix.layer));
  warp_meets();
}

}  // namespace monotape
