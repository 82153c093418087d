// Eight float lanes as one AVX2 register. Needs AVX2, FMA and F16C (2013 and later).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace monotape::MONOTAPE_ISA {

// The processor's own prefetchers stop at the end of a page, so a tape is prefetched a page ahead.
constexpr int kPrefetchAhead = 4096;

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

// Eight int8 with 128 added to them, as floats.
static inline f32x8 load_int8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(128)))};
}

// Sixteen bytes of codes: codes_impl.h. There are no shifts of bytes, so those of 16 bits are masked.
using bytes16 = __m128i;
static inline bytes16 load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline void store_bytes(int8_t* p, bytes16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
static inline bytes16 masked(bytes16 a, uint8_t mask) { return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(mask))); }
template <int N>
static inline bytes16 shifted(bytes16 a) {
  return masked(_mm_slli_epi16(a, N), static_cast<uint8_t>(0xff << N));
}
// Bits N and above are those of `high`, shifted there; the others stay.
template <int N>
static inline bytes16 inserted(bytes16 low, bytes16 high) {
  return _mm_or_si128(masked(low, (1 << N) - 1), shifted<N>(high));
}
static inline bytes16 upper_halves(bytes16 a) { return masked(_mm_srli_epi16(a, 4), 0x0f); }
// Twice the value of each e2m1 code, an int8.
static inline bytes16 doubled_e2m1(bytes16 codes) {
  return _mm_shuffle_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), codes);
}

}  // namespace monotape::MONOTAPE_ISA

#ifdef MONOTAPE_VNNI
#include "dots_vnni.h"
#else
#include "dots_avx2.h"
#endif
#include "panel_rows.h"
