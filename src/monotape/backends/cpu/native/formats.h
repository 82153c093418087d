// How the weights of each format lie in a tile: which bytes, codes of how many bits, and which scales.
//
// A tile of floats is [k][8 rows]. A tile of codes is a run of blocks along k. A block is a head (numbers that its whole
// block shares), then parts of 32 values of k; a part is its own scales, then the codes of 8 rows, which unpack to
// [k / 4][row][4] int8, the order of dot-product instructions (codes_impl.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace monotape {

constexpr int kPart = 32;  // values of k whose activations share a scale

// Of a row's number: (code - centre) * scale, or code * scale + minimum.
struct Layout {
  int bits;          // of a code
  int block;         // values of k in a block
  int group;         // values of k that share a scale: 32 or 16 (longer groups are whole parts)
  int head_bytes;    // of a block, for 8 rows
  int scale_bytes;   // of a part, for 8 rows
  bool has_minimum;  // a term that the codes do not multiply
  bool centred;      // codes stand for code - 2^(bits - 1)
  bool table = false;  // codes are places in a table of int8 (codes_impl.h), so they unpack to values of 8 bits

  constexpr int value_bits() const { return table ? 8 : bits; }

  constexpr int code_bytes() const { return kTileRows * kPart * bits / 8; }
  constexpr int part_bytes() const { return scale_bytes + code_bytes(); }
  constexpr size_t block_bytes() const { return head_bytes + block / kPart * static_cast<size_t>(part_bytes()); }
};

constexpr bool is_float(Format format) { return format <= Format::bf16; }
constexpr size_t value_bytes(Format format) { return format == Format::f32 ? 4 : 2; }  // of a format of floats

constexpr int kHalves = 2 * kTileRows;  // bytes of one f16 a row
constexpr int kBytes = kTileRows;       // of one int8 a row
constexpr int kFloats = 4 * kTileRows;

// Formats of codes; plan/formats.py: CPU_LAYOUTS has the same bytes. d, e: f16; s, m: int8, 128 added.
constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::q8: return {8, 32, 32, kHalves, 0, false, true};                // d
    case Format::int4_g32: return {4, 32, 32, kHalves, 0, false, true};          // d
    case Format::int4_g64: return {4, 64, 32, kHalves, 0, false, true};
    case Format::int4_g128: return {4, 128, 32, kHalves, 0, false, true};
    case Format::int4_g32z: return {4, 32, 32, 2 * kHalves, 0, true, true};      // d, zero point as f16
    case Format::int4_g64z: return {4, 64, 32, 2 * kHalves, 0, true, true};
    case Format::int4_g128z: return {4, 128, 32, 2 * kHalves, 0, true, true};
    case Format::q4_1: return {4, 32, 32, 2 * kHalves, 0, true, false};          // d, minimum
    case Format::q5_0: return {5, 32, 32, kHalves, 0, false, true};              // d
    case Format::q4_k: return {4, 128, 32, 2 * kHalves, 2 * kBytes, true, false};  // d, e; a part: s, m
    case Format::q5_k: return {5, 128, 32, 2 * kHalves, 2 * kBytes, true, false};
    case Format::q6_k: return {6, 128, 16, kHalves, 2 * kBytes, false, true};      // d; a part: s of both groups
    case Format::k_mixed: return {6, 128, 16, 2 * kHalves, 4 * kBytes, true, false};  // d, e; a part: s, s, m, m
    case Format::wide: return {8, 32, 16, 0, 4 * kFloats, true, true};             // a part: scales, minima as stored
    case Format::mxfp4: return {4, 32, 32, kBytes, 0, false, true, true};          // the exponent of a power of two
    default: return {};
  }
}

constexpr int block_of(Format format) { return is_float(format) ? 1 : layout_of(format).block; }
constexpr int padded_to(Format format, int k) { return (k + block_of(format) - 1) / block_of(format) * block_of(format); }

constexpr size_t tile_bytes(Format format, int padded_k) {
  return is_float(format) ? kTileRows * padded_k * value_bytes(format)
                          : padded_k / block_of(format) * layout_of(format).block_bytes();
}

constexpr int kWidestBlock = 128;

}  // namespace monotape
