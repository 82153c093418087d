// Queries, keys and values of rows: from the sums of the qkv product to the KV and to the input of attention.
#pragma once
#include "rows/state.h"

namespace monotape {

constexpr float kQueryScale = kAttentionScale * 1.4426950408889634f;  // scores are exponents of two

// For kHeadLanes rows and one head: normalises and rotates queries and keys, and stores keys and values in the KV cache.
class RowHead {
 public:
  __device__ RowHead(Consumer& c, Pieces pieces, int head, int row)
      : c_(c), pieces_(pieces), layer_(rows_state(c).layer), head_(head), row_(row),
        position_(rows_state(c).chunk.start + row),
        real_(row < rows_state(c).chunk.count && (head >= kHeads || row >= rows_state(c).first_query())) {}

  __device__ __forceinline__ void keep_value() {
    int number[kHeadBlocks];
    uint4 value[kHeadBlocks];
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) number[b] = 4 * b + column() < kHeadWords ? 4 * b + column() : -1;
    read(number, value);
    const int power = kNarrowKv ? power_of_head(value) : 0;  // all lanes: they shuffle
    if (!real_) return;
    uint8_t* unit = kv_unit(c_.params, layer_, head_ - kHeads - kKvHeads, position_ / kUnitPositions);
    if (kNarrowKv && column() == 0) store_power(unit, position_, true, power);
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      if (number[b] < 0) continue;
      if constexpr (kNarrowKv) {
        store_value_codes(unit, position_, number[b], value[b], power);
        continue;
      }
      const uint32_t pair[4] = {value[b].x, value[b].y, value[b].z, value[b].w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        *value_place(unit, position_, number[b] * 8 + i) = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
    }
  }

  __device__ __forceinline__ void finish() {
    const bool is_key = head_ >= kHeads;
    int number[HeadWords::count];
    HeadWords::numbers(column(), number);
    uint4 word[HeadWords::count];
    read(number, word);
    const HeadGains gains = read_head_gains(head_gain(c_.params, is_key, layer_), column());
    const Angles angles = angles_of(c_.params, real_ ? position_ : rows_state(c_).chunk.start);
    const Head done = finish_head(word, column(), gains, angles, is_key ? 1.0f : kQueryScale);
    const int power = kNarrowKv && is_key ? power_of_head(done.block) : 0;  // all lanes: they shuffle
    if (!real_) return;
    uint4* queries = c_.params.rows.queries + static_cast<int64_t>(row_) * kAttendedWords + head_ * kHeadWords;
    uint8_t* unit = kv_unit(c_.params, layer_, is_key ? head_ - kHeads : 0, position_ / kUnitPositions);
    if (kNarrowKv && is_key && column() == 0) store_power(unit, position_, false, power);
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      const int at = 4 * b + column();
      if (kNarrowKv && is_key) store_key_codes(unit, position_, b, column(), done.block[b], power);
      else if (is_key) store_key_word(unit, position_, b, column(), done.block[b]);
      else if (at < kHeadWords) queries[at] = done.block[b];
    }
  }

 private:
  __device__ __forceinline__ int column() const { return head_column(c_.lane()); }
  // Words of the head (negative: zeros) as the qkv product left them, rounded as a token's are.
  template <int Words>
  __device__ __forceinline__ void read(const int (&number)[Words], uint4 (&word)[Words]) const {
    int place[Words];
    float value[Words][8];
#pragma unroll
    for (int n = 0; n < Words; n++) {
      const bool there = real_ && number[n] >= 0;
      place[n] = there ? row_ * (kQkvRows / 8) + head_ * kHeadWords + number[n] : -1;
#pragma unroll
      for (int i = 0; i < 8; i++) value[n][i] = 0;
      if constexpr (row_of(kAttends).bias != kNoVector)
        if (there) load8(c_.params.vectors[static_cast<int>(row_of(kAttends).bias)] + static_cast<int64_t>(layer_) * kQkvRows + (head_ * kHeadWords + number[n]) * 8, value[n]);
    }
    add_pieces<larger(1, 8 / Words)>(c_.params, pieces_, place, value);
#pragma unroll
    for (int n = 0; n < Words; n++) word[n] = pack8(value[n]);
  }

  Consumer& c_;
  Pieces pieces_;
  int layer_, head_, row_, position_;
  bool real_;
};

__device__ inline void finish_heads(Consumer& c, Pieces pieces) {
  constexpr int kStored = 2 * kKvHeads;  // keys follow the queries, values the keys
  const int groups = divide_up(pieces.rows, kHeadLanes), first_group = rows_state(c).first_query() / kHeadLanes;
  const int stored = groups * kStored, asking = pieces.rows > rows_state(c).first_query() ? groups - first_group : 0;
  for_each_item(c, stored + asking * kHeads, [&](int item) {
    const bool is_stored = item < stored;
    const int number = is_stored ? kHeads + item % kStored : (item - stored) % kHeads;
    const int group = is_stored ? item / kStored : first_group + (item - stored) / kHeads;
    RowHead head(c, pieces, number, group * kHeadLanes + head_row(c.lane()));
    if (number >= kHeads + kKvHeads) head.keep_value();
    else head.finish();
  });
}

}  // namespace monotape
