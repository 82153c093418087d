// Lays a tile out block by block: tiles.py has the same layouts in NumPy, which define them.
#include "tile.h"

namespace monotape {
namespace {

// Eight codes of a lane and a group, as a word of nibbles: nibbles n and n + 4 are values 2 n and 2 n + 1.
uint32_t nibbles(const uint8_t* eight) {
  uint32_t word = 0;
  for (int n = 0; n < 4; n++) {
    word |= static_cast<uint32_t>(eight[2 * n] & 15) << 4 * n;
    word |= static_cast<uint32_t>(eight[2 * n + 1] & 15) << (4 * n + 16);
  }
  return word;
}

// Eight codes of a lane and a group into one half of each of eight bytes: those of the group before, or after, have the other.
void put_four_bits(const uint8_t* eight, uint8_t* out, int shift) {
  constexpr int kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (int i = 0; i < 8; i++) {
    const int code = (eight[kOrder[i]] & 15) << shift;
    out[i] = static_cast<uint8_t>(shift ? out[i] | code : code);
  }
}

// The bits above four of the same codes, `bits` of each.
uint32_t high_bits(const uint8_t* eight, int bits) {
  uint32_t word = 0;
  for (int n = 0; n < 4; n++) {
    word |= static_cast<uint32_t>(eight[2 * n] >> 4) << bits * n;
    word |= static_cast<uint32_t>(eight[2 * n + 1] >> 4) << (bits * n + 16);
  }
  return word;
}

void put_bytes(const uint8_t* eight, uint8_t* out) {
  constexpr int kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (int i = 0; i < 8; i++) out[i] = eight[kOrder[i]];
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
  const bool wide = shape.codes == CodeLayout::bytes || shape.codes == CodeLayout::e4m3;
  for (int row = 0; row < kTileRows; row++)
    for (int column = 0; column < 4; column++) {
      const int lane = 4 * row + column;
      const uint8_t* codes = this->codes(row) + block * kBlockK + 8 * column;
      uint32_t high[2] = {};
      for (int group = 0; group < 4; group++) {
        const uint8_t* eight = codes + 32 * group;
        if (shape.codes == CodeLayout::four_bits) {
          put_four_bits(eight, out + lane * 16 + group / 2 * 8, group % 2 * 4);
        } else if (wide) {
          uint8_t* at = out + group / 2 * 512 + lane * 16 + group % 2 * 8;
          shape.codes == CodeLayout::bytes ? put_bytes(eight, at) : put_e4m3(eight, at);
        } else {
          put_word(shape.codes == CodeLayout::e2m1 ? e2m1(eight) : nibbles(eight), out + lane * 16 + group * 4);
          if (shape.codes == CodeLayout::five_bits) high[0] |= high_bits(eight, 1) << 4 * group;
          if (shape.codes == CodeLayout::six_bits) high[group / 2] |= high_bits(eight, 2) << 8 * (group % 2);
        }
      }
      if (shape.codes == CodeLayout::five_bits) put_word(high[0], out + 512 + 4 * lane);
      if (shape.codes == CodeLayout::six_bits) std::memcpy(out + 512 + 8 * lane, high, 8);
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
