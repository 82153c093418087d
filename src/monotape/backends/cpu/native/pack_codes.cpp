// Lays rows of codes and scales out as codes_impl.h and scales_impl.h read them. Nothing is rounded.
#include "pack_codes.h"

#include <cstring>

namespace monotape {
namespace {

constexpr int kRegisters = kPart * kTileRows / 16;  // of unpacked codes, in a part

using Register = uint8_t[16];

// The codes of a part, in the highest bits of bytes: [k / 4][row][4].
void align_codes(const CodeRow (&rows)[kTileRows], const Layout& layout, int first, Register (&out)[kRegisters]) {
  for (int lane = 0; lane < kTileRows; lane++)
    for (int k4 = 0; k4 < kPart / 4; k4++)
      std::memcpy(&out[k4 * 2 + lane / 4][lane % 4 * 4], rows[lane].codes + first + 4 * k4, 4);
  const int sign = layout.table ? 0 : 1 << (layout.bits - 1), shift = 8 - layout.bits;
  for (Register& bytes : out)
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((byte ^ sign) << shift);
}

// out[j] = op(j) for the bytes of a register.
template <class Op>
inline void put(uint8_t* out, Op op) {
  for (int j = 0; j < 16; j++) out[j] = static_cast<uint8_t>(op(j));
}

// Registers into the fewest that hold them: the inverse of Codes<bits>::unpack().
void put_codes(int bits, const Register (&w)[kRegisters], uint8_t* out) {
  if (bits == 8) std::memcpy(out, w, sizeof w);
  if (bits == 4)
    for (int i = 0; i < kRegisters; i += 2, out += 16) put(out, [&](int j) { return w[i][j] >> 4 | w[i + 1][j]; });
  if (bits == 5)
    for (int i = 0; i < kRegisters; i += 8, out += 5 * 16) {
      const uint8_t *a = w[i + 5], *b = w[i + 6], *c = w[i + 7];
      put(out, [&](int j) { return w[i][j] | a[j] >> 5; });
      put(out + 16, [&](int j) { return w[i + 1][j] | b[j] >> 5; });
      put(out + 32, [&](int j) { return w[i + 2][j] | c[j] >> 5; });
      put(out + 48, [&](int j) { return w[i + 3][j] | (a[j] >> 3 & 3) << 1 | (c[j] >> 4 & 1); });
      put(out + 64, [&](int j) { return w[i + 4][j] | (b[j] >> 3 & 3) << 1 | (c[j] >> 3 & 1); });
    }
  if (bits == 6)
    for (int i = 0; i < kRegisters; i += 4, out += 3 * 16) {
      const uint8_t* a = w[i + 3];
      put(out, [&](int j) { return w[i][j] | a[j] >> 6; });
      put(out + 16, [&](int j) { return w[i + 1][j] | (a[j] >> 4 & 3); });
      put(out + 32, [&](int j) { return w[i + 2][j] | (a[j] >> 2 & 3); });
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
    if (layout.head_bytes == kBytes) out = put_lanes(rows, &CodeRow::s, block, out);
    else if (layout.head_bytes) out = put_lanes(rows, &CodeRow::d, block, out);
    if (layout.head_bytes > kHalves) out = put_lanes(rows, &CodeRow::e, block, out);
    for (int part = block * parts; part < (block + 1) * parts; part++) {
      out = put_scales(format, rows, part, out);
      Register aligned[kRegisters];
      align_codes(rows, layout, part * kPart, aligned);
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
