// Activations of a group as 16-bit integers, for instruction sets that multiply those.
#pragma once
#include <cstdint>
#include <cstring>

namespace monotape::MONOTAPE_ISA {

template <int Group>
struct InputBlock {
  int16_t x[Group];
  float scale;      // divided by 2^shift
  float sum;        // of the values as they are
  int32_t initial;  // of a sum of products: what codes lack
  float unused;
};

// `shift`: codes are in the highest bits of their bytes, so products are too large by 2^shift. `lacks`: what all of them
// lack, a centre, times 2^shift.
template <int Group>
static inline void put_row(const int16_t* x, float scale, int shift, int lacks, InputBlock<Group>& block) {
  int32_t sum = 0;
  for (int i = 0; i < Group; i++) sum += x[i];
  std::memcpy(block.x, x, sizeof block.x);
  block.scale = scale / static_cast<float>(1 << shift);
  block.sum = scale * static_cast<float>(sum);
  block.initial = lacks * sum;
}

}  // namespace monotape::MONOTAPE_ISA
