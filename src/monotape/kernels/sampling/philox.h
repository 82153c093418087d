// The noise of a token: Philox4x32-10 (Salmon et al., 2011) of the seed, the token's id and its position, made Gumbel.
//
// Needs the integer types of machine/hopper.h, but nothing of the GPU: tests compile this file for the host.
#pragma once

namespace monotape {

// The random word of a token: lane id % 4 of the counter (id / 4, position, 0, 0).
__device__ inline uint32_t token_word(uint64_t seed, uint32_t id, uint32_t position) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = id / 4, c1 = position, c2 = 0, c3 = 0;
#pragma unroll 1
  for (int round = 0; round < 10; round++) {
    const uint64_t first = 0xD2511F53ull * c0, second = 0xCD9E8D57ull * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint32_t lane = id % 4;
  return lane < 2 ? (lane ? c1 : c0) : (lane == 2 ? c2 : c3);
}

// -log(-log1p(-u)) for a u in (0, 1) made of 32 bits. Logarithms in double, each rounded once, as the reference has it.
__device__ inline float gumbel(uint32_t bits) {
  const float most = 1.0f - 5.9604644775390625e-8f;  // 2^-24 below 1: the logarithm stays finite
  float u = static_cast<float>((bits + 0.5) * 2.3283064365386962890625e-10);
  if (u > most) u = most;
  const float exponential = static_cast<float>(-log1p(-static_cast<double>(u)));
  return static_cast<float>(-log(static_cast<double>(exponential)));
}

}  // namespace monotape
