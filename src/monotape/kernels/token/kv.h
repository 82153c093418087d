// Where a position's key and value lie in their unit of 32 positions.
//
// In 16 bits a lane's 16 bytes of a block are what it multiplies. In 8 bits (kNarrowKv) a lane has 8 bytes of a block, codes of
// e4m3. Each position's key, and its value, was divided by a power of two before, chosen for the largest number in it; a byte
// for each of these powers follows the blocks of the unit.
#pragma once
#include "worker/consumer.h"
#include "formats/codes.h"

namespace monotape {

// Values are transposed, and the positions of a row are in the order in which lanes hold the probabilities: lane t has
// positions 2t, 2t + 1 of each of the four tiles of eight.
__device__ __forceinline__ int value_slot(int position) {
  return position % 8 / 2 * 8 + position % kUnitPositions / 8 * 2 + position % 2;
}
// The number of a key's word, block by block.
__device__ __forceinline__ int key_place(int position, int block, int column) {
  const int at = position % kUnitPositions;
  return (at / 8 * kHeadBlocks + block) * kBlockWords + at % 8 * 4 + column;
}

__device__ __forceinline__ void store_key_word(uint8_t* unit, int position, int block, int column, uint4 word) {
  reinterpret_cast<uint4*>(unit)[key_place(position, block, column)] = word;
}
__device__ __forceinline__ uint4 key_word(const uint8_t* unit, int position, int block, int column) {
  return reinterpret_cast<const uint4*>(unit)[key_place(position, block, column)];
}
__device__ __forceinline__ uint16_t* value_place(uint8_t* unit, int position, int d) {
  uint16_t* values = reinterpret_cast<uint16_t*>(unit + kKeyBlocks * kBlockBytes);
  return values + d / 8 * (kBlockBytes / 2) + d % 8 * kBlockK + value_slot(position);
}

// Bits of a code that are put where a half has its exponent and mantissa need no conversion, subnormals included
// (formats/codes.h). The half is then the code's value times 2^-8 as float16, 2^-120 as bf16.
constexpr int kCodeExponent = kFloat16 ? 8 : 120;
// Sums of products with such bf16 would be too small for float32. So queries are larger by 2^kQueryLift, and the weights of
// values by 2^kWeightLift; scores and sums of values are divided by what is left. A token's values are multiplied as bf16 in all
// models: float16 has no room for small weights times small powers.
constexpr bool kFloat16Weights = kFloat16 && !kNarrowKv;
constexpr int kQueryLift = kNarrowKv && !kFloat16 ? 64 : 0, kWeightLift = 64, kValueExponent = 120;
// Powers that leave the values of codes exact as halves of either kind. A key or value with a number that is not finite has
// kNoPower.
constexpr int kLeastPower = -15, kMostPower = 7, kNoPower = 127;

__device__ __forceinline__ float power_float(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }
// 2^(power + lift), not a number for kNoPower.
__device__ __forceinline__ float power_factor(int power, int lift) {
  return power == kNoPower ? float_of(0x7fc00000u) : power_float(power + lift);
}

// The largest of eight values, infinite if one is not finite.
__device__ __forceinline__ float largest_of_word(uint4 word) {
  float value[8], largest = 0;
  unpack8(word, value);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t size = bits_of(value[i]) & 0x7fffffffu;
    largest = fmaxf(largest, size < 0x7f800000u ? float_of(size) : infinity());
  }
  return largest;
}
// The least power that leaves no value larger than the largest code, 448.
__device__ __forceinline__ int power_of(float largest) {
  if (bits_of(largest) >= 0x7f800000u) return kNoPower;
  const int power = static_cast<int>((bits_of(largest) + 0x1fffffu) >> 23) - 135;  // 448 is 1.75 times 2^8
  return smaller(larger(power, kLeastPower), kMostPower);
}

// Of a head whose words the lanes of the warp have, one each at most; and of heads side by side.
__device__ __forceinline__ int power_of_lanes(uint4 word) { return power_of(float_of(most_of_lanes(bits_of(largest_of_word(word))))); }
template <int Words>
__device__ __forceinline__ int power_of_head(const uint4 (&word)[Words]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < Words; i++) largest = fmaxf(largest, largest_of_word(word[i]));
  return power_of(largest_of_head(largest));
}

// The code whose value is nearest; of two that are equally near, the even one. A value beyond the largest code gets that code.
__device__ __forceinline__ uint32_t code_of(float value) {
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
  const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960;
  const uint32_t subnormal = bits_of(float_of(size) + 16384.0f) & 0xfu;  // adding 2^14 leaves multiples of 2^-9
  const uint32_t code = size < 0x3c800000u ? subnormal : normal < 0x7eu ? normal : 0x7eu;
  return code | (bits >> 24 & 0x80u);
}
__device__ __forceinline__ void codes_of(uint4 word, int power, uint32_t (&code)[8]) {
  const float inverse = power_float(power == kNoPower ? 0 : -power);
  float value[8];
  unpack8(word, value);
#pragma unroll
  for (int i = 0; i < 8; i++) code[i] = code_of(value[i] * inverse);
}

// A key's codes: in each 16 bits two, the first where a half has them, the second in the bits that are left.
__device__ __forceinline__ uint32_t first_bits(uint32_t code) { return (code & 0x80u) << 8 | (code & 0x7fu) << (kFloat16 ? 7 : 4); }
__device__ __forceinline__ uint32_t second_bits(uint32_t code) {
  if constexpr (kFloat16) return (code & 0x80u) << 7 | (code & 0x7fu);
  return (code & 0x80u) << 4 | (code & 0x70u) << 8 | (code & 0xfu);
}
__device__ __forceinline__ uint2 packed_key(const uint32_t (&code)[8]) {
  const auto four = [&](int i) {
    return first_bits(code[i]) | second_bits(code[i + 2]) | (first_bits(code[i + 1]) | second_bits(code[i + 3])) << 16;
  };
  return make_uint2(four(0), four(4));
}
__device__ __forceinline__ uint4 key_halves(uint2 eight) {
  if constexpr (!kFloat16) return E4m3::operand(eight);
  const auto second = [](uint32_t four) { return (four << 1 & 0x80008000u) | (four << 7 & 0x3f803f80u); };
  return make_uint4(eight.x & 0xbf80bf80u, second(eight.x), eight.y & 0xbf80bf80u, second(eight.y));
}

// A byte of a value's row belongs to one position, because positions are written one by one. Bytes 0 and 2 are a pair, 1 and
// 3 the next.
__device__ __forceinline__ int value_byte(int slot) { return (slot & ~3) | (slot & 1) << 1 | (slot >> 1 & 1); }
template <bool Float16>
__device__ __forceinline__ uint4 value_halves(uint2 eight) {
  constexpr uint32_t kSigns = 0x80008000u, kRest = Float16 ? 0x3f803f80u : 0x07f007f0u;
  constexpr int kUp = Float16 ? 7 : 4, kDown = 8 - kUp;
  const auto even = [](uint32_t four) { return (four << 8 & kSigns) | (four << kUp & kRest); };
  const auto odd = [](uint32_t four) { return (four & kSigns) | (four >> kDown & kRest); };
  return make_uint4(even(eight.x), odd(eight.x), even(eight.y), odd(eight.y));
}

// Places of codes and powers in a unit. Powers are in the order of slots, so that a lane has those of its positions at once.
constexpr int kCodeBytes = kBlockBytes / 2, kPowersAt = (kKeyBlocks + kHeadTiles) * kCodeBytes;
__device__ __forceinline__ uint2* key_codes(uint8_t* unit, int word) { return reinterpret_cast<uint2*>(unit) + word; }
__device__ __forceinline__ const uint2* key_codes(const uint8_t* unit, int word) { return reinterpret_cast<const uint2*>(unit) + word; }
__device__ __forceinline__ uint8_t* value_code(uint8_t* unit, int position, int d) {
  return unit + (kKeyBlocks + d / 8) * kCodeBytes + d % 8 * kBlockK + value_byte(value_slot(position));
}
__device__ __forceinline__ const uint2* value_codes(const uint8_t* unit, int tile, int word) {
  return reinterpret_cast<const uint2*>(unit + (kKeyBlocks + tile) * kCodeBytes) + word;
}
__device__ __forceinline__ uint8_t* power_place(uint8_t* unit, int position, bool of_value) {
  return unit + kPowersAt + of_value * kUnitPositions + value_slot(position);
}
// Of the eight slots that a column of lanes has.
__device__ __forceinline__ const uint2* slot_powers(const uint8_t* unit, int column, bool of_value) {
  return reinterpret_cast<const uint2*>(unit + kPowersAt + of_value * kUnitPositions) + column;
}
__device__ __forceinline__ int slot_power(uint2 powers, int slot) {
  return static_cast<signed char>((slot < 4 ? powers.x : powers.y) >> slot % 4 * 8);
}

// Stores a word, eight values, of a position's key or value.
__device__ __forceinline__ void store_key_codes(uint8_t* unit, int position, int block, int column, uint4 word, int power) {
  uint32_t code[8];
  codes_of(word, power, code);
  *key_codes(unit, key_place(position, block, column)) = packed_key(code);
}
__device__ __forceinline__ void store_value_codes(uint8_t* unit, int position, int number, uint4 word, int power) {
  uint32_t code[8];
  codes_of(word, power, code);
#pragma unroll
  for (int i = 0; i < 8; i++) *value_code(unit, position, number * 8 + i) = static_cast<uint8_t>(code[i]);
}
__device__ __forceinline__ void store_power(uint8_t* unit, int position, bool of_value, int power) {
  *power_place(unit, position, of_value) = static_cast<uint8_t>(power);
}

}  // namespace monotape
