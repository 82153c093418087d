// Attention over rows. A block of work is 128 rows of one KV head, a row being (position, query head of the group), so
// that every key and value serves all query heads that share it. A group of four warps has 64 rows, each warp 16; units
// of KV come to all of them through shared memory, where groups multiply them. Where blocks are few and positions many, the
// units of a block are split among workers, and their results are combined in order.
#pragma once
#include "rows/state.h"


namespace monotape {

constexpr int kBlockRows = kWarps * 16;
// Results are packed for the next product.
constexpr bool kAttendedFloat16 = format_is_float16(product(row_of(kAfterAttention).product).format);

// A split's result for a row and head: in partials, [split][row][query values], then (peak, sum) of [split][row][head].
struct Splits {
  int count, rows;

  __device__ __forceinline__ float* values(const Params& params, int split, int row, int head) const {
    return params.rows.partials + ((static_cast<int64_t>(split) * rows + row) * kHeads + head) * kHeadDim;
  }
  __device__ __forceinline__ float2* weight(const Params& params, int split, int row, int head) const {
    return reinterpret_cast<float2*>(values(params, count, 0, 0)) + (static_cast<int64_t>(split) * rows + row) * kHeads + head;
  }
};

__device__ __forceinline__ int attention_blocks(Chunk chunk) { return divide_up(chunk.count * kGroup, kBlockRows); }

// As many splits as there are workers for, each with enough units to be worth its cost. Where one row is left of a chunk, they
// are those of the whole chunk, so that its bits are the same.
__device__ __forceinline__ Splits splits_of(Consumer& c) {
  const Chunk chunk = rows_state(c).chunk;
  const int window = window_of(c.shared, rows_state(c).layer), positions = chunk.start + chunk.count;
  const int seen = window ? smaller(positions, window + chunk.count) : positions;
  const int room = kWorkers / (attention_blocks(chunk) * kKvHeads);
  return {larger(1, smaller(room, divide_up(seen, kUnitsPerSplit * kUnitPositions))), chunk.count};
}

// The sum of a row's weights, with that of its sink, which is worth nothing.
__device__ __forceinline__ float with_sink(const Params& params, int layer, int head, float peak, float sum) {
  if constexpr (kSinks >= 0) sum += power_of_two(params.vectors[kSinks][layer * kHeads + head] * 1.4426950408889634f - peak);
  return sum;
}

class RowAttention {
 public:
  static constexpr int kUnits = kAttendedUnits, kTiles = kUnits * 4;  // that a step looks at, and tiles of their positions
  static constexpr int kValueTiles = kHeadTiles <= 8 ? 8 : 16;  // what lies in those past the head does not matter
  static constexpr int kKeyBytes = kHeadBlocks * kTiles * kBlockBytes, kStepBytes = kKeyBytes + kUnits * kValueTiles * kBlockBytes;
  // KV in 8 bits is on its way in registers, for one step.
  static constexpr int kSteps = kNarrowKv ? 2 : smaller(8, kPrefillBytes / kStepBytes);
  static constexpr int kScores = kSumTiles<kTiles>, kSumWide = kTileSums == 4 ? 1 : 2, kHeadSums = divide_up(kHeadTiles, kSumWide);
  static_assert(kSteps * kStepBytes <= kPrefillBytes && (kNarrowKv || kSteps >= kLeastAttendedSteps), "steps on their way");

  __device__ RowAttention(Consumer& c, Splits splits)
      : c_(c), chunk_(rows_state(c).chunk), splits_(splits), layer_(rows_state(c).layer), window_(window_of(c.shared, layer_)) {}

  __device__ __forceinline__ void run(int kv_head, int block, int split) {
    kv_head_ = kv_head;
    const int first = block * kBlockRows;
    // The units that any row of the block can see, and this split's share of them: whole steps, so that only the very last
    // step, whose end no row sees, is padded.
    const int low = chunk_.start + first / kGroup, high = chunk_.start + smaller(chunk_.count, divide_up(first + kBlockRows, kGroup)) - 1;
    const int begin = (window_ && low + 1 > window_ ? low + 1 - window_ : 0) / kUnitPositions, all = high / kUnitPositions + 1;
    const int each = divide_up(all - begin, splits_.count * kUnits) * kUnits, from = begin + split * each, end = smaller(all, from + each);
    consumers_meet(kConsumers);  // all warps are done with the block before
    queries_.load([&](int half) { return query_row(first, half); }, c_.lane());
#pragma unroll 1
    for (int step = 0; step < kSteps - 1; step++) {
      if constexpr (kNarrowKv) put_units(fetched_units(from + step * kUnits, end), from + step * kUnits, end, step);
      else copy_units(from + step * kUnits, end, step);
    }
    index_ = first + c_.warp() * 16 + sum_row(c_.lane());
    clear();
    see(first + c_.warp() * 16);
#pragma unroll 1
    for (int unit = from, step = 0; unit < end; unit += kUnits, step++) {
      wait_copy_groups<kSteps - 2>();
      fence_shared_copies();
      consumers_meet(kConsumers);
      // All warps awaited the products of the step before this barrier.
      const int next = unit + (kSteps - 1) * kUnits, slot = (step + kSteps - 1) % kSteps;
      if constexpr (kNarrowKv) {
        const Codes codes = fetched_units(next, end);  // arrives while this step is multiplied
        if (unit * kUnitPositions <= any_sees_until_) look_at_units(unit * kUnitPositions, step % kSteps);
        put_units(codes, next, end, slot);
      } else {
        copy_units(next, end, slot);
        if (unit * kUnitPositions <= any_sees_until_) look_at_units(unit * kUnitPositions, step % kSteps);
      }
    }
    wait_copy_groups<0>();
    finish(split);
  }

 private:
  // One of the lane's rows.
  struct Row {
    int row, head, first, last;  // in the chunk, and the positions that it sees
    bool real;
  };
  __device__ __forceinline__ Row row_of(int half) const {
    const int index = index_ + 8 * half, row = index / kGroup, position = chunk_.start + row;
    const bool real = row < chunk_.count;
    return {row, kv_head_ * kGroup + index % kGroup, window_ ? position + 1 - window_ : 0, real ? position : -1, real};
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < kLaneRows; half++) peak_[half] = -infinity(), sum_[half] = 0;
    clear_sums(values_);
  }

  // The positions that all 16 rows of the warp, from that row on, see, and those that any row of its group sees.
  __device__ __forceinline__ void see(int index) {
    const int low = chunk_.start + index / kGroup, high = chunk_.start + smaller(chunk_.count - 1, (index + 15) / kGroup);
    all_see_until_ = low, all_see_from_ = window_ ? high + 1 - window_ : 0;
    const int group = index / 64 * 64;
    any_sees_until_ = group / kGroup < chunk_.count ? chunk_.start + smaller(chunk_.count - 1, (group + 63) / kGroup) : -1;
  }

  __device__ __forceinline__ uint8_t* step_place(int slot) { return c_.shared.ring[0] + slot * kStepBytes; }

  // The words of the query of one of the lane's rows; null past the last row.
  __device__ __forceinline__ const uint4* query_row(int first, int half) const {
    const int index = first + c_.warp() * 16 + sum_row(c_.lane()) + 8 * half, row = index / kGroup;
    const int64_t from = static_cast<int64_t>(row) * kAttendedWords + (kv_head_ * kGroup + index % kGroup) * kHeadWords;
    return row < chunk_.count ? c_.params.rows.queries + from : nullptr;
  }

  // A unit's positions are in the order of its values, so that softmax weights need not be rearranged. Past the end are
  // zeros: a weight of zero times a NaN would be a NaN.
  __device__ __forceinline__ void copy_units(int unit, int end, int slot) {
    if (unit < end) {
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        const uint32_t bytes = unit + u < end ? 16 : 0;
        const uint4* from = reinterpret_cast<const uint4*>(kv_unit(c_.params, layer_, kv_head_, bytes ? unit + u : unit)) + c_.word();
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i += kWarps * kSide) {
          const int block = i + c_.warp() * kSide + c_.side(), tile = block / kHeadBlocks, row = c_.row();
          if (kKeyBlocks % (kWarps * kSide) && block >= kKeyBlocks) continue;
          uint8_t* to = step_place(slot) + (block % kHeadBlocks * kTiles + u * 4 + row / 2) * kBlockBytes;
          copy_word(to + operand_place((tile * 2 + row % 2) * 4 + c_.column()) * 16, from + block * kBlockWords, bytes);
        }
#pragma unroll
        for (int i = 0; i < kHeadTiles; i += kWarps * kSide) {
          const int tile = i + c_.warp() * kSide + c_.side();
          if (kHeadTiles % (kWarps * kSide) && tile >= kHeadTiles) continue;
          uint8_t* to = step_place(slot) + kKeyBytes + (u * kValueTiles + tile) * kBlockBytes;
          copy_word(to + operand_place(c_.word()) * 16, from + (kKeyBlocks + tile) * kBlockWords, bytes);
        }
      }
    }
    end_copy_group();
  }

  // KV in 8 bits comes through registers, because it is unpacked on its way: the same words in the same places, each with
  // its power of two.
  static constexpr int kKeyRounds = divide_up(kKeyBlocks, kWarps * kSide), kValueRounds = divide_up(kHeadTiles, kWarps * kSide);
  struct Codes {
    uint2 key[kUnits][kKeyRounds], value[kUnits][kValueRounds], key_powers[kUnits], value_powers[kUnits];
  };
  __device__ __forceinline__ int block_of(int round) const { return round * kWarps * kSide + c_.warp() * kSide + c_.side(); }

  __device__ __forceinline__ Codes fetched_units(int unit, int end) const {
    Codes codes = {};
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      if (unit + u >= end) continue;
      const uint8_t* from = kv_unit(c_.params, layer_, kv_head_, unit + u);
#pragma unroll
      for (int i = 0; i < kKeyRounds; i++) {
        if (block_of(i) >= kKeyBlocks) continue;
        codes.key[u][i] = load_row_pair(key_codes(from, block_of(i) * kBlockWords + c_.word()));
      }
#pragma unroll
      for (int i = 0; i < kValueRounds; i++)
        if (block_of(i) < kHeadTiles) codes.value[u][i] = load_row_pair(value_codes(from, block_of(i), c_.word()));
      codes.key_powers[u] = load_row_pair(slot_powers(from, c_.row() / 2, false));
      codes.value_powers[u] = load_row_pair(slot_powers(from, c_.column(), true));
    }
    return codes;
  }

  __device__ __forceinline__ void put_units(const Codes& codes, int unit, int end, int slot) {
    if (unit >= end) return;
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
#pragma unroll
      for (int i = 0; i < kKeyRounds; i++) {
        const int block = block_of(i), tile = block / kHeadBlocks, row = c_.row();
        if (block >= kKeyBlocks) continue;
        const float factor = power_factor(slot_power(codes.key_powers[u], tile * 2 + row % 2), kCodeExponent);
        const uint32_t both = pack_pair(factor, factor), factors[4] = {both, both, both, both};
        uint8_t* to = step_place(slot) + (block % kHeadBlocks * kTiles + u * 4 + row / 2) * kBlockBytes;
        *reinterpret_cast<uint4*>(to + operand_place((tile * 2 + row % 2) * 4 + c_.column()) * 16) = times_pairs(key_halves(codes.key[u][i]), factors);
      }
      uint32_t factors[4];
#pragma unroll
      for (int n = 0; n < 4; n++)
        factors[n] = pack_pair(power_factor(slot_power(codes.value_powers[u], 2 * n), kCodeExponent),
                               power_factor(slot_power(codes.value_powers[u], 2 * n + 1), kCodeExponent));
#pragma unroll
      for (int i = 0; i < kValueRounds; i++) {
        if (block_of(i) >= kHeadTiles) continue;
        uint8_t* to = step_place(slot) + kKeyBytes + (u * kValueTiles + block_of(i)) * kBlockBytes;
        *reinterpret_cast<uint4*>(to + operand_place(c_.word()) * 16) = times_pairs(value_halves<kFloat16>(codes.value[u][i]), factors);
      }
    }
  }
  static __device__ __forceinline__ uint4 times_pairs(uint4 pairs, const uint32_t (&factors)[4]) {
    return make_uint4(times_pair(pairs.x, factors[0]), times_pair(pairs.y, factors[1]), times_pair(pairs.z, factors[2]),
                      times_pair(pairs.w, factors[3]));
  }

  __device__ __forceinline__ void look_at_units(int position, int slot) {
    float score[kScores][4];
    queries_.multiply(step_place(slot), score);
    if (position + kUnits * kUnitPositions - 1 > all_see_until_ || position < all_see_from_) hide(position, score);
    uint32_t weight[kTiles / 2][2 * kLaneRows];
    float fade[kLaneRows];
#pragma unroll
    for (int half = 0; half < kLaneRows; half++) fade[half] = weigh(half, score, weight);
#pragma unroll
    for (int j = 0; j < kHeadSums; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) values_[j][i] *= fade[i / kRowSums];
    const uint8_t* values = step_place(slot) + kKeyBytes;
    fence_products();
#pragma unroll
    for (int i = 0; i < 2 * kUnits; i++)
      begin_weighted_product<kValueTiles>(values_, weight[i], values + i / 2 * kValueTiles * kBlockBytes, i % 2);
    end_product_group();
    wait_products(values_);
  }

  // Scores of positions that a row does not see.
  __device__ __forceinline__ void hide(int position, float (&score)[kScores][4]) {
    index_ = opaque(index_);  // rows are recomputed, not kept in registers
#pragma unroll
    for (int half = 0; half < kLaneRows; half++) {
      const Row row = row_of(half);
#pragma unroll
      for (int tile = 0; tile < kScores; tile++)
#pragma unroll
        for (int i = kRowSums * half; i < kRowSums * half + kRowSums; i++) {
          const int at = score_position(position, c_.lane(), tile, i);
          if (at > row.last || at < row.first) score[tile][i] = -infinity();
        }
    }
  }

  // Two neighbouring scores of a row.
  static __device__ __forceinline__ const float* pair_of(const float (&score)[kScores][4], int half, int pair) {
    return score[pair * 2 / kRowSums] + kRowSums * half + pair * 2 % kRowSums;
  }

  // Turns the scores of one of the lane's rows into weights; returns the factor that rescales earlier results. Each lane
  // adds up the weights of its own positions.
  __device__ __forceinline__ float weigh(int half, const float (&score)[kScores][4], uint32_t (&weight)[kTiles / 2][2 * kLaneRows]) {
    float top = peak_[half];
#pragma unroll
    for (int pair = 0; pair < kTiles; pair++) top = fmaxf(top, fmaxf(pair_of(score, half, pair)[0], pair_of(score, half, pair)[1]));
    top = largest_of_head(top);
    const float base = top == -infinity() ? 0 : top;  // no position seen yet: all weights are zero
    float total = 0;
#pragma unroll
    for (int pair = 0; pair < kTiles; pair++) {
      const float a = power_of_two(pair_of(score, half, pair)[0] - base), b = power_of_two(pair_of(score, half, pair)[1] - base);
      total += a + b;
      weight[pair / 2][pair % 2 * kLaneRows + half] = pack_pair(a, b);
    }
    const float fade = power_of_two(peak_[half] - base);
    peak_[half] = top;
    sum_[half] = sum_[half] * fade + total;
    return fade;
  }

  __device__ __forceinline__ void finish(int split) {
    index_ = opaque(index_);
#pragma unroll
    for (int half = 0; half < kLaneRows; half++) {
      const float sum = sum_of_head(sum_[half]);
      const Row row = row_of(half);
      if (!row.real || row.row < rows_state(c_).first_row()) continue;
      if (splits_.count > 1) leave(row, split, half, sum);
      else attended(row, half, 1 / with_sink(c_.params, layer_, row.head, peak_[half], sum));
    }
  }
  __device__ __forceinline__ void attended(const Row& row, int half, float scale) {
#pragma unroll
    for (int j = 0; j < kHeadSums; j++)
#pragma unroll
      for (int i = kRowSums * half; i < kRowSums * half + kRowSums; i += 2) {
        if (kHeadTiles % kSumWide && sum_word(c_.lane(), j) >= kHeadTiles) continue;
        const int word = row.head * kHeadWords + sum_word(c_.lane(), j);
        uint32_t* pairs = reinterpret_cast<uint32_t*>(c_.params.rows.attended + block_word(row.row, word, k_blocks(kAfterAttention)));
        pairs[sum_pair(c_.lane(), i)] = pack_pair<kAttendedFloat16>(values_[j][i] * scale, values_[j][i + 1] * scale);
      }
  }
  __device__ __forceinline__ void leave(const Row& row, int split, int half, float sum) {
    float2* values = reinterpret_cast<float2*>(splits_.values(c_.params, split, row.row, row.head));
#pragma unroll
    for (int j = 0; j < kHeadSums; j++)
#pragma unroll
      for (int i = kRowSums * half; i < kRowSums * half + kRowSums; i += 2) {
        if (kHeadTiles % kSumWide && sum_word(c_.lane(), j) >= kHeadTiles) continue;
        (values + sum_pair(c_.lane(), i))[4 * sum_word(c_.lane(), j)] = make_float2(values_[j][i], values_[j][i + 1]);
      }
    if (head_column(c_.lane()) == 0) *splits_.weight(c_.params, split, row.row, row.head) = make_float2(peak_[half], sum);
  }

  Consumer& c_;
  Chunk chunk_;
  Splits splits_;
  int layer_, window_, kv_head_ = 0;
  int index_ = 0;  // of the first of its rows, among those of the KV head
  int all_see_from_, all_see_until_, any_sees_until_;
  float peak_[kLaneRows], sum_[kLaneRows], values_[kSumTiles<kValueTiles>][4];
  RowQueries<kHeadBlocks> queries_;
};

// The longest blocks first, back and forth over the workers, so that all have about the same work.
__device__ __forceinline__ void attend_rows(Consumer& c) {
#pragma unroll 1
  for (int round = 0;; round++) {
    c.refresh();
    const Splits splits = splits_of(c);
    const int all = attention_blocks(rows_state(c).chunk), blocks = all - rows_state(c).first_row() * kGroup / kBlockRows;
    const int items = blocks * kKvHeads * splits.count;
    if (round * kWorkers >= items) return;
    const int item = round * kWorkers + (round % 2 ? kWorkers - 1 - worker_number() : worker_number());
    if (item < items) RowAttention(c, splits).run(item % kKvHeads, all - 1 - item / kKvHeads % blocks, item / kKvHeads / blocks);
  }
}

// A thread has eight values of a row. Loads of several splits are in flight together. A split that saw nothing has no weight.
__device__ __forceinline__ void combine_splits(Consumer& c) {
  constexpr int kAtOnce = 8;
  const Splits splits = splits_of(c);
  const int first = rows_state(c).first_row() * kAttendedWords;
#pragma unroll 1
  for (int i = first + c.thread * kWorkers + worker_number(); i < splits.rows * kAttendedWords; i += kConsumers * kWorkers) {
    const int row = i / kAttendedWords, word = i % kAttendedWords, head = word / kHeadWords;
    float top = -infinity(), sum = 0, value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < splits.count; first += kAtOnce) {
      float peak[kAtOnce], weight[kAtOnce], part[kAtOnce][8];
#pragma unroll
      for (int s = 0; s < kAtOnce; s++) {
        const int split = smaller(first + s, splits.count - 1);
        const float* of_row = &splits.weight(c.params, split, row, head)->x;
        peak[s] = first + s < splits.count ? load_row_value(of_row) : -infinity(), weight[s] = load_row_value(of_row + 1);
        load_row_values(splits.values(c.params, split, row, head) + word % kHeadWords * 8, part[s]);
      }
      float higher = top;
#pragma unroll
      for (int s = 0; s < kAtOnce; s++) higher = fmaxf(higher, peak[s]);
      if (higher == -infinity()) continue;
      const float fade = power_of_two(top - higher);
      sum *= fade;
#pragma unroll
      for (int k = 0; k < 8; k++) value[k] *= fade;
#pragma unroll
      for (int s = 0; s < kAtOnce; s++) {
        const float share = power_of_two(peak[s] - higher);
        sum += weight[s] * share;
#pragma unroll
        for (int k = 0; k < 8; k++) value[k] += part[s][k] * share;
      }
      top = higher;
    }
    const float whole = with_sink(c.params, rows_state(c).layer, head, top, sum);
#pragma unroll
    for (int k = 0; k < 8; k++) value[k] /= whole;
    c.params.rows.attended[block_word(row, word, k_blocks(kAfterAttention))] = pack8<kAttendedFloat16>(value);
  }
}

}  // namespace monotape
