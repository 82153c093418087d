// One tile of quantised weights, before and after it is laid out as a GPU's tape has it (tiles.py says how).
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

namespace monotape {

constexpr int kTileRows = 8;
constexpr int64_t kBlockK = 128;  // values of k in a block of codes
constexpr int64_t kHalfBlockK = 32;  // in a block of 16-bit floats

// stored.py: FORMATS has the same order.
enum class Format : int64_t {
  half, fp8, fp8_block, int8, int4_g32, int4_g64, int4_g128, int4_g32z, int4_g64z, int4_g128z, mxfp4, q8, q4_1, q5_0, q4_k,
  q5_k, q6_k, k_mixed, wide,
};

enum class CodeLayout { four_bits, five_bits, six_bits, bytes, e4m3, e2m1 };

struct Shape {
  CodeLayout codes;
  int group;    // values of k that share a number of each group plane
  int element;  // bytes of such a number
  int group_planes, row_planes;
  bool row_scales;
};

constexpr Shape shape_of(Format format) {
  switch (format) {
    case Format::fp8: return {CodeLayout::e4m3, 0, 0, 0, 0, true};
    case Format::fp8_block: return {CodeLayout::e4m3, 128, 4, 1, 0, false};
    case Format::int8: return {CodeLayout::bytes, 0, 0, 0, 0, true};
    case Format::int4_g32: return {CodeLayout::four_bits, 32, 2, 1, 0, true};
    case Format::int4_g64: return {CodeLayout::four_bits, 64, 2, 1, 0, true};
    case Format::int4_g128: return {CodeLayout::four_bits, 128, 2, 1, 0, true};
    case Format::int4_g32z: return {CodeLayout::four_bits, 32, 2, 2, 0, true};
    case Format::int4_g64z: return {CodeLayout::four_bits, 64, 2, 2, 0, true};
    case Format::int4_g128z: return {CodeLayout::four_bits, 128, 2, 2, 0, true};
    case Format::mxfp4: return {CodeLayout::e2m1, 32, 1, 1, 0, false};
    case Format::q8: return {CodeLayout::bytes, 32, 2, 1, 0, false};
    case Format::q4_1: return {CodeLayout::four_bits, 32, 2, 2, 0, false};
    case Format::q5_0: return {CodeLayout::five_bits, 32, 2, 1, 0, false};
    case Format::q4_k: return {CodeLayout::four_bits, 32, 1, 2, 2, false};
    case Format::q5_k: return {CodeLayout::five_bits, 32, 1, 2, 2, false};
    case Format::q6_k: return {CodeLayout::six_bits, 16, 1, 1, 1, false};
    case Format::k_mixed: return {CodeLayout::six_bits, 16, 1, 2, 2, false};
    default: return {CodeLayout::bytes, 16, 4, 2, 0, false};
  }
}

constexpr int code_bytes(CodeLayout layout) {  // of a block
  switch (layout) {
    case CodeLayout::five_bits: return kTileRows * (64 + 16);
    case CodeLayout::six_bits: return kTileRows * (64 + 32);
    case CodeLayout::bytes:
    case CodeLayout::e4m3: return kTileRows * 128;
    default: return kTileRows * 64;
  }
}

constexpr int64_t block_bytes(Format format) {
  const Shape shape = shape_of(format);
  const int groups = shape.group ? static_cast<int>(kBlockK) / shape.group * shape.element * shape.group_planes : 0;
  return code_bytes(shape.codes) + kTileRows * (groups + 2 * shape.row_planes);
}

// Eight rows: codes, one a byte, and the numbers of groups and of blocks. k is a multiple of kBlockK; everything that is not
// set is zero.
class Tile {
 public:
  Tile(Format format, int64_t k) : format(format), shape(shape_of(format)), k(k), codes_(kTileRows * k) {
    for (int p = 0; p < shape.group_planes; p++) groups_[p].resize(kTileRows * group_row_bytes());
    for (int p = 0; p < shape.row_planes; p++) rows_[p].resize(kTileRows * (k / kBlockK));
  }
  void clear() {
    std::memset(codes_.data(), 0, codes_.size());
    for (int p = 0; p < shape.group_planes; p++) std::memset(groups_[p].data(), 0, groups_[p].size());
    for (int p = 0; p < shape.row_planes; p++) std::memset(rows_[p].data(), 0, 2 * rows_[p].size());
    std::memset(row_scale, 0, sizeof row_scale);
  }
  uint8_t* codes(int lane) { return codes_.data() + lane * k; }
  template <class Number>
  Number* groups(int plane, int lane) {
    return reinterpret_cast<Number*>(groups_[plane].data() + lane * group_row_bytes());
  }
  uint16_t* rows(int plane, int lane) { return rows_[plane].data() + lane * (k / kBlockK); }
  void put(uint8_t* out);  // as the tape has it

  const Format format;
  const Shape shape;
  const int64_t k;
  float row_scale[kTileRows] = {};

 private:
  int64_t group_row_bytes() const { return k / shape.group * shape.element; }
  void put_codes(int64_t block, uint8_t* out);
  void put_groups(int64_t block, uint8_t* out);

  std::vector<uint8_t> codes_, groups_[2];
  std::vector<uint16_t> rows_[2];
};

}  // namespace monotape
