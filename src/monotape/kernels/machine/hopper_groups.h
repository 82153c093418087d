// Hopper: a token's products of weights in groups along k (formats/groups.h).
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

namespace monotape {

template <class Codes, class Scales>
struct GroupProducts {
  static constexpr bool kShifts = Scales::kShifts, kSides = false;
  static constexpr int kSub = 4;
  static constexpr int kHalves = Scales::kHalves, kInSum = kSub / kHalves;  // sums of a block, groups that add to one
  static constexpr bool kInteger = Codes::kIntegers && kRows == 1;
  static constexpr int kInputExponent = kInteger ? 0 : Codes::kInputExponent;
  static constexpr int kOutputExponent = kInteger ? 0 : Codes::kExponent - Codes::kInputExponent;
  static constexpr bool kSlots = Scales::kSlots;
  static constexpr int kInputs = kInteger ? 2 : kSlots ? kHalves : kSub;  // words of activations of a lane
  static constexpr uint32_t kOne = 0x00010001u;  // two operands of the value 1, where codes are integers

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
  static __device__ __forceinline__ void multiply(int (&sums)[4], const uint4* words, const uint32_t* extra, int pair, uint2 x) {
    const uint4 w = Codes::integer_operand(words, extra, pair);
    multiply_accumulate_bytes(sums, w.x, w.y, w.z, w.w, x.x, x.y);
  }
  // Whether the sums of a lane are of the second of two groups.
  static __device__ __forceinline__ bool is_upper(int column) { return kHalves == 1 ? column % 2 : column / 2; }
  // `total` is the sum of the lane's slot of inputs, times kMiddle where there is one; `scale` that of its inputs and codes.
  static __device__ __forceinline__ float scaled(const int (&sums)[4], const uint32_t* extra, int half, int column, float scale, float total) {
    const Factors factors = Scales::factors(extra + Codes::kExtra, half);
    const float sum = sum_of_lane(sums, is_upper(column));
    if constexpr (Scales::kMiddle != 0) return factors.scale * (sum * scale - total);
    const float y = factors.scale * (sum * scale);
    return kShifts ? y + factors.shift * total : y;
  }
  static __device__ __forceinline__ float total_of(const int (&sums)[4], int column, float scale) {
    return sum_of_lane(sums, is_upper(column)) * (Scales::kMiddle ? Scales::kMiddle * scale : scale);
  }
  // What a lane's sums are multiplied by, from what its inputs are.
  static __device__ __forceinline__ float lane_scale(float input_scale, int column) {
    if constexpr (kInteger) return is_upper(column) ? input_scale * (1 / Codes::kUpper) : input_scale;
    return input_scale;
  }
};

}  // namespace monotape
