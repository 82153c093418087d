// CDNA3: a token's products of weights in groups along k (formats/groups.h). No instruction is here: the host's machine runs this
// file as it is.
//
// Two blocks lie side by side in a wave, and each has scales of its own. So columns 0-7 of a product have activations of the
// first block alone, columns 8-15 those of the second: a lane's sum is one of one block, of one of its tile's rows and of one
// of the four words of that row in a group (cdna3_products.h). Every group has a product of its own where it has a scale. The
// four lanes of a row then exchange sums, so that each has the whole sum of one slot, and applies that slot's scale.
//
// Operands of integers are subnormal numbers of bf16 (formats/codes.h). MFMA of CDNA2 took those for zeros; that of CDNA3 should
// not, and the self-test shows it (docs/amd.md).
#pragma once

namespace monotape {

static_assert(kRows == 1, "columns of a second row are those of the second block here");

template <class Codes, class Scales>
struct GroupProducts {
  static constexpr bool kInteger = false, kSides = true, kSlots = Scales::kSlots;
  static constexpr int kSub = 4, kInputs = kSub, kHalves = Scales::kHalves, kInSum = kSub / kHalves;
  static constexpr int kInputExponent = Codes::kInputExponent, kOutputExponent = Codes::kExponent - Codes::kInputExponent;
  static constexpr int kCodeWords = Codes::kExtra;  // before those of scales

  // The block of a lane's sums, and its slot of that.
  static __device__ __forceinline__ int own_side(unsigned lane) { return static_cast<int>(lane % 16 / 8); }
  static __device__ __forceinline__ int own_slot(unsigned lane) {
    return static_cast<int>(kHalves == 1 ? lane % 4 : lane % 2 * 2 + lane % 4 / 2);
  }
  static __device__ __forceinline__ bool takes_group(unsigned lane) { return takes_input(lane) && own_side(lane) == fragment_side(lane); }

  // Words of the lane's codes, of the block that it multiplies; and of its scales, of the block of its sums.
  static __device__ __forceinline__ void read_codes(const uint8_t* block, unsigned lane, uint32_t* out) {
    Codes::read_extra(block, fragment_word(lane), out);
  }
  static __device__ __forceinline__ void read_scales(const uint8_t* block, unsigned lane, uint32_t* out) {
    Scales::read(block + Codes::kBytes, token_row(lane), own_slot(lane), out + kCodeWords);
  }

  // One of a block's sums: of the groups from `half` on, whose activations are `x`.
  static __device__ __forceinline__ float multiplied(const uint4* words, const uint32_t* extra, int half, const TokenInput* x, unsigned lane) {
    return sum_of_groups(lane, [&](float* sums, int g) { multiply_token<false>(sums, Codes::operand(words, extra, half * kInSum + g), x[g]); });
  }
  // The sum of its inputs, as operands of the value 1 give it.
  static __device__ __forceinline__ float total(const TokenInput* x, unsigned lane) {
    constexpr uint32_t kOne = 0x00010001u;
    return sum_of_groups(lane, [&](float* sums, int g) { multiply_token<false>(sums, make_uint4(kOne, kOne, kOne, kOne), x[g]); });
  }
  static __device__ __forceinline__ float scaled(float sum, const uint32_t* extra, int half, float total) {
    const Factors factors = Scales::factors(extra + kCodeWords, half);
    return Scales::kShifts ? factors.scale * sum + factors.shift * total : factors.scale * sum;
  }
  // Of all slots of a row, and of both blocks.
  static __device__ __forceinline__ float whole(float sum) {
    sum = token_whole(sum);
    return sum + lane_across(sum, 8);
  }

 private:
  template <class Multiply>
  static __device__ __forceinline__ float sum_of_groups(unsigned lane, Multiply multiply) {
    float part[kInSum];
    float together[4] = {};
#pragma unroll
    for (int g = 0; g < kInSum; g++) {
      float alone[4] = {};
      multiply(kSlots ? alone : together, g);
      part[g] = kSlots ? token_part(alone, lane) : 0;
    }
    if constexpr (!kSlots) return token_part(together, lane);
    const float first = kept_half(part[0], part[1], lane, 1);
    if constexpr (kHalves == 2) return first;
    return kept_half(first, kept_half(part[kInSum - 2], part[kInSum - 1], lane, 1), lane, 2);
  }
  // Of two sums a lane keeps one and its neighbour the other, each with the part that the other lane has.
  static __device__ __forceinline__ float kept_half(float low, float high, unsigned lane, unsigned neighbour) {
    const bool upper = lane & neighbour;
    return (upper ? high : low) + lane_across(upper ? low : high, static_cast<int>(neighbour));
  }
};

}  // namespace monotape
