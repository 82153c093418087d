// Lays rows of float32 out the way the kernels read them. Every value is read once, so this is also where a NaN
// in the weights is found.
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace monotape {
namespace {

uint16_t f32_to_bf16(float f) {  // round to nearest even
  const uint32_t bits = f32_to_bits(f);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

void put(Format format, float value, uint8_t* out) {
  if (format == Format::f32) {
    std::memcpy(out, &value, 4);
    return;
  }
  const uint16_t half = format == Format::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(out, &half, 2);
}

// False if a value is not finite, or not once it is rounded to the format (70000 in f16, say).
bool representable(Format format, const float* row, int k) {
  bool good = true;
  for (int i = 0; i < k; i++) good &= std::fabs(row[i]) <= (format == Format::f16 ? 65504.0f : 3.38e38f);
  return good;
}

// Symmetric: value = integer * scale. The scale is an f16 just large enough that no integer exceeds 127.
uint16_t quantise(const float* x, int8_t* integers) {
  float largest = 0;
  for (int i = 0; i < kPart; i++) largest = std::fmax(largest, std::fabs(x[i]));
  uint16_t scale = f32_to_f16(largest / 127.0f);
  if (largest > 127.5f * f16_to_f32(scale) && scale < 0x7bffu) scale++;
  const float inverse = scale ? 1.0f / f16_to_f32(scale) : 0.0f;
  for (int i = 0; i < kPart; i++) {
    const float integer = std::nearbyint(x[i] * inverse);
    integers[i] = static_cast<int8_t>(integer > 127 ? 127 : integer < -127 ? -127 : integer);
  }
  return scale;
}

struct Q8Row {
  const int8_t* integers;
  const uint16_t* scales;
};

void put_q8_block(const Q8Row* rows, int block, uint8_t* out) {
  for (int lane = 0; lane < kTileRows; lane++) {
    std::memcpy(out + 2 * lane, rows[lane].scales + block, 2);
    for (int k4 = 0; k4 < kPart / 4; k4++)
      std::memcpy(out + 2 * kTileRows + k4 * 32 + lane * 4, rows[lane].integers + block * kPart + k4 * 4, 4);
  }
}

}  // namespace
}  // namespace monotape

extern "C" {

using namespace monotape;

// `count` rows of padded_k floats become count / 8 tiles. Returns -1, or the first row that cannot be represented.
int64_t monotape_pack_tiles(Format format, const float* rows, int64_t count, int32_t padded_k, uint8_t* out) {
  for (int64_t r = 0; r < count; r++)
    if (!representable(format, rows + r * padded_k, padded_k)) return r;
  const int block_bytes = static_cast<int>(layout_of(Format::q8).block_bytes());
  for (int64_t tile = 0; tile < count / kTileRows; tile++, out += tile_bytes(format, padded_k)) {
    const float* first = rows + tile * kTileRows * padded_k;
    if (format != Format::q8) {
      for (int i = 0; i < padded_k; i++)
        for (int lane = 0; lane < kTileRows; lane++)
          put(format, first[static_cast<size_t>(lane) * padded_k + i], out + (i * kTileRows + lane) * value_bytes(format));
      continue;
    }
    for (int block = 0; block < padded_k / kPart; block++) {
      int8_t integers[kTileRows][kPart];
      uint16_t scales[kTileRows];
      Q8Row quantised[kTileRows];
      for (int lane = 0; lane < kTileRows; lane++) {
        scales[lane] = quantise(first + static_cast<size_t>(lane) * padded_k + block * kPart, integers[lane]);
        quantised[lane] = {integers[lane], &scales[lane]};
      }
      put_q8_block(quantised, 0, out + block * block_bytes);
    }
  }
  return -1;
}

// The same from rows that are stored as integers and scales already: no rounding at all.
int64_t monotape_pack_q8_tiles(const int8_t* integers, const uint16_t* scales, int64_t count, int32_t padded_k,
                               uint8_t* out) {
  const int blocks = padded_k / kPart, block_bytes = static_cast<int>(layout_of(Format::q8).block_bytes());
  for (int64_t i = 0; i < count * blocks; i++)
    if ((scales[i] & 0x7c00u) == 0x7c00u) return i / blocks;
  for (int64_t tile = 0; tile < count / kTileRows; tile++)
    for (int block = 0; block < blocks; block++, out += block_bytes) {
      Q8Row rows[kTileRows];
      for (int lane = 0; lane < kTileRows; lane++) {
        const int64_t row = tile * kTileRows + lane;
        rows[lane] = {integers + row * padded_k, scales + row * blocks};
      }
      put_q8_block(rows, block, out);
    }
  return -1;
}

}  // extern "C"
