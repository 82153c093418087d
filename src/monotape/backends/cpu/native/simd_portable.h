// Eight float lanes in plain C++, for machines whose instructions we do not know. The compiler vectorises what it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace monotape::MONOTAPE_ISA {

constexpr int kPrefetchAhead = 0;  // none: the processor does it

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

// Eight int8 with 128 added to them, as floats.
static inline f32x8 load_int8(const uint8_t* p) { return lanes([&](int i) { return static_cast<float>(p[i] - 128); }); }

// Sixteen bytes of codes, as two words: codes_impl.h.
struct bytes16 {
  uint64_t v[2];
};
static inline uint64_t each_byte(uint8_t value) { return value * 0x0101010101010101u; }
static inline bytes16 load_bytes(const uint8_t* p) {
  bytes16 r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
static inline void store_bytes(int8_t* p, bytes16 a) { std::memcpy(p, a.v, sizeof a.v); }
static inline bytes16 masked(bytes16 a, uint8_t mask) { return {{a.v[0] & each_byte(mask), a.v[1] & each_byte(mask)}}; }
template <int N>
static inline bytes16 shifted(bytes16 a) {
  return masked({{a.v[0] << N, a.v[1] << N}}, static_cast<uint8_t>(0xff << N));
}
static inline bytes16 upper_halves(bytes16 a) { return masked({{a.v[0] >> 4, a.v[1] >> 4}}, 0x0f); }
// Twice the value of each e2m1 code, an int8.
static inline bytes16 doubled_e2m1(bytes16 codes) {
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  uint8_t bytes[16];
  std::memcpy(bytes, &codes, 16);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(kValues[byte]);
  std::memcpy(&codes, bytes, 16);
  return codes;
}
// Bits N and above are those of `high`, shifted there; the others stay.
template <int N>
static inline bytes16 inserted(bytes16 low, bytes16 high) {
  const bytes16 a = masked(low, (1 << N) - 1), b = shifted<N>(high);
  return {{a.v[0] | b.v[0], a.v[1] | b.v[1]}};
}

}  // namespace monotape::MONOTAPE_ISA

#include "input_words.h"
#include "pairs.h"

namespace monotape::MONOTAPE_ISA {

// Of four rows, four values of k each. A function of its own, because written out at each of its many places it takes
// compilers minutes.
static __attribute__((noinline)) void add_products(bytes16 codes, const int16_t* x, int32_t* sums) {
  int8_t w[16];
  store_bytes(w, codes);
  for (int row = 0; row < 4; row++)
    for (int j = 0; j < 4; j++) sums[row] += w[4 * row + j] * x[j];
}

// Dot products of 8 rows with a group of activations; step<I>() takes pair I of each_pair().
template <int Group>
struct Dots {
  int32_t sums[8];

  void begin(const InputBlock<Group>& x) {
    for (int32_t& sum : sums) sum = x.initial;
  }
  template <int I>
  void step(bytes32 codes, const InputBlock<Group>& x) {
    add_products(codes.low, x.x + I * 4, sums);
    add_products(codes.high, x.x + I * 4, sums + 4);
  }
  f32x8 total(const InputBlock<Group>& x) const {
    return lanes([&](int i) { return static_cast<float>(sums[i]) * x.scale; });
  }
};

}  // namespace monotape::MONOTAPE_ISA

#include "panel_rows.h"
