// How codes of groups lie in a block of eight rows and 128 values of k, four groups of 32, and how they become operands.
//
//   kBytes        of a block's codes
//   kVectors      words of 16 bytes that a lane has: word `lane` of each 512 bytes
//   kExtra        words of 32 bits that a lane has besides
//   kExponent     an operand of the value 1 is 2^-kExponent
//   kInputExponent   of two, that activations are multiplied by: no product is too small for a float32 then
//   read_extra(block, lane, out)
//   operand(words, extra, group)   eight codes of the lane's row, values 8 * (lane % 4) onwards of a group, as four pairs of bf16
//   kIntegers     whether codes are integers of at most eight bits that products of integers take: integers.h
//   integer_operand(words, pair)   then: groups 2 pair and 2 pair + 1 as operands of such a product
//   kUpper        what the codes of the second of two groups are multiplied by there
//
// An integer's bits are those of a bf16 that is the integer times 2^-133: below 128 it is a subnormal number, and the next
// 128 have the first exponent, in the same steps. So a mask and a shift make an operand, and nothing is rounded.
#pragma once

namespace monotape {

__device__ __forceinline__ uint32_t word_of(uint4 words, int group) {
  return group == 0 ? words.x : group == 1 ? words.y : group == 2 ? words.z : words.w;
}

// Integers of four bits: words 2 p and 2 p + 1 of a lane have groups 2 p in their lower nibbles and 2 p + 1 in the upper ones.
// Bytes 0, 2, 1 and 3 of the first word are the first four of the lane's eight values, those of the second the others.
struct FourBits {
  static constexpr int kBytes = kTileRows * kBlockK * 2, kVectors = 1, kExtra = 0, kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true;
  static constexpr float kUpper = 16;

  static __device__ __forceinline__ void read_extra(const uint8_t*, int, uint32_t*) {}
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    const uint32_t first = (group < 2 ? words->x : words->z) >> group % 2 * 4, second = (group < 2 ? words->y : words->w) >> group % 2 * 4;
    return make_uint4(first & 0x000f000fu, first >> 8 & 0x000f000fu, second & 0x000f000fu, second >> 8 & 0x000f000fu);
  }
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, int pair) {
    const uint32_t first = pair ? words->z : words->x, second = pair ? words->w : words->y;
    return make_uint4(first & 0x0f0f0f0fu, first & 0xf0f0f0f0u, second & 0x0f0f0f0fu, second & 0xf0f0f0f0u);
  }
};

// Integers of five or six bits. Their lower four are nibbles, a word of 32 bits a group: nibbles n and n + 4 are of values 2 n
// and 2 n + 1 of the lane's eight. Further bits, `High` of each value, lie after all words, `High` words a lane: those of pair n
// of a group follow each other, the second value's 16 bits above the first one's.
template <int High>
struct Nibbles {
  static constexpr int kBytes = kTileRows * kBlockK * 2 + High * 4 * kBlockLanes, kVectors = 1, kExtra = High, kExponent = 133, kInputExponent = 96;
  static constexpr int kGroupsInWord = 4 / High;  // of further bits
  static constexpr bool kIntegers = false;

  static __device__ __forceinline__ void read_extra(const uint8_t* block, int lane, uint32_t* out) {
    const uint32_t* high = reinterpret_cast<const uint32_t*>(block + kTileRows * kBlockK * 2) + lane * High;
#pragma unroll
    for (int i = 0; i < High; i++) out[i] = high[i];
  }
  // The further bits of a pair, above its nibbles.
  static __device__ __forceinline__ uint32_t high_bits(const uint32_t* extra, int group, int pair) {
    const uint32_t word = group < kGroupsInWord ? extra[0] : extra[High - 1];
    const int at = group % kGroupsInWord * 4 * High + pair * High;
    return (at <= 4 ? word << (4 - at) : word >> (at - 4)) & (High == 1 ? 0x00100010u : 0x00300030u);
  }
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t* extra, int group) {
    const uint32_t eight = word_of(words[0], group);
    uint32_t pair[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      pair[n] = (eight >> 4 * n & 0x000f000fu) | high_bits(extra, group, n);
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
};

// Eight bits a value: 16 bytes a lane with groups 0 and 1, and after those of all lanes 16 with groups 2 and 3.
struct EightBits {
  static constexpr int kBytes = 2 * kTileRows * kBlockK * 2, kVectors = 2, kExtra = 0;
  static __device__ __forceinline__ void read_extra(const uint8_t*, int, uint32_t*) {}
  static __device__ __forceinline__ uint2 eight_codes(const uint4* words, int group) {
    const uint4 two = group < 2 ? words[0] : words[1];
    return group % 2 ? make_uint2(two.z, two.w) : make_uint2(two.x, two.y);
  }
};

// Integers of eight bits: bytes 0 and 2 of a word are a pair, bytes 1 and 3 the next.
struct Bytes : EightBits {
  static constexpr int kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true;
  static constexpr float kUpper = 1;
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    const uint2 eight = eight_codes(words, group);
    return make_uint4(eight.x & 0x00ff00ffu, eight.x >> 8 & 0x00ff00ffu, eight.y & 0x00ff00ffu, eight.y >> 8 & 0x00ff00ffu);
  }
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, int pair) {
    return make_uint4(words[pair].x, words[pair].z, words[pair].y, words[pair].w);
  }
};

// e4m3: a value's exponent and mantissa, put at bits 10 to 4 of a bf16 with the sign at bit 15, are the value times 2^-120,
// subnormals included. Packing has arranged the bits of two values in each 16 so that the first needs one mask. Of the
// second, bits 14 to 12 are the upper three bits of the exponent, bit 11 is the sign, and bits 3 to 0 are the rest.
struct E4m3 : EightBits {
  static constexpr bool kIntegers = false;
  static constexpr int kExponent = 120, kInputExponent = 64;
  static __device__ __forceinline__ uint32_t first(uint32_t four) { return four & 0x87f087f0u; }
  static __device__ __forceinline__ uint32_t second(uint32_t four) {
    return (four << 4 & 0x80f080f0u) | (four >> 4 & 0x07000700u);
  }
  static __device__ __forceinline__ uint4 operand(uint2 eight) {
    return make_uint4(first(eight.x), second(eight.x), first(eight.y), second(eight.y));
  }
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    return operand(eight_codes(words, group));
  }
};

// e2m1: a value's exponent and mantissa at bits 8 to 6 of a bf16, and its sign at bit 15, are the value times 2^-126. Of the
// four values in each 16 bits of a group's word, the first lies there, the second and third lie three and six bits lower, and
// the fourth has what is left: sign 14, exponent 11 and 10, mantissa 13.
struct E2m1 {
  static constexpr bool kIntegers = false;
  static constexpr int kBytes = kTileRows * kBlockK * 2, kVectors = 1, kExtra = 0, kExponent = 126, kInputExponent = 64;
  static __device__ __forceinline__ void read_extra(const uint8_t*, int, uint32_t*) {}
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    const uint32_t eight = word_of(words[0], group);
    return make_uint4(eight & 0x81c081c0u, eight << 3 & 0x81c081c0u, eight << 6 & 0x81c081c0u,
                      (eight << 1 & 0x80008000u) | (eight >> 3 & 0x01800180u) | (eight >> 7 & 0x00400040u));
  }
};

}  // namespace monotape
