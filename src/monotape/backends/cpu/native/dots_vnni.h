// Dot products of codes with 16-bit activations by the instructions that multiply 8-bit integers (VNNI).
//
// vpdpbusd multiplies unsigned by signed bytes, four products a lane, and does not saturate. So a 16-bit activation is
// two signed bytes, x = 256 * high + low, and a code, an int8, is taken as 128 more: put_row() takes that off the sum. A
// lane is a row, so that nothing is left to add across lanes. The sums are the same integers as dots_avx2.h has.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace monotape::MONOTAPE_ISA {

// A pair of registers of codes: pairs.h.
using bytes32 = __m256i;
static inline bytes32 joined(bytes16 low, bytes16 high) { return _mm256_set_m128i(high, low); }
static inline bytes32 load_pair(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline void store_pair(int8_t* p, bytes32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
static inline bytes32 masked(bytes32 a, uint8_t mask) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask))); }
static inline bytes32 load_nibbles(const uint8_t* p) {
  const __m256i twice = _mm256_broadcastsi128_si256(load_bytes(p));
  return masked(_mm256_sllv_epi32(twice, _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0)), 0xf0);
}

template <int Group>
struct InputBlock {
  int8_t high[Group], low[Group];
  float scale;      // divided by 2^shift
  float sum;        // of the values as they are
  int32_t initial;  // of a sum of products: what codes lack, less what they have too much
  float unused;
};

// `shift` and `lacks`: input_words.h.
template <int Group>
static inline void put_row(const int16_t* x, float scale, int shift, int lacks, InputBlock<Group>& block) {
  int32_t sum = 0;
  for (int i = 0; i < Group; i++) {
    const int high = (x[i] + 128) >> 8;
    block.high[i] = static_cast<int8_t>(high);
    block.low[i] = static_cast<int8_t>(x[i] - 256 * high);
    sum += x[i];
  }
  block.scale = scale / static_cast<float>(1 << shift);
  block.sum = scale * static_cast<float>(sum);
  block.initial = (lacks - 128) * sum;
}

static inline __m256i four_in_each_lane(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Of 8 rows with a group of activations; step<I>() takes pair I of each_pair().
template <int Group>
struct Dots {
  __m256i high, low;

  void begin(const InputBlock<Group>& x) {
    high = _mm256_setzero_si256();
    low = _mm256_set1_epi32(x.initial);
  }
  template <int I>
  inline __attribute__((always_inline)) void step(bytes32 codes, const InputBlock<Group>& x) {
    const __m256i more = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    high = MONOTAPE_VNNI(high, more, four_in_each_lane(x.high + 4 * I));
    low = MONOTAPE_VNNI(low, more, four_in_each_lane(x.low + 4 * I));
  }
  f32x8 total(const InputBlock<Group>& x) const {
    const __m256i rows = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
    return mul({_mm256_cvtepi32_ps(rows)}, broadcast(x.scale));
  }
};

}  // namespace monotape::MONOTAPE_ISA
