// Eight float lanes in plain C++, for machines whose instructions we do not know. The compiler vectorises what it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace monotape::MONOTAPE_ISA {

struct f32x8 {
  float v[8];
};

template <class Op>
static inline f32x8 lanes(Op op) {
  f32x8 r;
  for (int i = 0; i < 8; i++) r.v[i] = op(i);
  return r;
}
static inline f32x8 broadcast(float x) { return lanes([&](int) { return x; }); }
static inline f32x8 load(const float* p) { return lanes([&](int i) { return p[i]; }); }
static inline f32x8 load_f16(const uint16_t* p) { return lanes([&](int i) { return f16_to_f32(p[i]); }); }
static inline f32x8 load_bf16(const uint16_t* p) { return lanes([&](int i) { return bf16_to_f32(p[i]); }); }
static inline void store(float* p, f32x8 a) { std::memcpy(p, a.v, sizeof a.v); }
static inline f32x8 add(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
static inline f32x8 sub(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
static inline f32x8 mul(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
static inline f32x8 div(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
static inline f32x8 max(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline f32x8 min(f32x8 a, f32x8 b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
// a * 2^n, where n is the lowest bits of b and the result is a normal number
static inline f32x8 add_to_exponent(f32x8 a, f32x8 b) {
  return lanes([&](int i) { return bits_to_f32(f32_to_bits(a.v[i]) + (f32_to_bits(b.v[i]) << 23)); });
}
static inline float sum(f32x8 a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
static inline float peak(f32x8 a) {
  float m = a.v[0];
  for (int i = 1; i < 8; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

// The sums of four, side by side.
static inline void store_sums(f32x8 a, f32x8 b, f32x8 c, f32x8 d, float* out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

struct Factors {
  const float* p;
};
static inline Factors load_factors(const float* p) { return {p}; }
template <int I>
static inline f32x8 fma_by(f32x8 a, Factors b, f32x8 c) {
  return fma(a, broadcast(b.p[I]), c);
}

// Rounds eight values between -2^15 and 2^15.
static inline void store_integers(int16_t* p, f32x8 a) {
  for (int i = 0; i < 8; i++) p[i] = static_cast<int16_t>(std::nearbyint(a.v[i]));
}

// 32 activations as 16-bit integers and their scale.
struct Q8Block {
  int16_t x[32];
  float scale;
  float unused[3];
};
static inline void put_row(const int16_t* x, float scale, Q8Block& block) {
  std::memcpy(block.x, x, sizeof block.x);
  block.scale = scale;
}

// Integer dot products of a block of 8 rows ([k / 4][row][4] int8) with the same block of R activation rows.
template <int R>
static inline void q8_block(const int8_t* w, const Q8Block* x, f32x8* dots) {
  for (int r = 0; r < R; r++) {
    int32_t acc[8] = {};
    for (int k4 = 0; k4 < 8; k4++)
      for (int row = 0; row < 8; row++)
        for (int j = 0; j < 4; j++) acc[row] += w[k4 * 32 + row * 4 + j] * x[r].x[k4 * 4 + j];
    dots[r] = lanes([&](int i) { return static_cast<float>(acc[i]); });
  }
}

}  // namespace monotape::MONOTAPE_ISA

#include "panel_rows.h"
