// Dot products of codes with 16-bit activations by AVX2's multiplication of 16-bit integers.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "input_words.h"
#include "pairs.h"

namespace monotape::MONOTAPE_ISA {

// Of 8 rows with a group of activations; step<I>() takes pair I of each_pair(). Codes widen to 16 bits; a pairwise
// multiply-add leaves two partial sums a row.
template <int Group>
struct Dots {
  __m256i low, high;

  void begin(const InputBlock<Group>&) { low = high = _mm256_setzero_si256(); }
  template <int I>
  inline __attribute__((always_inline)) void step(bytes32 codes, const InputBlock<Group>& x) {
    long long four;
    std::memcpy(&four, x.x + I * 4, 8);
    const __m256i values = _mm256_set1_epi64x(four);
    low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepi8_epi16(codes.low), values));
    high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepi8_epi16(codes.high), values));
  }
  f32x8 total(const InputBlock<Group>& x) const {
    const __m256i pairs = _mm256_hadd_epi32(low, high);  // rows 0 1 4 5 | 2 3 6 7
    const __m256i rows = _mm256_add_epi32(_mm256_permute4x64_epi64(pairs, 0xd8), _mm256_set1_epi32(x.initial));
    return mul({_mm256_cvtepi32_ps(rows)}, broadcast(x.scale));
  }
};

}  // namespace monotape::MONOTAPE_ISA
