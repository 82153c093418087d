// Eight float lanes as two NEON registers. Needs the dot-product instructions of Armv8.2 (2018 and later).
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace monotape::MONOTAPE_ISA {

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

// 32 activations as 16-bit integers, x = 256 * high + low with both in int8 range, and their scale. Two 8-bit dot
// products then give the exact 16-bit one.
struct Q8Block {
  int8_t high[32], low[32];
  float scale;
  float unused[3];
};
static inline void put_row(const int16_t* x, float scale, Q8Block& block) {
  for (int i = 0; i < 32; i += 8) {
    vst1_s8(block.high + i, vrshrn_n_s16(vld1q_s16(x + i), 8));
    vst1_s8(block.low + i, vmovn_s16(vld1q_s16(x + i)));
  }
  block.scale = scale;
}

template <int J>
static inline void q8_quad(const int8_t* w, int8x16_t high, int8x16_t low, int32x4_t* acc) {
  const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
  acc[0] = vdotq_laneq_s32(acc[0], w0, high, J);
  acc[1] = vdotq_laneq_s32(acc[1], w1, high, J);
  acc[2] = vdotq_laneq_s32(acc[2], w0, low, J);
  acc[3] = vdotq_laneq_s32(acc[3], w1, low, J);
}

// Integer dot products of a block of 8 rows ([k / 4][row][4] int8) with the same block of an activation row.
static inline f32x8 q8_block(const int8_t* w, const Q8Block& x) {
  int32x4_t acc[4];
  for (int i = 0; i < 4; i++) acc[i] = vdupq_n_s32(0);
  for (int half = 0; half < 2; half++) {
    const int8x16_t high = vld1q_s8(x.high + 16 * half), low = vld1q_s8(x.low + 16 * half);
    q8_quad<0>(w + 128 * half, high, low, acc);
    q8_quad<1>(w + 128 * half + 32, high, low, acc);
    q8_quad<2>(w + 128 * half + 64, high, low, acc);
    q8_quad<3>(w + 128 * half + 96, high, low, acc);
  }
  return {vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(acc[0], 8), acc[2])),
          vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(acc[1], 8), acc[3]))};
}

}  // namespace monotape::MONOTAPE_ISA

#include "panel_neon.h"
