// Eight float lanes as two NEON registers. Needs the dot-product instructions of Armv8.2 (2018 and later).
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace monotape::MONOTAPE_ISA {

constexpr int kPrefetchAhead = 0;  // none: the processor does it

struct f32x8 {
  float32x4_t lo, hi;
};

static inline f32x8 broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline f32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline f32x8 load_f16(const uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
static inline f32x8 load_bf16(const uint16_t* p) {
  const uint16x8_t h = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
static inline void store(float* p, f32x8 a) {
  vst1q_f32(p, a.lo);
  vst1q_f32(p + 4, a.hi);
}
static inline f32x8 add(f32x8 a, f32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
static inline f32x8 sub(f32x8 a, f32x8 b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
static inline f32x8 mul(f32x8 a, f32x8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
static inline f32x8 div(f32x8 a, f32x8 b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
static inline f32x8 max(f32x8 a, f32x8 b) { return {vmaxq_f32(a.lo, b.lo), vmaxq_f32(a.hi, b.hi)}; }
static inline f32x8 min(f32x8 a, f32x8 b) { return {vminq_f32(a.lo, b.lo), vminq_f32(a.hi, b.hi)}; }
static inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
  return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
}
// a * 2^n, where n is the lowest bits of b and the result is a normal number
static inline float32x4_t add_to_exponent(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vreinterpretq_s32_f32(b), 23)));
}
static inline f32x8 add_to_exponent(f32x8 a, f32x8 b) { return {add_to_exponent(a.lo, b.lo), add_to_exponent(a.hi, b.hi)}; }
static inline float sum(f32x8 a) { return vaddvq_f32(vaddq_f32(a.lo, a.hi)); }
static inline float peak(f32x8 a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }

// The sums of four, side by side; the additions are those of sum().
static inline float32x4_t half_sum(f32x8 a) { return vaddq_f32(a.lo, a.hi); }
static inline void store_sums(f32x8 a, f32x8 b, f32x8 c, f32x8 d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(half_sum(a), half_sum(b)), vpaddq_f32(half_sum(c), half_sum(d))));
}

// Four factors side by side: a multiply-add takes one of them, so that nothing is broadcast.
struct Factors {
  float32x4_t v;
};
static inline Factors load_factors(const float* p) { return {vld1q_f32(p)}; }
template <int I>
static inline f32x8 fma_by(f32x8 a, Factors b, f32x8 c) {
  return {vfmaq_laneq_f32(c.lo, a.lo, b.v, I), vfmaq_laneq_f32(c.hi, a.hi, b.v, I)};
}

// Rounds eight values between -2^15 and 2^15: added to 1.5 * 2^23 a value has its integer in the lowest bits.
static inline void store_integers(int16_t* p, f32x8 a) {
  const float32x4_t offset = vdupq_n_f32(12582912.0f);
  const int32x4_t lo = vreinterpretq_s32_f32(vaddq_f32(a.lo, offset)), hi = vreinterpretq_s32_f32(vaddq_f32(a.hi, offset));
  vst1q_s16(p, vcombine_s16(vmovn_s32(lo), vmovn_s32(hi)));
}

// Eight int8 with 128 added to them, as floats. A conversion blocks a pipe for two cycles; instead a byte becomes the
// lowest bits of the float 2^23, which then is 2^23 + byte.
static inline f32x8 load_int8(const uint8_t* p) {
  const uint16x8_t low = vmovl_u8(vld1_u8(p)), high = vdupq_n_u16(0x4b00);
  const float32x4_t offset = vdupq_n_f32(8388608.0f + 128.0f);
  return {vsubq_f32(vreinterpretq_f32_u16(vzip1q_u16(low, high)), offset),
          vsubq_f32(vreinterpretq_f32_u16(vzip2q_u16(low, high)), offset)};
}

// Sixteen bytes of codes: codes_impl.h.
using bytes16 = uint8x16_t;
static inline bytes16 load_bytes(const uint8_t* p) { return vld1q_u8(p); }
static inline void store_bytes(int8_t* p, bytes16 a) { vst1q_u8(reinterpret_cast<uint8_t*>(p), a); }
static inline bytes16 masked(bytes16 a, uint8_t mask) { return vandq_u8(a, vdupq_n_u8(mask)); }
template <int N>
static inline bytes16 shifted(bytes16 a) {
  return vshlq_n_u8(a, N);
}
// Bits N and above are those of `high`, shifted there; the others stay.
template <int N>
static inline bytes16 inserted(bytes16 low, bytes16 high) {
  return vsliq_n_u8(low, high, N);
}
static inline bytes16 upper_halves(bytes16 a) { return vshrq_n_u8(a, 4); }
// Twice the value of each e2m1 code, an int8.
static inline bytes16 doubled_e2m1(bytes16 codes) {
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(kValues), codes));
}

// A sum of products of 8-bit integers starts as the bits of this instead of 0. It stays below 2^22, so its bits then are
// the float kSumOffset + sum, and converting it (two cycles an instruction) is not needed.
constexpr float kSumOffset = 12582912.0f;  // 1.5 * 2^23

// Activations of a group as 16-bit integers, x = 256 * high + low with both in int8 range: two 8-bit dot products give
// the exact 16-bit one.
template <int Group>
struct InputBlock {
  int8_t high[Group], low[Group];
  float factors[4];                // 256 * scale, scale, the sum of the values as they are
  float offset[4];                 // takes kSumOffset off both sums, four times
  int32_t initial[2][4];           // sums of high and of low products: the bits of kSumOffset, plus what codes lack
};

// `shift`: codes are in the highest bits of their bytes, so products are too large by 2^shift. `lacks`: what all of them
// lack, a centre, times 2^shift.
template <int Group>
static inline void put_row(const int16_t* x, float scale, int shift, int lacks, InputBlock<Group>& block) {
  int32_t highs = 0, lows = 0;
  for (int i = 0; i < Group; i += 8) {
    const int8x8_t high = vrshrn_n_s16(vld1q_s16(x + i), 8), low = vmovn_s16(vld1q_s16(x + i));
    vst1_s8(block.high + i, high);
    vst1_s8(block.low + i, low);
    highs += vaddlv_s8(high);
    lows += vaddlv_s8(low);
  }
  const float unit = scale / static_cast<float>(1 << shift);
  block.factors[0] = 256 * unit;
  block.factors[1] = unit;
  block.factors[2] = scale * static_cast<float>(256 * highs + lows);
  block.factors[3] = 0;
  vst1q_f32(block.offset, vdupq_n_f32(-257 * kSumOffset * unit));
  const int32_t start = vgetq_lane_s32(vreinterpretq_s32_f32(vdupq_n_f32(kSumOffset)), 0);
  vst1q_s32(block.initial[0], vdupq_n_s32(start + lacks * highs));
  vst1q_s32(block.initial[1], vdupq_n_s32(start + lacks * lows));
}

template <int Group>
static inline f32x8 add_sum_by(const InputBlock<Group>& x, f32x8 minima, f32x8 y) {
  const float32x4_t factors = vld1q_f32(x.factors);
  return {vfmaq_laneq_f32(y.lo, minima.lo, factors, 2), vfmaq_laneq_f32(y.hi, minima.hi, factors, 2)};
}

}  // namespace monotape::MONOTAPE_ISA

#include "pairs.h"
#include "dots_neon.h"
#include "panel_neon.h"
