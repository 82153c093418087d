// Lays rows of codes and scales out as codes_impl.h and scales_impl.h read them. Nothing is rounded.
#include "pack_codes.h"

#include <cstring>

namespace monotape {
namespace {

constexpr int kRegisters = kPart * kTileRows / 16;  // of unpacked codes, in a part

// The codes of a part, in the highest bits of bytes: [k / 4][row][4].
void align_codes(const CodeRow (&rows)[kTileRows], int bits, int first, uint8_t (&out)[kRegisters][16]) {
  const uint8_t sign = static_cast<uint8_t>(1 << (bits - 1));
  for (int lane = 0; lane < kTileRows; lane++)
    for (int k = 0; k < kPart; k++)
      out[k / 4 * 2 + lane / 4][lane % 4 * 4 + k % 4] = static_cast<uint8_t>((rows[lane].codes[first + k] ^ sign) << (8 - bits));
}

// Registers into the fewest that hold them: the inverse of Codes<bits>::unpack(). w: the registers that are packed
// together; byte by byte.
void put_codes(int bits, const uint8_t (&w)[kRegisters][16], uint8_t* out) {
  const auto at = [&](int i, int j) -> unsigned { return w[i][j]; };
  for (int j = 0; j < 16; j++) {
    const auto put = [&](int i, unsigned value) { out[16 * i + j] = static_cast<uint8_t>(value); };
    if (bits == 8)
      for (int i = 0; i < kRegisters; i++) put(i, at(i, j));
    if (bits == 4)
      for (int i = 0; i < kRegisters / 2; i++) put(i, at(2 * i, j) >> 4 | at(2 * i + 1, j));
    if (bits == 5)
      for (int i = 0; i < kRegisters / 8; i++) {
        const unsigned a = at(8 * i + 5, j), b = at(8 * i + 6, j), c = at(8 * i + 7, j);
        put(5 * i, at(8 * i, j) | a >> 5);
        put(5 * i + 1, at(8 * i + 1, j) | b >> 5);
        put(5 * i + 2, at(8 * i + 2, j) | c >> 5);
        put(5 * i + 3, at(8 * i + 3, j) | (a >> 3 & 3) << 1 | (c >> 4 & 1));
        put(5 * i + 4, at(8 * i + 4, j) | (b >> 3 & 3) << 1 | (c >> 3 & 1));
      }
    if (bits == 6)
      for (int i = 0; i < kRegisters / 4; i++) {
        const unsigned a = at(4 * i + 3, j);
        put(3 * i, at(4 * i, j) | a >> 6);
        put(3 * i + 1, at(4 * i + 1, j) | (a >> 4 & 3));
        put(3 * i + 2, at(4 * i + 2, j) | (a >> 2 & 3));
      }
  }
}

// One value a row, of whatever type, side by side; returns where the next ones go.
template <class Value>
uint8_t* put_lanes(const CodeRow (&rows)[kTileRows], const Value* CodeRow::*field, int index, uint8_t* out) {
  for (int lane = 0; lane < kTileRows; lane++) {
    Value value = (rows[lane].*field)[index];
    if constexpr (sizeof(Value) == 1) value = static_cast<Value>(value ^ 0x80);  // load_int8() reads bytes of which all are positive
    std::memcpy(out + lane * sizeof(Value), &value, sizeof(Value));
  }
  return out + kTileRows * sizeof(Value);
}

uint8_t* put_scales(Format format, const CodeRow (&rows)[kTileRows], int part, uint8_t* out) {
  const Layout layout = layout_of(format);
  const int groups = kPart / layout.group;
  if (format == Format::wide) {
    for (int g = 0; g < groups; g++) out = put_lanes(rows, &CodeRow::scales, part * groups + g, out);
    for (int g = 0; g < groups; g++) out = put_lanes(rows, &CodeRow::minima, part * groups + g, out);
  } else if (layout.scale_bytes) {
    for (int g = 0; g < groups; g++) out = put_lanes(rows, &CodeRow::s, part * groups + g, out);
    for (int g = 0; layout.has_minimum && g < groups; g++) out = put_lanes(rows, &CodeRow::m, part * groups + g, out);
  }
  return out;
}

bool is_finite(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }
bool is_finite(float value) { return value - value == 0; }

template <class Value>
bool all_finite(const Value* values, int64_t count) {
  bool good = true;
  for (int64_t i = 0; values && i < count; i++) good &= is_finite(values[i]);
  return good;
}

}  // namespace

void put_tile(Format format, const CodeRow (&rows)[kTileRows], int padded_k, uint8_t* out) {
  const Layout layout = layout_of(format);
  const int parts = layout.block / kPart;
  for (int block = 0; block < padded_k / layout.block; block++) {
    if (layout.head_bytes) out = put_lanes(rows, &CodeRow::d, block, out);
    if (layout.head_bytes > kHalves) out = put_lanes(rows, &CodeRow::e, block, out);
    for (int part = block * parts; part < (block + 1) * parts; part++) {
      out = put_scales(format, rows, part, out);
      uint8_t aligned[kRegisters][16];
      align_codes(rows, layout.bits, part * kPart, aligned);
      put_codes(layout.bits, aligned, out);
      out += layout.code_bytes();
    }
  }
}

}  // namespace monotape

extern "C" {

using namespace monotape;

// `count` rows of padded_k codes become count / 8 tiles. Scales: pointers of CodeRow, for all rows one after another.
// Returns -1, or the first row with a scale that is not finite.
int64_t monotape_pack_codes(Format format, int64_t count, int32_t padded_k, const uint8_t* codes, const uint16_t* d,
                            const uint16_t* e, const int8_t* s, const int8_t* m, const float* scales,
                            const float* minima, uint8_t* out) {
  const Layout layout = layout_of(format);
  const int blocks = padded_k / layout.block, groups = padded_k / layout.group;
  const auto row_at = [&](int64_t r) {
    const auto at = [&](auto* values, int a_row) { return values ? values + r * a_row : nullptr; };
    return CodeRow{codes + r * padded_k, at(d, blocks), at(e, blocks), at(s, groups), at(m, groups),
                   at(scales, groups), at(minima, groups)};
  };
  for (int64_t r = 0; r < count; r++) {
    const CodeRow row = row_at(r);
    if (!all_finite(row.d, blocks) || !all_finite(row.e, blocks) || !all_finite(row.scales, groups) ||
        !all_finite(row.minima, groups))
      return r;
  }
  for (int64_t tile = 0; tile < count / kTileRows; tile++, out += tile_bytes(format, padded_k)) {
    CodeRow rows[kTileRows];
    for (int lane = 0; lane < kTileRows; lane++) rows[lane] = row_at(tile * kTileRows + lane);
    put_tile(format, rows, padded_k, out);
  }
  return -1;
}

}  // extern "C"
