// Eight float lanes as one AVX2 register. Needs AVX2, FMA and F16C (2013 and later).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace monotape::MONOTAPE_ISA {

struct f32x8 {
  __m256 v;
};

static inline f32x8 broadcast(float x) { return {_mm256_set1_ps(x)}; }
static inline f32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline __m128i load_halves(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline f32x8 load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_halves(p))}; }
static inline f32x8 load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16))};
}
static inline void store(float* p, f32x8 a) { _mm256_storeu_ps(p, a.v); }
static inline f32x8 add(f32x8 a, f32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline f32x8 sub(f32x8 a, f32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline f32x8 mul(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline f32x8 div(f32x8 a, f32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline f32x8 max(f32x8 a, f32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline f32x8 min(f32x8 a, f32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// a * 2^n, where n is the lowest bits of b and the result is a normal number
static inline f32x8 add_to_exponent(f32x8 a, f32x8 b) {
  const __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(b.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), exponents))};
}
static inline float sum(f32x8 a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float peak(f32x8 a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The sums of four, side by side.
static inline void store_sums(f32x8 a, f32x8 b, f32x8 c, f32x8 d, float* out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

// Four factors side by side; broadcasting one of them from memory costs no more than loading it.
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
  const __m256i wide = _mm256_cvtps_epi32(a.v);
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow);
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

// Integer dot products of a block of 8 rows with the same block of R activation rows. Rows 0-3 and 4-7 of four k
// values widen to 16 bits; a pairwise multiply-add leaves two partial sums a row.
template <int R>
static inline void q8_block(const int8_t* w, const Q8Block* x, f32x8* dots) {
  __m256i low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = _mm256_setzero_si256();
  for (int k4 = 0; k4 < 8; k4++) {
    const __m128i* quad = reinterpret_cast<const __m128i*>(w + 32 * k4);
    const __m256i rows_low = _mm256_cvtepi8_epi16(_mm_loadu_si128(quad));
    const __m256i rows_high = _mm256_cvtepi8_epi16(_mm_loadu_si128(quad + 1));
    for (int r = 0; r < R; r++) {
      long long four;
      std::memcpy(&four, x[r].x + 4 * k4, 8);
      const __m256i values = _mm256_set1_epi64x(four);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(rows_low, values));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(rows_high, values));
    }
  }
  for (int r = 0; r < R; r++) {
    const __m256i pairs = _mm256_hadd_epi32(low[r], high[r]);  // rows 0 1 4 5 | 2 3 6 7
    dots[r] = {_mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0xd8))};
  }
}

}  // namespace monotape::MONOTAPE_ISA

#include "panel_rows.h"
