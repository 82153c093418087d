#include "gguf_row.h"

#include <cstring>

#include "../../cpu/native/half.h"

namespace monotape {
namespace {

uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return half;
}
bool finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

void low_then_high(const uint8_t* packed, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = packed[i] & 15, codes[count + i] = packed[i] >> 4;
}

// Scales and minima of eight groups in 12 bytes, six bits each; each is for two groups of 16.
void six_bits(const uint8_t* packed, int8_t* s, int8_t* m) {
  for (int j = 0; j < 8; j++) {
    const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
    const int minimum = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    s[2 * j] = s[2 * j + 1] = static_cast<int8_t>(scale);
    m[2 * j] = m[2 * j + 1] = static_cast<int8_t>(minimum);
  }
}

void q4_k(const uint8_t* block, uint8_t* codes, int8_t* s, int8_t* m) {
  six_bits(block + 4, s, m);
  for (int i = 0; i < 4; i++) low_then_high(block + 16 + 32 * i, 32, codes + 64 * i);
}

void q5_k(const uint8_t* block, uint8_t* codes, int8_t* s, int8_t* m) {
  six_bits(block + 4, s, m);
  for (int i = 0; i < 4; i++) low_then_high(block + 48 + 32 * i, 32, codes + 64 * i);
  for (int group = 0; group < 8; group++)
    for (int i = 0; i < 32; i++) codes[32 * group + i] |= static_cast<uint8_t>((block[16 + i] >> group & 1) << 4);
}

void q6_k(const uint8_t* block, uint8_t* codes, int8_t* s, int8_t* m) {
  std::memcpy(s, block + 192, 16);
  std::memcpy(m, block + 192, 16);
  for (int half = 0; half < 2; half++) {
    uint8_t* out = codes + 128 * half;
    low_then_high(block + 64 * half, 64, out);
    for (int quarter = 0; quarter < 4; quarter++)
      for (int i = 0; i < 32; i++)
        out[32 * quarter + i] |= static_cast<uint8_t>((block[128 + 32 * half + i] >> 2 * quarter & 3) << 4);
  }
}

}  // namespace

bool GgufRow::read(Kind kind, const uint8_t* blocks, int64_t count) {
  const int values = block_values(kind), bytes = block_bytes_of(kind);
  codes.resize(count * values);
  d.resize(count);
  e.resize(count);
  exponents.resize(count);
  if (is_k(kind)) s.resize(16 * count), m.resize(16 * count);
  bool good = true;
  for (int64_t b = 0; b < count; b++, blocks += bytes) {
    uint8_t* out = codes.data() + b * values;
    int8_t *scales = s.data() + 16 * b, *minima = m.data() + 16 * b;
    switch (kind) {
      case Kind::q4_0: low_then_high(blocks + 2, 16, out); break;
      case Kind::q4_1: low_then_high(blocks + 4, 16, out); break;
      case Kind::q5_0: {
        uint32_t fifth;
        std::memcpy(&fifth, blocks + 2, 4);
        low_then_high(blocks + 6, 16, out);
        for (int i = 0; i < 32; i++) out[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
        break;
      }
      case Kind::q8_0:
        for (int i = 0; i < 32; i++) out[i] = blocks[2 + i] ^ 0x80;
        break;
      case Kind::mxfp4: low_then_high(blocks + 1, 16, out); break;
      case Kind::q4_k: q4_k(blocks, out, scales, minima); break;
      case Kind::q5_k: q5_k(blocks, out, scales, minima); break;
      default: q6_k(blocks, out, scales, minima);
    }
    if (kind == Kind::mxfp4) {
      exponents[b] = blocks[0];
      good &= blocks[0] != 255;
      continue;
    }
    d[b] = half_at(blocks + (kind == Kind::q6_k ? 208 : 0));
    e[b] = kind == Kind::q6_k ? f32_to_f16(32 * f16_to_f32(d[b]))
                              : kind == Kind::q4_1 || is_k(kind) ? half_at(blocks + 2) : 0;
    good &= finite(d[b]) && finite(e[b]);
  }
  return good;
}

}  // namespace monotape
