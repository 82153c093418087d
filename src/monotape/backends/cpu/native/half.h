// 16-bit floats in plain C++.
#pragma once
#include <cstdint>
#include <cstring>

namespace monotape {

static inline float bits_to_f32(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline uint32_t f32_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
static inline float bf16_to_f32(uint16_t h) { return bits_to_f32(static_cast<uint32_t>(h) << 16); }

static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_f32(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Shifted into place the exponent is 112 too small; a multiplication corrects it and handles subnormals too.
  return bits_to_f32(sign | f32_to_bits(bits_to_f32(magnitude << 13) * 0x1p112f));
}

// Round to nearest even; overflow becomes infinity.
static inline uint16_t f32_to_f16(float f) {
  const uint32_t bits = f32_to_bits(f), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    const uint32_t rounded = f32_to_bits(bits_to_f32(magnitude) + 0.5f) - 0x3f000000u;
    return sign | static_cast<uint16_t>(rounded);
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

}  // namespace monotape
