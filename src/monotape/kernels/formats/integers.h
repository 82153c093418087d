// Products of integers: weights that are codes of at most eight bits, times activations of 16 bits.
//
// The largest of the 256 activations that a warp polls together sets their scale. Each activation becomes an integer of 16 bits,
// 256 * high + low, two bytes with a sign each. Tensor cores add products of bytes exactly.
//
// A product has 16 rows, 32 values of k and eight columns. It takes two groups of 32 values: rows 0-7 are the tile's rows with
// codes of the first group, rows 8-15 the same rows with codes of the second. Of a block's four groups, columns 2 s and 2 s + 1
// are the high and the low bytes of group s, and zeros in the product of the two other groups. So lane 4 r + s ends with the sum
// of row r and group s, in the first two of its four results, or in the last two where s is odd. It applies that group's scale.
//
// Codes of four bits lie in bytes, a of an even group and b of the odd one after it, and masks would cost more than the products. So
// the first product takes whole bytes, 16 b + a, and the second 15 - a: rows 0-7 those of groups 0 and 1, rows 8-15 those of
// groups 2 and 3, so lanes whose s is 2 or 3 take the last two of four results. The second product multiplies the activations x of all
// groups; the first multiplies only those of odd groups, and the columns of even ones are zero there. Their sums add up: lane 4 r + s
// has 15 X - A of an even group and 16 B + 15 X of an odd one, where X is the sum of x, A that of a x and B that of b x. The multiple
// of X is subtracted with the group's shift, which these formats have anyway.
//
// Where groups have 16 values, the two products of a block have sums of their own, and columns 2 s and 2 s + 1 are the bytes of
// slot s of four: two halves of the first group, then two of the second, with zeros for the other half. Lane 4 r + s ends with the
// sums of row r and slot s of either product, in the last two of four results where s is 2 or 3.
#pragma once

namespace monotape {

constexpr float kMostActivation = 32512, kLeastScale = 7.8886090522101181e-31f;  // 127 * 256; 2^-100: its inverse is a number too

// What activations are divided by, as bits: from the largest of this lane. A NaN or an infinity stays one.
__device__ __forceinline__ uint32_t magnitude(const float (&value)[8]) {
  uint32_t most = bits_of(kLeastScale);
#pragma unroll
  for (int i = 0; i < 8; i++) most = larger(most, bits_of(value[i]) & 0x7fffffffu);
  return most;
}

// Eight activations: high bytes of values 0, 2, 1, 3 and of 4, 6, 5, 7, then their low bytes.
__device__ __forceinline__ uint4 integer_word(const float (&value)[8], float inverse) {
  // Added to a number below 2^22, it leaves the number's integer in the last bits, here 128 more: so the low byte is that of a
  // number with a sign, but for its first bit, and the high byte has taken what the low one is rounded by.
  constexpr float kToInteger = 12582912 + 128;
  constexpr int kOrder[2][4] = {{0, 2, 1, 3}, {4, 6, 5, 7}};
  uint32_t high[2], low[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = bits_of(value[kOrder[half][i]] * inverse + kToInteger);
    const uint32_t first = pick_bytes<0x5140>(bits[0], bits[1]), second = pick_bytes<0x5140>(bits[2], bits[3]);
    low[half] = pick_bytes<0x5410>(first, second) ^ 0x80808080u;
    high[half] = pick_bytes<0x7632>(first, second);
  }
  return make_uint4(high[0], high[1], low[0], low[1]);
}

// `upper`: of the second group, rows 8-15.
__device__ __forceinline__ float sum_of_lane(const int (&sums)[4], bool upper) {
  const int high = upper ? sums[2] : sums[0], low = upper ? sums[3] : sums[1];
  return static_cast<float>(high * 256 + low);
}

}  // namespace monotape
