// Scales of groups along k, in a strip after a block's codes. A value is code * scale + shift.
//
// A block has four slots of 32 values, or, where groups have 16, twice four slots of 16 (kHalves): each lane of a row
// handles one slot, and reads what that takes.
//
//   kBytes     of the strip
//   kWords     registers of a lane
//   kHalves    2: groups of 16
//   kShifts    whether shifts are not all 0
//   kMiddle    the code of the value 0 where it is the same for all groups: a shift is -kMiddle times the scale; else 0
//   kSlots     whether slots have scales of their own
//   read(strip, row, slot, out)
//   factors(words, half)
#pragma once

namespace monotape {

struct Factors {
  float scale, shift;
};

// One scale of 16 bits a group; codes are integers whose zero is Middle.
template <int Group, int Middle>
struct HalfScales {
  static constexpr int kGroups = 4 * kBlockK / Group, kBytes = kTileRows * kGroups * 2, kWords = 1, kHalves = 1;
  static constexpr bool kShifts = true, kSlots = kGroups > 1;
  static constexpr int kMiddle = Middle;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    out[0] = reinterpret_cast<const uint16_t*>(strip)[row * kGroups + slot * kGroups / 4];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int) {
    const float scale = low_half<true>(words[0]);
    return {scale, -Middle * scale};
  }
};

// With a second number of 16 bits: the group's zero point, or what is added to all its values.
template <int Group, bool ZeroPoints>
struct PairScales {
  static constexpr int kGroups = 4 * kBlockK / Group, kBytes = kTileRows * kGroups * 4, kWords = 1, kHalves = 1;
  static constexpr bool kShifts = true, kSlots = kGroups > 1;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    out[0] = reinterpret_cast<const uint32_t*>(strip)[row * kGroups + slot * kGroups / 4];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int) {
    const float scale = low_half<true>(words[0]), other = high_half<true>(words[0]);
    return {scale, ZeroPoints ? -other * scale : other};
  }
};

// GGUF's K-quants. Each row has two numbers of 16 bits, d and e; each group has a scale and a minimum, a byte each: a value is
// code * d * scale - e * minimum.
struct KScales {  // groups of 32; bytes, then all d and e
  static constexpr int kBytes = kTileRows * (4 * 2 + 4), kWords = 2, kHalves = 1;
  static constexpr bool kShifts = true, kSlots = true;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    out[0] = reinterpret_cast<const uint16_t*>(strip)[row * 4 + slot];
    out[1] = reinterpret_cast<const uint32_t*>(strip + kTileRows * 8)[row];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int) {
    return {low_half<true>(words[1]) * static_cast<float>(words[0] & 0xff), -high_half<true>(words[1]) * static_cast<float>(words[0] >> 8)};
  }
};

__device__ __forceinline__ float signed_byte(uint32_t word, int number) {
  return static_cast<float>(static_cast<signed char>(word >> 8 * number & 0xff));
}
struct SixBitScales {  // Q6_K: groups of 16, no minimum, codes' zero is 32; bytes, then all d
  static constexpr int kBytes = kTileRows * (4 * 2 + 2), kWords = 2, kHalves = 2;
  static constexpr bool kShifts = true, kSlots = true;
  static constexpr int kMiddle = 32;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    out[0] = reinterpret_cast<const uint16_t*>(strip)[row * 4 + slot];
    out[1] = reinterpret_cast<const uint16_t*>(strip + kTileRows * 8)[row];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int half) {
    const float scale = low_half<true>(words[1]) * signed_byte(words[0], half);
    return {scale, -32 * scale};
  }
};
struct MixedKScales {  // any K-quant: groups of 16; scale and minimum of both halves, then all d and e
  static constexpr int kBytes = kTileRows * (4 * 4 + 4), kWords = 2, kHalves = 2;
  static constexpr bool kShifts = true, kSlots = true;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    out[0] = reinterpret_cast<const uint32_t*>(strip)[row * 4 + slot];
    out[1] = reinterpret_cast<const uint32_t*>(strip + kTileRows * 16)[row];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int half) {
    return {low_half<true>(words[1]) * signed_byte(words[0], 2 * half), -high_half<true>(words[1]) * signed_byte(words[0], 2 * half + 1)};
  }
};

// Groups of 16 with a float32 scale and a float32 shift: holds every other format of integers.
struct WideScales {
  static constexpr int kBytes = kTileRows * 4 * 16, kWords = 4, kHalves = 2;
  static constexpr bool kShifts = true, kSlots = true;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) {
    const uint4 both = reinterpret_cast<const uint4*>(strip)[row * 4 + slot];
    out[0] = both.x, out[1] = both.y, out[2] = both.z, out[3] = both.w;
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int half) {
    return {float_of(words[2 * half]), float_of(words[2 * half + 1])};
  }
};

// Powers of two, a byte each: e8m0. The least is 2^-127, which a float32 has as a subnormal number.
struct PowerScales {
  static constexpr int kBytes = kTileRows * 4, kWords = 1, kHalves = 1;
  static constexpr bool kShifts = false, kSlots = true;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int slot, uint32_t* out) { out[0] = strip[row * 4 + slot]; }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int) {
    return {float_of(words[0] ? words[0] << 23 : 0x00400000u), 0};
  }
};

// One float32 for a row's 128 values.
struct FloatScales {
  static constexpr int kBytes = kTileRows * 4, kWords = 1, kHalves = 1;
  static constexpr bool kShifts = false, kSlots = false;
  static constexpr int kMiddle = 0;
  static __device__ __forceinline__ void read(const uint8_t* strip, int row, int, uint32_t* out) {
    out[0] = reinterpret_cast<const uint32_t*>(strip)[row];
  }
  static __device__ __forceinline__ Factors factors(const uint32_t* words, int) { return {float_of(words[0]), 0}; }
};

// None but the row's own, which the stage's epilogue applies.
template <int Middle>
struct RowScales {
  static constexpr int kBytes = 0, kWords = 0, kHalves = 1;
  static constexpr bool kShifts = Middle != 0, kSlots = false;
  static constexpr int kMiddle = Middle;
  static __device__ __forceinline__ void read(const uint8_t*, int, int, uint32_t*) {}
  static __device__ __forceinline__ Factors factors(const uint32_t*, int) { return {1, -Middle}; }
};

}  // namespace monotape
