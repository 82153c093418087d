// Lays a tile out block by block: tiles.py has the same layouts in NumPy, which define them.
#include "tile.h"

namespace monotape {
namespace {

// Tensor cores multiply eight values in this order.
constexpr int kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};

// The place of byte i of eight: four of one group, or pair of groups, and four of the other take turns.
constexpr int in_turns(int i) { return i / 4 * 8 + i % 4; }

// Eight codes of a lane and a group, which is odd if `upper`, into one half of each of eight bytes: those of the group before, or
// after, have the other.
void put_four_bits(const uint8_t* eight, uint8_t* out, bool upper) {
  for (int i = 0; i < 8; i++) {
    const int code = eight[kOrder[i]] & 15;
    uint8_t& byte = out[in_turns(i)];
    byte = static_cast<uint8_t>(upper ? byte | code << 4 : code);
  }
}

// The same of five bits, of groups 2 pair and, if `upper`, 2 pair + 1. `high` are the bits that do not fit the halves.
void put_five_bits(const uint8_t* eight, uint8_t* out, uint8_t* high, int pair, bool upper) {
  constexpr int kEvenBit[4] = {4, 6, 2, 0}, kOddBit[4] = {3, 5, 1, 7};
  for (int i = 0; i < 8; i++) {
    const int code = eight[kOrder[i]], word = 2 * pair + i / 4;
    out[i] = static_cast<uint8_t>(upper ? out[i] | code >> 1 << 4 : code & 15);
    high[i % 4] = static_cast<uint8_t>(high[i % 4] | (upper ? (code & 1) << kOddBit[word] : code >> 4 << kEvenBit[word]));
  }
}

// Of six bits, codes of two groups: eight bytes, and four for the third word.
void put_six_bits(const uint8_t* even, const uint8_t* odd, uint8_t* out, uint8_t* third) {
  for (int i = 0; i < 4; i++) {
    const int last = odd[kOrder[4 + i]];
    out[i] = static_cast<uint8_t>(even[kOrder[i]] | last >> 4 << 6);
    out[4 + i] = static_cast<uint8_t>(odd[kOrder[i]] << 2 | (last & 3));
    third[i] = static_cast<uint8_t>(even[kOrder[4 + i]] | (last >> 2 & 3) << 6);
  }
}

void put_bytes(const uint8_t* eight, uint8_t* out) {
  for (int i = 0; i < 8; i++) out[in_turns(i)] = eight[kOrder[i]];
}

// Two codes in 16 bits: kernels/formats/codes.h says where their bits lie.
uint16_t two_e4m3(unsigned first, unsigned second) {
  return static_cast<uint16_t>((first & 0x80) << 8 | (first & 0x7f) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 |
                               (second & 0x0f));
}

void put_e4m3(const uint8_t* eight, uint8_t* out) {
  for (int w = 0; w < 2; w++)
    for (int h = 0; h < 2; h++) {
      const uint16_t bits = two_e4m3(eight[4 * w + h], eight[4 * w + 2 + h]);
      std::memcpy(out + 4 * w + 2 * h, &bits, 2);
    }
}

uint32_t e2m1(const uint8_t* eight) {
  uint32_t word = 0;
  for (int half = 0; half < 2; half++) {
    uint32_t bits = 0;
    for (int n = 0; n < 3; n++) {
      const uint32_t code = eight[2 * n + half];
      bits |= (code >> 3) << (15 - 3 * n) | (code & 7) << (6 - 3 * n);
    }
    const uint32_t last = eight[6 + half];
    bits |= (last >> 3) << 14 | (last >> 1 & 3) << 10 | (last & 1) << 13;
    word |= bits << 16 * half;
  }
  return word;
}

void put_word(uint32_t word, uint8_t* out) { std::memcpy(out, &word, 4); }

}  // namespace

void Tile::put_codes(int64_t block, uint8_t* out) {
  for (int row = 0; row < kTileRows; row++)
    for (int column = 0; column < 4; column++) {
      const int lane = 4 * row + column;
      const uint8_t* codes = this->codes(row) + block * kBlockK + 8 * column;
      uint8_t more[8] = {};  // what does not fit the lane's word of 16 bytes
      for (int group = 0; group < 4; group++) {
        const uint8_t* eight = codes + 32 * group;
        const bool upper = group % 2;
        uint8_t* of_pair = out + lane * 16 + group / 2 * 8;
        uint8_t* of_half = out + group / 2 * 512 + lane * 16;
        if (shape.codes == CodeLayout::four_bits) put_four_bits(eight, out + lane * 16 + group / 2 * 4, upper);
        if (shape.codes == CodeLayout::five_bits) put_five_bits(eight, of_pair, more, group / 2, upper);
        if (shape.codes == CodeLayout::six_bits && upper) put_six_bits(eight - 32, eight, of_pair, more + group / 2 * 4);
        if (shape.codes == CodeLayout::bytes) put_bytes(eight, of_half + group % 2 * 4);
        if (shape.codes == CodeLayout::e4m3) put_e4m3(eight, of_half + group % 2 * 8);
        if (shape.codes == CodeLayout::e2m1) put_word(e2m1(eight), out + lane * 16 + group * 4);
      }
      if (shape.codes == CodeLayout::five_bits) std::memcpy(out + 512 + 4 * lane, more, 4);
      if (shape.codes == CodeLayout::six_bits) std::memcpy(out + 512 + 8 * lane, more, 8);
    }
}

// Row after row; of a row, group after group, and where groups have 16 values, groups s and s + 4 together.
void Tile::put_groups(int64_t block, uint8_t* out) {
  if (!shape.group_planes) return;
  const int groups = static_cast<int>(kBlockK) / shape.group, element = shape.element;
  for (int row = 0; row < kTileRows; row++)
    for (int i = 0; i < groups; i++) {
      const int group = groups == 8 ? i / 2 + i % 2 * 4 : i;
      for (int plane = 0; plane < shape.group_planes; plane++, out += element)
        std::memcpy(out, this->groups<uint8_t>(plane, row) + (block * groups + group) * element, element);
    }
}

void Tile::put(uint8_t* out) {
  const int64_t bytes = block_bytes(format);
  const int64_t rows_at = bytes - kTileRows * 2 * shape.row_planes;
  for (int64_t block = 0; block < k / kBlockK; block++, out += bytes) {
    put_codes(block, out);
    put_groups(block, out + code_bytes(shape.codes));
    uint8_t* at = out + rows_at;
    for (int row = 0; row < kTileRows; row++)
      for (int plane = 0; plane < shape.row_planes; plane++, at += 2) std::memcpy(at, rows(plane, row) + block, 2);
  }
}

}  // namespace monotape
