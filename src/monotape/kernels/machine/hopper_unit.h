// NVIDIA Hopper: how a warp attends to a unit of KV, as the fragments of its products lie.
#pragma once

namespace monotape {

// The unnormalised softmax of some positions, for the query heads that share a KV head. Scores have heads as rows: lane / 4
// is the head. Sums of values have heads as columns, because then all sixteen rows of the product are used: values[j] has
// dimensions 16j + lane / 4 and eight more, of heads 2t and 2t + 1, t = lane % 4.
constexpr int kValueTiles = divide_up(kHeadTiles, 2);

struct Running {
  float peak = -infinity(), sum = 0;  // of head lane / 4
  float values[kValueTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kValueTiles; j++) values[j][0] = values[j][1] = values[j][2] = values[j][3] = 0;
  }
};

// A unit's keys and values as the products take them. Of codes they still lack their powers of two, which scores and weights get.
struct UnitWords {
  const uint8_t* unit;
  int lane;

  __device__ __forceinline__ uint4 key(int tile, int block) const {
    const int word = (tile * kHeadBlocks + block) * kBlockWords + lane;
    if constexpr (kNarrowKv) return key_halves(*key_codes(unit, word));
    return reinterpret_cast<const uint4*>(unit)[word];
  }
  __device__ __forceinline__ uint4 value(int tile) const {
    if constexpr (kNarrowKv) return value_halves<kFloat16Weights>(*value_codes(unit, tile, lane));
    return reinterpret_cast<const uint4*>(unit)[(kKeyBlocks + tile) * kBlockWords + lane];
  }
  // Of positions 2t and 2t + 1 of each tile, t = lane % 4.
  template <bool OfValue>
  __device__ __forceinline__ void scale(float (&two)[4][2]) const {
    if constexpr (kNarrowKv) {
      const uint2 powers = *slot_powers(unit, head_column(lane), OfValue);
#pragma unroll
      for (int slot = 0; slot < 8; slot++)
        two[slot / 2][slot % 2] *= power_factor(slot_power(powers, slot), OfValue ? kWeightLift : kCodeExponent - kQueryLift);
    }
  }
};

constexpr bool kWindows = kKinds > 1 || kWidestWindow > 0;  // whether some layer sees the newest positions only

// One unit of 32 positions, of which [begin, end) are visible. All loads come before the products, and consecutive products
// are independent. `First`: there is nothing yet to be added to.
template <bool First>
__device__ __forceinline__ void look_at(Consumer& c, const uint4* unit, const Head& query, int begin, int end, Running& running) {
  const UnitWords words = {reinterpret_cast<const uint8_t*>(unit), c.lane()};
  uint4 key[4][kHeadBlocks], value[2 * kValueTiles];
#pragma unroll
  for (int b = 0; b < kHeadBlocks; b++)
#pragma unroll
    for (int tile = 0; tile < 4; tile++) key[tile][b] = words.key(tile, b);
  float sum[4][4] = {}, score[4][2];
#pragma unroll
  for (int b = 0; b < kHeadBlocks; b++) {
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
      multiply_accumulate(sum[tile], query.block[b].x, 0, query.block[b].y, 0, key[tile][b].x, key[tile][b].y);
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
      multiply_accumulate(sum[tile], query.block[b].z, 0, query.block[b].w, 0, key[tile][b].z, key[tile][b].w);
  }
#pragma unroll
  for (int j = 0; j < 2 * kValueTiles; j++)
    value[j] = j < kHeadTiles ? words.value(j) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) score[tile][i] = sum[tile][i];
  words.scale<false>(score);
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = tile * 8 + 2 * c.column() + i;
      score[tile][i] = (!kWindows || at >= begin) && at < end ? score[tile][i] : -infinity();
    }
  float top = fmaxf(fmaxf(fmaxf(score[0][0], score[0][1]), fmaxf(score[1][0], score[1][1])),
                    fmaxf(fmaxf(score[2][0], score[2][1]), fmaxf(score[3][0], score[3][1])));
  if constexpr (!First) top = fmaxf(top, running.peak);
  top = fmaxf(top, lane_across(top, 1));
  top = fmaxf(top, lane_across(top, 2));
  if (top == -infinity()) top = 0;  // no visible position: all weights are zero
  const float fade = First ? 0 : exponential(running.peak - top);
  running.peak = top;
  uint32_t weight[4];
  float total = 0;
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    score[tile][0] = exponential(score[tile][0] - top), score[tile][1] = exponential(score[tile][1] - top);
    total += score[tile][0] + score[tile][1];
  }
  words.scale<true>(score);
#pragma unroll
  for (int tile = 0; tile < 4; tile++) weight[tile] = pack_pair<kFloat16Weights>(score[tile][0], score[tile][1]);
  if constexpr (!First) {
    const float fade_even = lane_at(fade, 8 * c.column()), fade_odd = lane_at(fade, 8 * c.column() + 4);
#pragma unroll
    for (int j = 0; j < kValueTiles; j++) {
      float* sums = running.values[j];
      sums[0] *= fade_even, sums[1] *= fade_odd, sums[2] *= fade_even, sums[3] *= fade_odd;
    }
  }
#pragma unroll
  for (int j = 0; j < kValueTiles; j++) {
    const uint4 low = value[2 * j], high = value[2 * j + 1];
    multiply_accumulate<kFloat16Weights>(running.values[j], low.x, high.x, low.y, high.y, weight[0], weight[1]);
  }
#pragma unroll
  for (int j = 0; j < kValueTiles; j++) {
    const uint4 low = value[2 * j], high = value[2 * j + 1];
    multiply_accumulate<kFloat16Weights>(running.values[j], low.z, high.z, low.w, high.w, weight[2], weight[3]);
  }
  total += lane_across(total, 1);  // while the products are computed
  total += lane_across(total, 2);
  running.sum = First ? total : running.sum * fade + total;
}

// Stores the warp's part in shared memory, head by head.
__device__ __forceinline__ void keep_part(Consumer& c, const Running& running, int place) {
  float(*part)[kPartValues] = c.shared.attention[place];
#pragma unroll
  for (int j = 0; j < kValueTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = 2 * c.column() + i % 2, d = 16 * j + c.row() + i / 2 * 8;
      if (head < kGroup && d < kHeadDim) part[head][d] = kNarrowKv ? running.values[j][i] * power_float(kValueExponent - kWeightLift) : running.values[j][i];
    }
  if (c.column() == 0 && c.row() < kGroup) part[c.row()][kHeadDim] = running.peak, part[c.row()][kHeadDim + 1] = running.sum;
}

}  // namespace monotape
