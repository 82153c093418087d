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
  // The same of integers: one of the two products of a block, whose sums are those of different lanes.
  static __device__ __forceinline__ void multiply(int (&sums)[4], const uint4* words, const uint32_t* extra, int number, uint2 x) {
    static_assert(!Codes::kWholeBytes || (kHalves == 1 && kShifts), "sums of whole bytes are shifted");
    const uint4 w = Codes::integer_operand(words, extra, number);
    multiply_accumulate_bytes(sums, w.x, w.y, w.z, w.w, x.x, x.y);
  }
  // Whether the lane's column of a product has activations, where groups have 32 values.
  static __device__ __forceinline__ bool takes_part(int row, int number) {
    return Codes::kWholeBytes ? number == 1 || row / 2 % 2 : row / 4 == number;
  }
  // Adds the product's activations: once, where it takes those of all slots.
  static __device__ __forceinline__ void add_total(int (&sums)[4], int number, uint2 x) {
    constexpr uint32_t kOnes = 0x01010101u;
    if (!Codes::kWholeBytes || number == 1) multiply_accumulate_bytes(sums, kOnes, kOnes, kOnes, kOnes, x.x, x.y);
  }
  // Whether the sums of a lane are in rows 8-15 of a product.
  static __device__ __forceinline__ bool is_upper(int column) { return kHalves == 1 && !Codes::kWholeBytes ? column % 2 : column / 2; }
  // Adds a block's sum to a row's. `total` is that of the lane's slot of inputs, and `scale` that of its inputs and codes. Each term is
  // added separately, so that the compiler can use a fused multiply-add.
  static __device__ __forceinline__ void add_scaled(float& to, const int (&sums)[4], const uint32_t* extra, int half, int column, float scale, float total) {
    const Factors factors = Scales::factors(extra + Codes::kExtra, half);
    const float sum = sum_of_lane(sums, is_upper(column));
    if constexpr (Scales::kMiddle != 0) {
      to += factors.scale * (sum * scale - total);
    } else {
      to += factors.scale * (Codes::kWholeBytes ? sum * scale + missing(column) * total : sum * scale);
      if constexpr (kShifts) to += factors.shift * total;
    }
  }
  // Times what is subtracted of the slot's total, where it is the same for all groups: the code of the value 0, and for whole bytes
  // less what the lane's sum lacks.
  static __device__ __forceinline__ float total_of(const int (&sums)[4], int column, float scale) {
    const float middle = Codes::kWholeBytes ? Scales::kMiddle - missing(column) : Scales::kMiddle;
    return sum_of_lane(sums, is_upper(column)) * (Scales::kMiddle ? middle * scale : scale);
  }
  // What a lane's sums are multiplied by, from what its inputs are.
  static __device__ __forceinline__ float lane_scale(float input_scale, int column) {
    if constexpr (!kInteger) return input_scale;
    if constexpr (Codes::kWholeBytes) return input_scale * (column % 2 ? 1 / Codes::kUpper : -1);
    return is_upper(column) ? input_scale * (1 / Codes::kUpper) : input_scale;
  }

 private:
  // Of whole bytes: how many times the total must be added to a lane's scaled sum.
  static __device__ __forceinline__ float missing(int column) {
    if constexpr (Codes::kWholeBytes) return column % 2 ? -Codes::kMost / Codes::kUpper : Codes::kMost;
    return 0;
  }
};

}  // namespace monotape
