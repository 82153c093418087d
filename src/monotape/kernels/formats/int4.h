// INT4 weights: q - z times a scale for each group of a row, as stored; z is 8 where a format has no zero points.
//
// A block has 128 values of k, a word of 32 bits a lane and group of 32: nibbles n and n + 4 are values 2 n and 2 n + 1 of
// the lane's eight. With 0x43 above it a nibble is the bf16 128 + q, exactly, so a product adds 128 + z times the sum of its
// inputs too much, which is taken off. After the values come the scales, fp16, each row's together; each with its zero point,
// also fp16, where there are any. The stage's row scales hold a power of two that brought all scales into fp16's range.
#pragma once

namespace monotape {

template <int Group, bool Zeros>
struct StoredInt4 {
  static constexpr bool kFloat16 = false, kAsMultiplied = false;
  static constexpr int kSub = 4, kInputExponent = 0, kOutputExponent = 0;
  static constexpr int kGroups = kSub * kBlockK / Group, kInGroup = Group / kBlockK;  // groups of a block, words of a group
  static constexpr int kScaleHalves = kGroups * (Zeros ? 2 : 1), kScales = divide_up(kScaleHalves, 2);
  static constexpr int kValueBytes = kTileRows * kBlockK * 2, kBlockBytes = kValueBytes + kTileRows * kScaleHalves * 2;

  static __device__ __forceinline__ uint32_t pair(uint32_t eight, int number) {
    return (eight >> 4 * number & 0x000f000fu) | 0x43004300u;
  }
  static __device__ __forceinline__ uint4 operand(uint32_t eight) {
    return make_uint4(pair(eight, 0), pair(eight, 1), pair(eight, 2), pair(eight, 3));
  }
  static __device__ __forceinline__ uint32_t word_of(uint4 words, int group) {
    return group == 0 ? words.x : group == 1 ? words.y : group == 2 ? words.z : words.w;
  }
  // A row's scales: `strip` is where those of a block begin.
  static __device__ __forceinline__ void read_scales(const uint8_t* strip, int row, uint32_t* out) {
    const uint8_t* own = strip + row * kScaleHalves * 2;
    if constexpr (kScaleHalves == 1) {
      out[0] = *reinterpret_cast<const uint16_t*>(own);
    } else {
#pragma unroll
      for (int i = 0; i < kScales; i++) out[i] = reinterpret_cast<const uint32_t*>(own)[i];
    }
  }
  static __device__ __forceinline__ float half_at(const uint32_t* scales, int number) {
    return number % 2 ? high_half<true>(scales[number / 2]) : low_half<true>(scales[number / 2]);
  }
  static __device__ __forceinline__ float scale(const uint32_t* scales, int group) { return half_at(scales, Zeros ? 2 * group : group); }
  static __device__ __forceinline__ float zero(const uint32_t* scales, int group) { return Zeros ? half_at(scales, 2 * group + 1) : 8; }

  // Adds a block's part of a row's product.
  static __device__ __forceinline__ void add(float& y, uint4 words, const uint32_t* scales, const uint2* x, const float* totals) {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      float sums[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kInGroup; i++) {
        const int at = g * kInGroup + i;
        const uint4 w = operand(word_of(words, at));
        multiply_accumulate<false>(sums, w.x, w.y, w.z, w.w, x[at].x, x[at].y);
      }
      y += scale(scales, g) * (sums[0] + sums[3] - (128 + zero(scales, g)) * totals[g]);
    }
  }
  static __device__ __forceinline__ void eight_values(const uint8_t* block, int lane, int group, float (&out)[8]) {
    uint32_t scales[kScales];
    read_scales(block + kValueBytes, fragment_row(lane), scales);
    unpack8<false>(operand(reinterpret_cast<const uint32_t*>(block)[lane * 4 + group]), out);
    const int g = group / kInGroup;
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = (out[i] - (128 + zero(scales, g))) * scale(scales, g);
  }
  static __device__ __forceinline__ uint4 row_operand(const uint8_t* block, int lane, int group) {
    float value[8];
    eight_values(block, lane, group, value);
    return pack8<false>(value);
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    eight_values(block, row * 4 + k % kBlockK / 8, k / kBlockK, out);
  }
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    float eight[8];
    values(block, row, k, eight);
    return eight[k % 8];
  }
};

}  // namespace monotape
