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
static inline f32x8 round(f32x8 a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
static inline float32x4_t power_of_two(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline f32x8 power_of_two(f32x8 n) { return {power_of_two(n.lo), power_of_two(n.hi)}; }
static inline float sum(f32x8 a) { return vaddvq_f32(vaddq_f32(a.lo, a.hi)); }
static inline float peak(f32x8 a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }

// 32 activations as 16-bit integers, x = 256 * high + low with both in int8 range, and their scale. Two 8-bit dot
// products then give the exact 16-bit one.
struct Q8Block {
  int8_t high[32], low[32];
  float scale;
  float unused[3];
};
static inline void split_integers(const int16_t* x, Q8Block& block) {
  for (int i = 0; i < 32; i++) {
    const int high = (x[i] + 128) >> 8;
    block.high[i] = static_cast<int8_t>(high);
    block.low[i] = static_cast<int8_t>(x[i] - high * 256);
  }
}

template <int R, int J>
static inline void q8_quad(const int8_t* w, const int8x16_t* high, const int8x16_t* low, int32x4_t (*acc)[4]) {
  const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
  for (int r = 0; r < R; r++) {
    acc[r][0] = vdotq_laneq_s32(acc[r][0], w0, high[r], J);
    acc[r][1] = vdotq_laneq_s32(acc[r][1], w1, high[r], J);
    acc[r][2] = vdotq_laneq_s32(acc[r][2], w0, low[r], J);
    acc[r][3] = vdotq_laneq_s32(acc[r][3], w1, low[r], J);
  }
}

template <int R>
static inline void q8_block(const int8_t* w, const Q8Block* const* x, f32x8* dots) {
  int32x4_t acc[R][4];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) acc[r][i] = vdupq_n_s32(0);
  for (int half = 0; half < 2; half++) {
    int8x16_t high[R], low[R];
    for (int r = 0; r < R; r++) {
      high[r] = vld1q_s8(x[r]->high + 16 * half);
      low[r] = vld1q_s8(x[r]->low + 16 * half);
    }
    q8_quad<R, 0>(w + 128 * half, high, low, acc);
    q8_quad<R, 1>(w + 128 * half + 32, high, low, acc);
    q8_quad<R, 2>(w + 128 * half + 64, high, low, acc);
    q8_quad<R, 3>(w + 128 * half + 96, high, low, acc);
  }
  for (int r = 0; r < R; r++)
    dots[r] = {vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(acc[r][0], 8), acc[r][2])),
               vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(acc[r][1], 8), acc[r][3]))};
}

}  // namespace monotape::MONOTAPE_ISA
