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
//   integer_operand(words, extra, number)   then: the operand of the first or the second of a block's two such products
//   kUpper        what the codes of odd groups are multiplied by there
//   kWholeBytes   whether the first product takes whole bytes, with the codes of two groups: integers.h
//   kMost         the largest code, then
//
// An integer's bits are those of a bf16 that is the integer times 2^-133: below 128 it is a subnormal number, and the next
// 128 have the first exponent, in the same steps. So a mask and a shift make an operand, and nothing is rounded.
#pragma once

namespace monotape {

__device__ __forceinline__ uint32_t word_of(uint4 words, int group) {
  return group == 0 ? words.x : group == 1 ? words.y : group == 2 ? words.z : words.w;
}

// A group's codes as four pairs of bf16, from the operand of a product of integers, where codes of odd groups lie `upper` bits higher.
__device__ __forceinline__ uint4 operand_of_bytes(uint4 two_groups, int group, int upper) {
  const uint32_t first = group % 2 ? two_groups.y >> upper : two_groups.x, second = group % 2 ? two_groups.w >> upper : two_groups.z;
  return make_uint4(first & 0x00ff00ffu, first >> 8 & 0x00ff00ffu, second & 0x00ff00ffu, second >> 8 & 0x00ff00ffu);
}

// Integers of four bits: words 0 and 2 of a lane have group 0 in their lower nibbles and group 1 in the upper ones, words 1 and 3
// groups 2 and 3. Bytes 0, 2, 1 and 3 of a group's first word are the first four of the lane's eight values, those of its second
// the others.
struct FourBits {
  static constexpr int kBytes = kTileRows * kBlockK * 2, kVectors = 1, kExtra = 0, kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true, kWholeBytes = true;
  static constexpr float kUpper = 16, kMost = 15;

  static __device__ __forceinline__ void read_extra(const uint8_t*, int, uint32_t*) {}
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    const uint32_t first = (group < 2 ? words->x : words->y) >> group % 2 * 4, second = (group < 2 ? words->z : words->w) >> group % 2 * 4;
    return make_uint4(first & 0x000f000fu, first >> 8 & 0x000f000fu, second & 0x000f000fu, second >> 8 & 0x000f000fu);
  }
  // The words as they are, then what their lower nibbles lack to 15.
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, const uint32_t*, int number) {
    if (number == 0) return *words;
    return make_uint4(~words->x & 0x0f0f0f0fu, ~words->y & 0x0f0f0f0fu, ~words->z & 0x0f0f0f0fu, ~words->w & 0x0f0f0f0fu);
  }
};

// Integers of five bits. Words 2 p and 2 p + 1 of a lane have groups 2 p and 2 p + 1 in bytes like those of four bits, with the lower
// four bits of even groups and the upper four of odd ones. After the words of all lanes each has one more, with the bit that is
// missing of each code: byte n has those of the n-th bytes.
struct FiveBits {
  static constexpr int kBytes = kTileRows * kBlockK * 2 + 4 * kBlockLanes, kVectors = 1, kExtra = 1, kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true, kWholeBytes = false;
  static constexpr float kUpper = 8;

  static __device__ __forceinline__ void read_extra(const uint8_t* block, int lane, uint32_t* out) {
    out[0] = reinterpret_cast<const uint32_t*>(block + kTileRows * kBlockK * 2)[lane];
  }
  // Where the bits of word n's bytes lie: of an even group, and of an odd one.
  static __device__ __forceinline__ constexpr int even_bit(int n) { return n == 0 ? 4 : n == 1 ? 6 : n == 2 ? 2 : 0; }
  static __device__ __forceinline__ constexpr int odd_bit(int n) { return n == 0 ? 3 : n == 1 ? 5 : n == 2 ? 1 : 7; }
  static __device__ __forceinline__ uint32_t moved(uint32_t bits, int from, int to) {
    return (from > to ? bits >> (from - to) : bits << (to - from)) & 0x01010101u << to;
  }
  // Four codes of an even group, and four of an odd one, times eight.
  static __device__ __forceinline__ uint32_t even(uint32_t word, const uint32_t* extra, int n) {
    return (word & 0x0f0f0f0fu) | moved(extra[0], even_bit(n), 4);
  }
  static __device__ __forceinline__ uint32_t odd(uint32_t word, const uint32_t* extra, int n) {
    return (word & 0xf0f0f0f0u) | moved(extra[0], odd_bit(n), 3);
  }
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, const uint32_t* extra, int pair) {
    const uint32_t first = pair ? words->z : words->x, second = pair ? words->w : words->y;
    return make_uint4(even(first, extra, 2 * pair), odd(first, extra, 2 * pair), even(second, extra, 2 * pair + 1), odd(second, extra, 2 * pair + 1));
  }
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t* extra, int group) {
    return operand_of_bytes(integer_operand(words, extra, group / 2), group, 3);
  }
};

// Integers of six bits. Of two groups a lane has 16 codes in three words, the third of them after the words of all lanes. Four
// codes are the lower six bits of a word's bytes, or, of the odd group, the upper six: those of the even group in the first and the
// third word, four of the odd one in the second. The last four have the six pairs of bits that are left.
struct SixBits {
  static constexpr int kBytes = kTileRows * kBlockK * 2 + 8 * kBlockLanes, kVectors = 1, kExtra = 2, kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true, kWholeBytes = false;
  static constexpr float kUpper = 4;

  static __device__ __forceinline__ void read_extra(const uint8_t* block, int lane, uint32_t* out) {
    const uint2 third = reinterpret_cast<const uint2*>(block + kTileRows * kBlockK * 2)[lane];
    out[0] = third.x, out[1] = third.y;
  }
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, const uint32_t* extra, int pair) {
    const uint32_t first = pair ? words->z : words->x, second = pair ? words->w : words->y;
    const uint32_t third = pair ? extra[1] : extra[0];  // a chosen word of an array would not be a register
    const uint32_t last = (first & 0xc0c0c0c0u) | (third >> 2 & 0x30303030u) | (second << 2 & 0x0c0c0c0cu);
    return make_uint4(first & 0x3f3f3f3fu, second & 0xfcfcfcfcu, third & 0x3f3f3f3fu, last);
  }
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t* extra, int group) {
    return operand_of_bytes(integer_operand(words, extra, group / 2), group, 2);
  }
};

// Eight bits a value: 16 bytes a lane with groups 0 and 1, and after those of all lanes 16 with groups 2 and 3.
struct EightBits {
  static constexpr int kBytes = 2 * kTileRows * kBlockK * 2, kVectors = 2, kExtra = 0;
  static __device__ __forceinline__ void read_extra(const uint8_t*, int, uint32_t*) {}
};

// Integers of eight bits: bytes 0 and 2 of a word are a pair, bytes 1 and 3 the next. Words of two groups take turns, as a product
// takes them.
struct Bytes : EightBits {
  static constexpr int kExponent = 133, kInputExponent = 96;
  static constexpr bool kIntegers = true, kWholeBytes = false;
  static constexpr float kUpper = 1;
  static __device__ __forceinline__ uint4 operand(const uint4* words, const uint32_t*, int group) {
    const uint4 two = group < 2 ? words[0] : words[1];
    const uint32_t first = group % 2 ? two.y : two.x, second = group % 2 ? two.w : two.z;
    return make_uint4(first & 0x00ff00ffu, first >> 8 & 0x00ff00ffu, second & 0x00ff00ffu, second >> 8 & 0x00ff00ffu);
  }
  static __device__ __forceinline__ uint4 integer_operand(const uint4* words, const uint32_t*, int pair) { return words[pair]; }
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
    const uint4 two = group < 2 ? words[0] : words[1];
    return operand(group % 2 ? make_uint2(two.z, two.w) : make_uint2(two.x, two.y));
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
