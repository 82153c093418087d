// FP8 weights (e4m3) with a scale for each row, which the stage's epilogue applies.
//
// A value's exponent and mantissa, put at bits 10 to 4 of a bf16 with the sign at bit 15, are the value times 2^-120,
// subnormals included. Packing has arranged the bits of two values in each 16 so that the first needs one mask: sign 15,
// exponent and mantissa 10 to 4. Of the second, bits 14 to 12 are the upper three bits of the exponent, bit 11 is the sign, and
// bits 3 to 0 are the rest. Activations are multiplied by 2^64, so that no product is too small for a float32.
#pragma once

namespace monotape {

struct StoredFp8 {
  static constexpr bool kFloat16 = false, kAsMultiplied = false;
  static constexpr int kSub = 2, kBlockBytes = kTileRows * kBlockK * 2, kInputExponent = 64, kScales = 0, kGroups = 1;
  static constexpr float kUnit = 0x1p-120f;  // what an operand of the value 1 is
  static constexpr int kOutputExponent = 120 - kInputExponent;

  static __device__ __forceinline__ uint32_t first(uint32_t four) { return four & 0x87f087f0u; }
  static __device__ __forceinline__ uint32_t second(uint32_t four) {
    return (four << 4 & 0x80f080f0u) | (four >> 4 & 0x07000700u);
  }
  static __device__ __forceinline__ uint4 operand(uint2 eight) {
    return make_uint4(first(eight.x), second(eight.x), first(eight.y), second(eight.y));
  }
  static __device__ __forceinline__ uint4 operand(uint4 words, int group) {
    return operand(group ? make_uint2(words.z, words.w) : make_uint2(words.x, words.y));
  }
  // A lane's operand of a group for products of rows, whose activations are as they are.
  static __device__ __forceinline__ uint4 row_operand(const uint8_t* block, int lane, int group) {
    const uint4 w = operand(reinterpret_cast<const uint2*>(block)[lane * 2 + group]);
    return make_uint4(scaled_pair(w.x, 1 / kUnit), scaled_pair(w.y, 1 / kUnit), scaled_pair(w.z, 1 / kUnit), scaled_pair(w.w, 1 / kUnit));
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    unpack8<false>(row_operand(block, row * 4 + k % kBlockK / 8, k / kBlockK), out);
  }
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    float eight[8];
    values(block, row, k, eight);
    return eight[k % 8];
  }
};

}  // namespace monotape
