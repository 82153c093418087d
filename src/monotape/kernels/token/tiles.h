// A worker's tiles of a stage times its input, as they come off the tape: each warp has every eighth block of k.
#pragma once
#include "token/tile_pages.h"

namespace monotape {

// The scales of a warp's inputs where they are integers. Otherwise nothing: even an unused member changes machine code.
template <int Blocks>
struct InputScales {
  float scales_[Blocks];
};
template <>
struct InputScales<0> {
  static constexpr float* scales_ = nullptr;
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
template <int Number, int Rows>
class TileProduct : InputScales<Stored<product(Number).format>::kInteger ? divide_up(product(Number).page_run, kWarps) : 0>,
                    public TilePages<Number, Rows> {
 public:
  __device__ __forceinline__ TileProduct(Consumer& c, Progress& progress, int count)
      : TilePages<Number, Rows>(c, progress, count),
        input_(reinterpret_cast<const TokenInput*>(c.shared.x + own_row() * kRowBlocks * 4) +
               c.warp() * kSide * kSub * kGroupInputs + first_input(c.lane(), kSub) + second_input(c.lane())),
        sums_out_(&c.shared.sums[c.buffer][Rows == 1 ? 0 : token_pass(c.lane()) * kRowBatch][token_row(c.lane())][c.warp()]) {}

  static constexpr bool kDirect = is_direct(Rows, product(Number).blocks);

  // The first words of an input that is not in shared memory.
  __device__ __forceinline__ void hear_first() {
    load_ahead<0>(0);
    if constexpr (kStepsAhead > 1) load_ahead<1>(kRun);
    await_ahead<0>(0);
  }

  // The tiles from the next one on, up to `end`; `meanwhile` is called once loads are in flight.
  template <class Meanwhile>
  __device__ __forceinline__ void run(int end, Meanwhile meanwhile) {
    if constexpr (kScalesBlocks) at_.batch = at_.tile;
    if constexpr (kFewRegisters && !kWhole) clear();  // sums without a value would take registers of the whole token
    if (kWhole && !kDirect) read_input<false>();
    if constexpr (kFewRegisters) step<true>(at_.even, [] {}), meanwhile();
    else step<true>(at_.even, meanwhile);
#pragma unroll 1
    while (at_.tile < end) {
      step<!kWhole, true>(at_.odd, [] {});
      if (at_.tile >= end) break;
      step<!kWhole>(at_.even, [] {});
    }
  }

 private:
  using Pages = TilePages<Number, Rows>;
  using typename Pages::Weight;
  using Pages::at_, Pages::c_, Pages::count_, Pages::fetch_next, Pages::there;
  using Pages::kAdded, Pages::kAddsExperts, Pages::kAtOnce, Pages::kBlocks, Pages::kBlockWords, Pages::kExpertBlocks, Pages::kExtra;
  using Pages::kPages, Pages::kProduct, Pages::kRun, Pages::kSub, Pages::kTogether, Pages::kWhole;
  static constexpr int kHalves = Weight::kHalves, kInputs = Weight::kInputs;
  static_assert(Rows == 1 || !Weight::kGrouped || !Weight::kSlots, "the columns of a product are slots of groups, not rows");
  static constexpr int kChains = kTogether == 1 ? 4 : 2;  // independent chains of a tile's products
  static constexpr bool kFetchesFirst = kShortOfRegisters;
  static constexpr bool kScalesBlocks = kAddsExperts && kScalesExperts;  // their rows have scales, one of each expert

  // Multiplies a page's tiles, some of them, or a part of one. Data past the last tile is multiplied too, and ignored.
  // `Adds`: the input is new, and its sums are taken along. Finished sums are stored before the next page is looked for, because
  // after the last page all other warps wait for them; but where unpacking takes as long as pages take to come, pages come first.
  template <bool Adds, bool Odd = false, class Meanwhile>
  __device__ __forceinline__ void step(Weights& weights, Meanwhile meanwhile) {
    if (!kWhole || kDirect) read_input<Odd>();
    if (kWhole || at_.k == 0) clear();
    if constexpr (Weight::kInteger) multiply_integers<Adds && Weight::kShifts>(weights);
    else if constexpr (Weight::kGrouped) multiply_groups<Adds && Weight::kShifts>(weights);
    else multiply_halves(weights);
    meanwhile();
    at_.k += kRun;
    if constexpr (kFetchesFirst) fetch_next(weights);
    if (kWhole || at_.k >= kBlocks) finish_tiles();
    if constexpr (!kFetchesFirst) fetch_next(weights);
  }
  __device__ __forceinline__ void finish_tiles() {
#pragma unroll
    for (int t = 0; t < kTogether; t++) {
      const float y = finished(t);
      if (token_pass(c_.lane()) < rows()) sums_out_[t * kTileRows * kWarps] = y;
    }
    sums_out_ += kTogether * kTileRows * kWarps;
    at_.k = 0, at_.tile += kTogether;
  }

  // Adds the sum of block i of tile t: times its expert's scale of the lane's row, if there is one.
  __device__ __forceinline__ void add_block(int t, int i, float sum) {
    if constexpr (kScalesBlocks) {
      const int side = own_side(), block = at_.k + (i * kWarps + c_.warp()) * kSide + side;
      const int slot = smaller(block / kExpertBlocks, kAdded - 1);  // blocks past the last are zeros
      sum *= c_.shared.expert_scale[(slot * kBatchTiles + at_.tile - at_.batch + t) * kTileRows + token_row(c_.lane())];
    }
    sums_[t][0][0] += sum;
  }
  __device__ __forceinline__ int own_side() const {
    if constexpr (Weight::kSides) return Weight::own_side(c_.lane());
    else return c_.side();
  }

  // 16-bit floats: the products of a tile add up in the tensor cores.
  __device__ __forceinline__ void multiply_halves(const Weights& weights) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int t = 0; t < kTogether; t++) {
        const uint4& w = weights.block[t * kAtOnce + i];
        multiply_token<Weight::kFloat16>(sums_[t][i % kChains], w, x_[i]);
      }
  }
  // Codes with scales: the products of a block add up, and blocks in the order of k. Blocks take turns: a product that waits
  // for the one before costs more than all else.
  template <bool Adds>
  __device__ __forceinline__ void multiply_groups(Weights& weights) {
    if constexpr (Weight::kSides) return multiply_sides<Adds>(weights);
    else multiply_columns<Adds>(weights);
  }
  template <bool Adds>
  __device__ __forceinline__ void multiply_sides(Weights& weights) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int half = 0; half < kHalves; half++) {
        const TokenInput* x = x_ + i * kInputs + half * Weight::kInSum;
        if constexpr (Adds) totals_[i * kHalves + half] = Weight::total(x, c_.lane());
#pragma unroll
        for (int t = 0; t < kTogether; t++) {
          const int at = t * kAtOnce + i;
          const float sum = Weight::multiplied(weights.block + at * Weight::kVectors, weights.extra_of(at * kExtra), half, x, c_.lane());
          add_block(t, i, Weight::scaled(sum, weights.extra_of(at * kExtra), half, totals_[i * kHalves + half]));
        }
      }
  }
  template <bool Adds>
  __device__ __forceinline__ void multiply_columns(Weights& weights) {
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
          add_block(t, i, Weight::scaled(sums[t][i], weights.extra_of((t * kAtOnce + i) * kExtra), half, totals_[i * kHalves + half]));
      }
    }
  }
  // Codes that are integers: see formats/integers.h.
  template <bool Adds>
  __device__ __forceinline__ void multiply_integers(Weights& weights) {
    int sums[kTogether][kAtOnce][kHalves][4] = {}, totals[kAtOnce][kHalves][4] = {};
#pragma unroll
    for (int pair = 0; pair < 2; pair++)
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int half = kHalves == 1 ? 0 : pair;
        const uint2 x = x_[i * kInputs + pair];
        if constexpr (Adds) Weight::add_total(totals[i][half], pair, x);
#pragma unroll
        for (int t = 0; t < kTogether; t++) {
          const int at = t * kAtOnce + i;
          Weight::multiply(sums[t][i][half], weights.block + at * Weight::kVectors, weights.extra_of(at * kExtra), pair, x);
        }
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int half = 0; half < kHalves; half++) {
        float& total = totals_[i * kHalves + half];
        if constexpr (Adds) total = Weight::total_of(totals[i][half], c_.column(), this->scales_[i]);
        const float scale = Weight::lane_scale(this->scales_[i], c_.column());
#pragma unroll
        for (int t = 0; t < kTogether; t++) {
          const uint32_t* extra = weights.extra_of((t * kAtOnce + i) * kExtra);
          if constexpr (!kScalesBlocks) {
            Weight::add_scaled(sums_[t][0][0], sums[t][i][half], extra, half, c_.column(), scale, total);
          } else {
            float sum = 0;
            Weight::add_scaled(sum, sums[t][i][half], extra, half, c_.column(), scale, total);
            add_block(t, i, sum);
          }
        }
      }
  }
  __device__ __forceinline__ float finished(int t) const {
    if constexpr (Weight::kGrouped) {
      if constexpr (Weight::kSides) return Weight::whole(sums_[t][0][0]);
      if constexpr (!Weight::kSlots && !Weight::kInteger) return sums_[t][0][0];
      const float two = sums_[t][0][0] + lane_across(sums_[t][0][0], 1);  // each lane of a row has the sum of its slots
      return two + lane_across(two, 2);
    }
    float y = token_part(sums_[t][0], c_.lane());
#pragma unroll
    for (int i = 1; i < kChains; i++) y += token_part(sums_[t][i], c_.lane());
    return token_whole(y);
  }

  // This warp's blocks of it, from k on.
  template <bool Odd>
  __device__ __forceinline__ void read_input() {
    if constexpr (kDirect) {
      take_ahead<Odd>();
    } else if constexpr (Weight::kInteger) {
      read_integers();
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
#pragma unroll
        for (int n = 0; n < kInputs; n++) {
          const int group = (at_.k + i * kWarps * kSide) * kSub + n * (kSub / kInputs) + own_group();
          x_[i * kInputs + n] = there(at_.k, i) && has_slot() ? input_[group * kGroupInputs] : no_input();
        }
    }
  }
  // Words of the exchange, in the order of products as they are published there: those of this step have been asked for before. A
  // tile needs all of its input, so all of it has come before anything that depends on it is published. Tiles after the first
  // read it again, and wait for nothing: a lane loads what it has seen before, and the words are reset after the stage.
  template <bool Odd>
  __device__ __forceinline__ void take_ahead() {
    static_assert(!Weight::kGrouped, "inputs of 16 bits, as they are in the exchange");
    static_assert(kPages >= kStepsAhead, "what is asked for ahead of the next tile has come for this one");
    TokenInput(&ahead)[most_inputs_ahead()] = rows_input(at_).ahead[Odd % kStepsAhead];
    if (at_.tile == 0) await_ahead<Odd>(at_.k);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) x_[i] = has_word(at_.k, i) ? ahead[i] : no_input();
    const int next = at_.k + kStepsAhead % kPages * kRun;
    load_ahead<Odd>(next < kPages * kRun ? next : next - kPages * kRun);
  }
  template <bool Odd>
  __device__ __forceinline__ void load_ahead(int k) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) rows_input(at_).ahead[Odd % kStepsAhead][i] = load_input(place_of(k, i), c_.lane());
  }
  template <bool Odd>
  __device__ __forceinline__ bool all_came() {
    bool came = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) came &= input_came(rows_input(at_).ahead[Odd % kStepsAhead][i]);
    return came;
  }
  template <bool Odd>
  __device__ __forceinline__ void await_ahead(int k) {
    RowsInput& input = rows_input(at_);
    Patience patience(c_.shared, c_.lost, input.stage, input.layer);
#pragma unroll 1
    while (!all_came<Odd>() && patience.more(k)) {
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        TokenInput& mine = input.ahead[Odd % kStepsAhead][i];
        if (!input_came(mine)) mine = load_input(place_of(k, i), c_.lane());
      }
    }
    warp_meets();
  }
  // Whether the warp's i-th block from k on has a word of this lane: not past the input's end.
  __device__ __forceinline__ bool has_word(int k, int i) const {
    constexpr bool kPadded = [] {  // the last block of some input
      for (int s = 0; s < kMatrixStages; s++)
        if (stage_row(s).product == Number && stage_row(s).k % kBlockK) return true;
      return false;
    }();
    if constexpr (!kPadded) return there(k, i);
    return word_of(k + i * kWarps * kSide) < rows_input(at_).words;
  }
  // Where the lane's input of that block is, or its first one where it has none, because loads behind branches would wait for each
  // other. Places of a step lie at fixed distances.
  __device__ __forceinline__ InputPlace place_of(int k, int i) const {
    const InputPlace first = rows_input(at_).first, step = first + k * 4 * kPlacesInWord;
    return has_word(k, i) ? step + i * kWarps * kSide * 4 * kPlacesInWord : first;
  }
  __device__ __forceinline__ int word_of(int k) const { return (k + c_.warp() * kSide + c_.side()) * 4 + c_.column(); }
  // The row of the pass whose values are this lane's column of a product.
  __device__ __forceinline__ int own_row() const {
    if constexpr (Rows == 1) return 0;
    else return own_input_row(c_.lane(), rows());
  }
  __device__ __forceinline__ int rows() const {
    if constexpr (Rows == 1) return 1;
    else return rows_input(at_).rows;
  }
  // A lane's column is one byte of the integers of one group, or of half of one. It takes part in one of a block's two products or in both:
  // see formats/integers.h.
  __device__ __forceinline__ void read_integers() {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const bool real = there(at_.k, i);
      const int block = at_.k + i * kWarps + c_.warp();
      if constexpr (kHalves == 1) {
        const uint2 x = real ? reinterpret_cast<const uint2*>(c_.shared.x)[(block * 16 + c_.row() / 2 * 4 + c_.column()) * 2 + c_.row() % 2] : make_uint2(0, 0);
        this->scales_[i] = real ? c_.shared.input_scale[block] : 0;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) x_[i * kInputs + pair] = Weight::takes_part(c_.row(), pair) ? x : make_uint2(0, 0);
      } else {
        const bool mine = real && c_.row() / 2 % 2 == c_.column() / 2;
        const uint2* x = reinterpret_cast<const uint2*>(c_.shared.x) + (block * 16 + c_.row() / 4 * 4 + c_.column()) * 2 + c_.row() % 2;
        this->scales_[i] = real ? c_.shared.input_scale[block] : 0;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) x_[i * kInputs + pair] = mine ? x[pair * 16] : make_uint2(0, 0);
      }
    }
  }
  // What the lane's columns of a product are of: see formats/groups.h.
  __device__ __forceinline__ int own_group() const {
    if constexpr (Weight::kGrouped && Weight::kSlots && !Weight::kSides) return Weight::own_group(c_.row());
    else return 0;
  }
  __device__ __forceinline__ bool has_slot() const {
    if constexpr (Weight::kSides) return Weight::takes_group(c_.lane());
    else if constexpr (Weight::kGrouped && Weight::kSlots) return Weight::has_slot(c_.row(), c_.column());
    else return takes_input(c_.lane());
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTogether; t++)
#pragma unroll
      for (int i = 0; i < kChains; i++)
#pragma unroll
        for (int s = 0; s < kTokenSums; s++) sums_[t][i][s] = 0;
  }

  const TokenInput* const input_;
  float* sums_out_;
  TokenInput x_[kAtOnce * kInputs];
  float totals_[kAtOnce * kHalves];  // of inputs, where formats need them
  float sums_[kTogether][kChains][kTokenSums];
};

// The runs of a stage whose tiles are dealt out, from the first on.
__device__ __forceinline__ void begin_runs(const Consumer& c, Progress& progress, Stage stage) {
  if constexpr (kExperts > 0) {
    const Dealing dealing = dealing_of(c, stage);
    progress.left = dealing.lead(), progress.rest = dealing.count - progress.left, progress.most = dealing.all;
  }
}

// The product of a stage that is a run-time value.
__device__ __forceinline__ int product_number(Stage stage) {
  return of_stage(stage, [](StageRow row) { return row.product; });
}
template <int Rows, int Number = kProducts - 1>
__device__ __forceinline__ void prepare_tiles(Consumer& c, Progress& progress, int number, int count) {
  if constexpr (Number == 0) TileProduct<0, Rows>(c, progress, count).prepare();
  else if (number == Number) TileProduct<Number, Rows>(c, progress, count).prepare();
  else prepare_tiles<Rows, Number - 1>(c, progress, number, count);
}
template <int Rows, int Number = kProducts - 1, class Meanwhile>
__device__ __forceinline__ void multiply_tiles(Consumer& c, Progress& progress, int number, int count, int end, Meanwhile meanwhile) {
  if constexpr (Number == 0) TileProduct<0, Rows>(c, progress, count).run(end, meanwhile);
  else if (number == Number) TileProduct<Number, Rows>(c, progress, count).run(end, meanwhile);
  else multiply_tiles<Rows, Number - 1>(c, progress, number, count, end, meanwhile);
}
// The first words of an input that stays in the exchange.
template <int Rows, int Number = kProducts - 1>
__device__ __forceinline__ void hear_first(Consumer& c, Progress& progress, int number, int count) {
  if constexpr (TileProduct<Number, Rows>::kDirect)
    if (number == Number) return TileProduct<Number, Rows>(c, progress, count).hear_first();
  if constexpr (Number > 0) hear_first<Rows, Number - 1>(c, progress, number, count);
}

}  // namespace monotape
