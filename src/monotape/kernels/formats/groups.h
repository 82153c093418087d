// Weights in groups along k that have scales: any codes (codes.h) with any scales (scales.h).
//
// A product of tensor cores has eight columns, and one row of activations needs two of them. Where a row has one scale for the
// 128 values of a block, the products of its four groups of 32 add up, in every lane of the row. Where it has several, each of
// a block's four slots gets two columns of its own: activations of the other slots are zero there, lane 4 r + s ends with the
// sum of row r and slot s, and applies that slot's scale (kSlots). Groups of 16 take two such sums, of two groups of 32 each,
// whose halves are the slots.
//
// Codes that are integers of at most eight bits are multiplied as such, by activations of 16 bits: integers.h. A pass of
// several rows has no columns left for that.
#pragma once
#include "formats/codes.h"
#include "formats/integers.h"
#include "formats/scales.h"

namespace monotape {

template <class Codes, class Scales>
struct StoredGroups {
  static constexpr bool kFloat16 = false, kAsMultiplied = false, kGrouped = true, kShifts = Scales::kShifts;
  static constexpr int kSub = 4, kBlockBytes = Codes::kBytes + Scales::kBytes, kVectors = Codes::kVectors, kExtra = Codes::kExtra + Scales::kWords;
  static constexpr int kHalves = Scales::kHalves, kInSum = kSub / kHalves;  // sums of a block, groups that add to one
  static constexpr bool kInteger = Codes::kIntegers && kHalves == 1 && kRows == 1;
  static constexpr int kInputExponent = kInteger ? 0 : Codes::kInputExponent;
  static constexpr int kOutputExponent = kInteger ? 0 : Codes::kExponent - Codes::kInputExponent;
  static constexpr bool kSlots = Scales::kSlots;
  static constexpr int kInputs = kInteger ? 2 : kSlots ? kHalves : kSub;  // words of activations of a lane
  static constexpr uint32_t kOne = 0x00010001u;  // two operands of the value 1, where codes are integers
  static constexpr float kUp = two_to(64), kUpAgain = two_to(Codes::kExponent - 64);  // to the value, in two steps
  static_assert(!kShifts || Codes::kExponent == 133, "what is added to a group's values needs the sum of its inputs");

  // A lane of a product's second operand has activations of one slot, and zeros in the products of the others: which of the
  // groups that add to a sum its slot is in, and whether the lane has that slot's part of it.
  static __device__ __forceinline__ int own_group(int row) { return kHalves == 1 ? row / 2 : row / 4; }
  static __device__ __forceinline__ bool has_slot(int row, int column) { return kHalves == 1 || row / 2 % 2 == column / 2; }
  // The activations of a group of a sum: `x` are the lane's, of its slot or of all groups.
  static __device__ __forceinline__ uint2 activations(const uint2* x, int group, int row) {
    if constexpr (!kSlots) return x[group];
    const bool own = own_group(row) == group;
    return make_uint2(own ? x->x : 0, own ? x->y : 0);
  }
  static __device__ __forceinline__ void read_extra(const uint8_t* block, int lane, uint32_t* out) {
    Codes::read_extra(block, lane, out);
    Scales::read(block + Codes::kBytes, fragment_row(lane), fragment_column(lane), out + Codes::kExtra);
  }
  // Adds the product of a group to one of a block's sums.
  static __device__ __forceinline__ void multiply(float (&sums)[4], const uint4* words, const uint32_t* extra, int half, int group, uint2 x) {
    const uint4 w = Codes::operand(words, extra, half * kInSum + group);
    multiply_accumulate<false>(sums, w.x, w.y, w.z, w.w, x.x, x.y);
  }
  // A finished sum of a block, as part of a row's product; `total` is the sum of its inputs.
  static __device__ __forceinline__ float scaled(const float (&sums)[4], const uint32_t* extra, int half, float total) {
    const Factors factors = Scales::factors(extra + Codes::kExtra, half);
    const float y = factors.scale * (sums[0] + sums[3]);
    return kShifts ? y + factors.shift * total : y;
  }
  static __device__ __forceinline__ void add_total(float (&sums)[4], uint2 x) {
    multiply_accumulate<false>(sums, kOne, kOne, kOne, kOne, x.x, x.y);
  }
  // The same of integers: two groups, whose sums are those of different lanes.
  static __device__ __forceinline__ void multiply(int (&sums)[4], const uint4* words, int pair, uint2 x) {
    const uint4 w = Codes::integer_operand(words, pair);
    multiply_accumulate_bytes(sums, w.x, w.y, w.z, w.w, x.x, x.y);
  }
  // `total` is the sum of the lane's group of inputs, times kMiddle where there is one; `scale` that of its inputs and codes.
  static __device__ __forceinline__ float scaled(const int (&sums)[4], const uint32_t* extra, int column, float scale, float total) {
    const Factors factors = Scales::factors(extra + Codes::kExtra, 0);
    const float sum = sum_of_lane(sums, column);
    if constexpr (Scales::kMiddle != 0) return factors.scale * (sum * scale - total);
    const float y = factors.scale * (sum * scale);
    return kShifts ? y + factors.shift * total : y;
  }
  static __device__ __forceinline__ float total_of(const int (&sums)[4], int column, float scale) {
    return sum_of_lane(sums, column) * (Scales::kMiddle ? Scales::kMiddle * scale : scale);
  }
  // What a lane's sums are multiplied by, from what its inputs are.
  static __device__ __forceinline__ float lane_scale(float input_scale, int column) {
    if constexpr (kInteger) return column % 2 ? input_scale * (1 / Codes::kUpper) : input_scale;
    return input_scale;
  }

  // A lane's operand of a group, from memory.
  static __device__ __forceinline__ uint4 operand(const uint8_t* block, int lane, int group) {
    uint4 words[kVectors];
    uint32_t extra[larger(1, Codes::kExtra)];
#pragma unroll
    for (int v = 0; v < kVectors; v++) words[v] = reinterpret_cast<const uint4*>(block)[v * kLanes + lane];
    Codes::read_extra(block, lane, extra);
    return Codes::operand(words, extra, group);
  }
  static __device__ __forceinline__ float number(float operand, Factors factors) {
    return operand * kUp * kUpAgain * factors.scale + factors.shift;
  }
  static __device__ __forceinline__ Factors factors_of(const uint8_t* block, int lane, int group) {
    uint32_t words[larger(1, Scales::kWords)];
    const int slot = kHalves == 1 ? group : group % 2 * 2 + fragment_column(lane) / 2;
    Scales::read(block + Codes::kBytes, fragment_row(lane), slot, words);
    return Scales::factors(words, kHalves == 1 ? 0 : group / 2);
  }
  // Eight values of the lane's row in a group of 32, as numbers.
  static __device__ __forceinline__ void eight_values(const uint8_t* block, int lane, int group, float (&out)[8]) {
    unpack8<false>(operand(block, lane, group), out);
    const Factors factors = factors_of(block, lane, group);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = number(out[i], factors);
  }
  static __device__ __forceinline__ uint4 row_operand(const uint8_t* block, int lane, int group) {
    if constexpr (Scales::kBytes == 0 && !kShifts) {  // the value itself, which is a bf16
      const uint4 w = operand(block, lane, group);
      constexpr float kAll = two_to(Codes::kExponent);
      return make_uint4(scaled_pair(w.x, kAll), scaled_pair(w.y, kAll), scaled_pair(w.z, kAll), scaled_pair(w.w, kAll));
    } else {
      float value[8];
      eight_values(block, lane, group, value);
      return pack8<false>(value);
    }
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    eight_values(block, row * 4 + k % kBlockK / 8, k / kBlockK, out);
  }
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    const int lane = row * 4 + k % kBlockK / 8, pair = k / 2 % 4;
    const uint4 w = operand(block, lane, k / kBlockK);
    const uint32_t two = pair == 0 ? w.x : pair == 1 ? w.y : pair == 2 ? w.z : w.w;
    const Factors factors = factors_of(block, lane, k / kBlockK);
    return number(k % 2 ? high_half<false>(two) : low_half<false>(two), factors);
  }
};

}  // namespace monotape
