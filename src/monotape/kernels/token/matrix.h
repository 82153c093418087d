// A matrix stage of one token: polls the input from the exchange, multiplies it by this worker's tiles as they come off the
// tape, adds up the sums of the eight warps, and passes each finished row to the epilogue.
//
// All matrix stages share this code. A pass may have several rows (kRows): their inputs follow each other in the exchange
// and in shared memory, and the same weights multiply all of them.
#pragma once
#include "exchange/janitor.h"

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

// Warp w has the blocks w, w + 8, w + 16 ... of k. A lane polls word lane % 4 of every eighth of them.
constexpr int kRounds = 4;  // words that a lane polls together of long inputs
__host__ __device__ constexpr int norm_rounds() {
  int most = 1;
  for (int i = 0; i < kProducts; i++) {
    const int group = format_row(product(i).format).sub;
    most = larger(most, divide_up(divide_up(divide_up(kWidth, kBlockK * group), kWarps) * group, 8));
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
  if constexpr (kOneGroup) return (at * kWarps + c.warp()) * 4 + c.column();
  const unsigned groups = groups_of(stage), block = static_cast<unsigned>(at) / groups;  // powers of two
  return static_cast<int>(((block * kWarps + c.warp()) * groups + at % groups) * 4 + c.column());
}

// A word in the order of products: its first and third pair, then its second and fourth, divided as the format wants it.
__device__ __forceinline__ uint4 in_halves(Stage stage, uint4 word) {
  if constexpr (kDividesOddPairs) {
    const float factor = odd_factor(stage);
    word.y = scaled_pair(word.y, factor), word.w = scaled_pair(word.w, factor);
  }
  return make_uint4(word.x, word.z, word.y, word.w);
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

// Polls this warp's words of a row's input from round `first` on, and leaves them in shared memory, in the order of k,
// multiplied by the norm's gain. Returns the lane's sum of squares, taken before the gain.
template <int Rounds>
__device__ __forceinline__ float read_rounds(Consumer& c, const Matrix& matrix, int row, int first, const float (&gains)[kNormRounds][8],
                                             Patience& patience) {
  int index[Rounds];
  uint4 word[Rounds];
#pragma unroll
  for (int r = 0; r < Rounds; r++) {
    const int at = input_word(c, matrix.stage, first + r);
    index[r] = at < matrix.words ? at : -1;
  }
  poll(matrix.input + row * matrix.words, index, word, patience);
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
    if (at < matrix.blocks * 4) c.shared.x[row][at] = in_halves(matrix.stage, word[r]);  // past the last word there are zeros
  }
  return squares;
}

// The whole input, and each row's squares. A short input, normalised or not, is polled in one go: the time from input to
// output is mostly the number of instructions in between.
__device__ __forceinline__ void read_input(Consumer& c, const Matrix& matrix, float (&squares)[kRows]) {
  float gains[kNormRounds][8] = {};
#pragma unroll
  for (int r = 0; r < kNormRounds; r++) {
    read_gains(matrix.gain, input_word(c, matrix.stage, r) * 8, gains[r]);
    if constexpr (kScalesInputs)
#pragma unroll
      for (int i = 0; i < 8; i++) gains[r][i] *= input_factor(matrix.stage);
  }
  Patience patience(c.shared, c.lost, matrix.stage, matrix.layer);
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    squares[row] = 0;
    if (matrix.blocks <= kNormRounds * kWarps * 8) {
      squares[row] = read_rounds<kNormRounds>(c, matrix, row, 0, gains, patience);
    } else {
#pragma unroll 1
      for (int first = 0; first * kWarps * 8 < matrix.blocks; first += kRounds) read_rounds<kRounds>(c, matrix, row, first, gains, patience);
    }
  }
  c.set_pace(kWorking, step_of(c, matrix.stage, matrix.layer));
  warp_meets();
}

// Blocks that a warp has in registers: its share of the tiles that it multiplies together, or of a part of a tile.
__host__ __device__ constexpr int blocks_at_once(Product p) { return p.together * divide_up(p.page_run, kWarps); }
__host__ __device__ constexpr int most_vectors_at_once() {
  int most = 1;
  for (int i = 0; i < kProducts; i++) most = larger(most, blocks_at_once(product(i)) * format_row(product(i).format).vectors);
  return most;
}
__host__ __device__ constexpr int most_extra_at_once() {
  int most = 0;
  for (int i = 0; i < kProducts; i++) most = larger(most, blocks_at_once(product(i)) * format_row(product(i).format).extra);
  return most;
}
template <int Count>
struct ExtraWords {
  uint32_t extra[Count] = {};
  __device__ __forceinline__ uint32_t* extra_of(int at) { return extra + at; }
};
template <>
struct ExtraWords<0> {
  __device__ __forceinline__ uint32_t* extra_of(int) { return nullptr; }
};
// A lane's words of each block.
struct Weights : ExtraWords<most_extra_at_once()> {
  uint4 block[most_vectors_at_once()] = {};
};

// A warp's position in its worker's tiles of a stage. A tile may take several pages.
struct Progress {
  Weights even, odd;              // the weights to multiply next, and those after them
  int tile = 0, k = 0;            // of what is multiplied next
  int next_tile = 0, next_k = 0;  // of what is fetched next
  int in_page = 0;                // tiles of the page at hand that have been fetched
  bool page_ends = false;         // with what was fetched last
};

// Tiles, eight rows each, times the input: this warp's blocks only, into the buffer of sums. A warp spends its time in this
// loop, so it is short. Two pages are in registers before the input arrives, which also makes room in the ring while
// workers wait for each other.
//
// Weights are the first operand of a product, which has 16 rows: eight rows of the tile with a half of each lane's
// values, and the same eight with the other half. The halves of row p of the pass are columns 2p and 2p + 1 of the other
// operand, so one product takes a whole block for up to four rows, and lane 4r + p has the two values whose sum is the
// tile's row r times row p. Columns past the last row are copies of others, and their results are ignored.
//
// Each product of the plan, a tile length and a format, has its own loop: run-time bounds double the instruction count.
template <int Number>
class TileProduct {
 public:
  static constexpr Product kProduct = product(Number);
  static constexpr int kTogether = kProduct.together;

  __device__ __forceinline__ TileProduct(Consumer& c, Progress& progress, int count)
      : c_(c), at_(progress), count_(count),
        input_(reinterpret_cast<const uint2*>(c.shared.x[c.row() / 2 % kRows]) + c.warp() * kSub * 8 + c.column() * 2 + c.row() % 2),
        sums_out_(&c.shared.sums[c.buffer][c.column() % kRows][0][c.row()][c.warp()]) {}

  __device__ __forceinline__ void prepare() {
    fetch_next(at_.even);
    fetch_next(at_.odd);
    give_back();
  }

  // The tiles from the next one on, up to `end`; `meanwhile` is called once loads are in flight.
  template <class Meanwhile>
  __device__ __forceinline__ void run(int end, Meanwhile meanwhile) {
    if (kWhole) read_input();
    step<true>(at_.even);
    meanwhile();
#pragma unroll 1
    while (at_.tile < end) {
      step<!kWhole>(at_.odd);
      if (at_.tile >= end) break;
      step<!kWhole>(at_.even);
    }
  }

 private:
  using Weight = Stored<kProduct.format>;
  static constexpr int kSub = Weight::kSub, kExtra = Weight::kExtra, kHalves = Weight::kHalves, kInputs = Weight::kInputs, kBlockWords = Weight::kBlockBytes / 16;
  static_assert(kRows == 1 || !Weight::kSlots, "the columns of a product are slots of groups, not rows");
  static constexpr int kBlocks = kProduct.blocks, kInPage = kProduct.tiles_in_page, kRun = kProduct.page_run;
  static constexpr int kAtOnce = divide_up(kRun, kWarps);
  static constexpr int kLastRun = kBlocks - (divide_up(kBlocks, kRun) - 1) * kRun, kSure = kLastRun / kWarps;
  static constexpr bool kWhole = kRun == kBlocks;  // a tile is never in two pages, and the input is the same for all
  static constexpr int kChains = kTogether == 1 ? 4 : 2;  // independent chains of a tile's products

  // Multiplies a page's tiles, some of them, or a part of one. Data past the last tile is multiplied too, and ignored.
  // `Adds`: the input is new, and its sums are taken along.
  template <bool Adds>
  __device__ __forceinline__ void step(Weights& weights) {
    if (!kWhole) read_input();
    if (kWhole || at_.k == 0) clear();
    if constexpr (Weight::kGrouped) multiply_groups<Adds && Weight::kShifts>(weights);
    else multiply_halves(weights);
    fetch_next(weights);
    at_.k += kRun;
    if (!kWhole && at_.k < kBlocks) return;
#pragma unroll
    for (int t = 0; t < kTogether; t++) {
      const float y = finished(t);
      if (c_.column() < kRows) sums_out_[t * kTileRows * kWarps] = y;
    }
    sums_out_ += kTogether * kTileRows * kWarps;
    at_.k = 0, at_.tile += kTogether;
  }

  // 16-bit floats: the products of a tile add up in the tensor cores.
  __device__ __forceinline__ void multiply_halves(const Weights& weights) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int t = 0; t < kTogether; t++) {
        const uint4& w = weights.block[t * kAtOnce + i];
        multiply_accumulate<Weight::kFloat16>(sums_[t][i % kChains], w.x, w.y, w.z, w.w, x_[i].x, x_[i].y);
      }
  }
  // Codes with scales: the products of a block add up, and blocks in the order of k. Blocks take turns: a product that waits
  // for the one before costs more than all else.
  template <bool Adds>
  __device__ __forceinline__ void multiply_groups(Weights& weights) {
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      float sums[kTogether][kAtOnce][4] = {}, totals[kAtOnce][4] = {};
#pragma unroll
      for (int g = 0; g < kSub / kHalves; g++)
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const uint2 x = Weight::activations(x_ + i * kInputs + (Weight::kSlots ? half : 0), g, c_.row());
          if constexpr (Adds) Weight::add_total(totals[i], x);
#pragma unroll
          for (int t = 0; t < kTogether; t++) {
            const int at = t * kAtOnce + i;
            Weight::multiply(sums[t][i], weights.block + at * Weight::kVectors, weights.extra_of(at * kExtra), half, g, x);
          }
        }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if constexpr (Adds) totals_[i * kHalves + half] = totals[i][0] + totals[i][3];
#pragma unroll
        for (int t = 0; t < kTogether; t++)
          sums_[t][0][0] += Weight::scaled(sums[t][i], weights.extra_of((t * kAtOnce + i) * kExtra), half, totals_[i * kHalves + half]);
      }
    }
  }
  __device__ __forceinline__ float finished(int t) const {
    if constexpr (Weight::kGrouped) {
      if constexpr (!Weight::kSlots) return sums_[t][0][0];
      const float two = sums_[t][0][0] + lane_across(sums_[t][0][0], 1);  // each lane of a row has the sum of its slots
      return two + lane_across(two, 2);
    }
    float y = sums_[t][0][0] + sums_[t][0][3];
#pragma unroll
    for (int i = 1; i < kChains; i++) y += sums_[t][i][0] + sums_[t][i][3];
    return y;
  }

  // This warp's blocks of it, from k on.
  __device__ __forceinline__ void read_input() {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int n = 0; n < kInputs; n++) {
        const int group = (at_.k + i * kWarps) * kSub + n * (kSub / kInputs) + own_group();
        x_[i * kInputs + n] = there(at_.k, i) && has_slot() ? input_[group * 8] : make_uint2(0, 0);
      }
    }
  }
  // What the lane's columns of a product are of: see formats/groups.h.
  __device__ __forceinline__ int own_group() const {
    if constexpr (Weight::kGrouped && Weight::kSlots) return Weight::own_group(c_.row());
    else return 0;
  }
  __device__ __forceinline__ bool has_slot() const {
    if constexpr (Weight::kGrouped && Weight::kSlots) return Weight::has_slot(c_.row(), c_.column());
    else return true;
  }

  // The blocks that were fetched before are in registers now.
  __device__ __forceinline__ void give_back() {
    if (at_.page_ends) c_.pages.give_back(c_.lane(), c_.lost);
    at_.page_ends = false;
  }

  __device__ __forceinline__ void fetch_next(Weights& to) {
    give_back();
    if (at_.next_tile >= count_) return;
    const uint4* page = c_.pages.take(c_.lost) + ((kInPage == kTogether ? 0 : at_.in_page * kBlocks) + c_.warp()) * kBlockWords + c_.lane();
#pragma unroll
    for (int t = 0; t < kTogether; t++)
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const uint4* block = page + (t * kBlocks + i * kWarps) * kBlockWords;
        if (there(at_.next_k, i)) fetch_block(to, t * kAtOnce + i, block);
        else if (!kWhole) to.block[i * Weight::kVectors] = make_uint4(0, 0, 0, 0);  // for whole tiles it has been zero from the start
      }
    at_.page_ends = kInPage == kTogether || at_.in_page == kInPage - kTogether || at_.next_tile + kTogether >= count_;
    at_.in_page = at_.page_ends ? 0 : at_.in_page + kTogether;
    at_.next_k += kRun;
    if (kWhole || at_.next_k >= kBlocks) at_.next_k = 0, at_.next_tile += kTogether;
  }

  // `block` is where the lane's first words lie.
  __device__ __forceinline__ void fetch_block(Weights& to, int at, const uint4* block) {
#pragma unroll
    for (int v = 0; v < Weight::kVectors; v++) to.block[at * Weight::kVectors + v] = block[v * kLanes];
    if constexpr (kExtra > 0) Weight::read_extra(reinterpret_cast<const uint8_t*>(block - c_.lane()), c_.lane(), to.extra_of(at * kExtra));
  }

  __device__ __forceinline__ bool there(int k, int i) const { return i < kSure || k + i * kWarps + c_.warp() < kBlocks; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTogether; t++)
#pragma unroll
      for (int i = 0; i < kChains; i++) sums_[t][i][0] = sums_[t][i][1] = sums_[t][i][2] = sums_[t][i][3] = 0;
  }

  Consumer& c_;
  Progress& at_;
  const int count_;
  const uint2* const input_;
  float* sums_out_;
  uint2 x_[kAtOnce * kInputs];
  float totals_[kAtOnce * kHalves];  // of inputs, where formats need them
  float sums_[kTogether][kChains][4];
};

// The product of a stage that is a run-time value.
__device__ __forceinline__ int product_number(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.product; });
}
template <int Number = kProducts - 1>
__device__ __forceinline__ void prepare_tiles(Consumer& c, Progress& progress, int number, int count) {
  if constexpr (Number == 0) TileProduct<0>(c, progress, count).prepare();
  else if (number == Number) TileProduct<Number>(c, progress, count).prepare();
  else prepare_tiles<Number - 1>(c, progress, number, count);
}
template <int Number = kProducts - 1, class Meanwhile>
__device__ __forceinline__ void multiply_tiles(Consumer& c, Progress& progress, int number, int count, int end, Meanwhile meanwhile) {
  if constexpr (Number == 0) TileProduct<0>(c, progress, count).run(end, meanwhile);
  else if (number == Number) TileProduct<Number>(c, progress, count).run(end, meanwhile);
  else multiply_tiles<Number - 1>(c, progress, number, count, end, meanwhile);
}

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

__device__ __forceinline__ float scale_of(const Consumer& c, const Matrix& matrix, int first, int count) {
  return (matrix.scale ? of_own_row(c, matrix.scale, first, count) : 1) * output_factor(matrix.stage);
}

// Runs the stage: ending(row of the pass, tile, row of the tile, value, whether it is real) for every row of a batch, with
// whole warps so that the ending may shuffle.
template <class Ending>
__device__ __forceinline__ bool run_matrix(Consumer& c, const Matrix& matrix, Ending ending) {
  const int count = c.span(matrix.stage).count, number = product_number(matrix.stage);
  const int most = of_stage(matrix.stage, [](StageRow row) { return product(row.product).batch; });
  if (count == 0) return true;  // all warps must learn of a failure at the same barrier
  c.begin(matrix.stage, matrix.layer);
  c.set_pace(matrix.stage == kAfterAttention ? kAttending : kPolling);
  float bias = of_own_row(c, matrix.bias, 0, count);  // in flight while the input is polled
  float scale = kScalesOutputs ? scale_of(c, matrix, 0, count) : 1;
  Progress progress;
  prepare_tiles(c, progress, number, count);
  float squares[kRows];
  read_input(c, matrix, squares);
  c.trace.arrived();
  const int64_t starved = c.pages.waited_ns;
  c.trace.part();
#pragma unroll 1
  for (int first = 0; first < count; first += most, c.buffer ^= 1) {
    const int batch = smaller(count - first, most);
    const int mine = own_tile(c, first), row = c.within(kTileRows);  // the element that this thread finishes
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
        if (mine < batch && y != y) report_nan(c.shared, matrix.stage, matrix.layer);
        ending(p, first + mine, row, y, mine < batch);
      }
    }
    if constexpr (kQkvBias) bias = of_own_row(c, matrix.bias, first + most, count);
    if constexpr (kScalesOutputs) scale = scale_of(c, matrix, first + most, count);
    c.trace.part();
  }
  c.trace.add(kStarved, c.pages.waited_ns - starved);
  c.trace.end();
  return true;
}

}  // namespace monotape
