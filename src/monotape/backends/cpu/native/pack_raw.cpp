// Packs rows of GGUF blocks straight from the mapped file. Nothing is rounded.
#include <cstring>
#include <vector>

#include "../../cuda/native/gguf_row.h"
#include "pack_codes.h"

namespace monotape {
namespace {

// One row of a tile, in the shape of the packer. A row that only fills the tile has zeros as scales.
struct RawRow {
  GgufRow stored;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> d, e;
  std::vector<int8_t> s, m;

  CodeRow view() const { return {codes.data(), d.data(), e.data(), s.data(), m.data(), nullptr, nullptr}; }

  void clear(Format format, int padded_k) {
    const Layout layout = layout_of(format);
    codes.assign(padded_k, format == Format::q8 ? 128 : 0);  // as the other packers fill tiles
    d.assign(padded_k / layout.block, 0);
    e.assign(padded_k / layout.block, 0);
    s.assign(padded_k / layout.group, 0);
    m.assign(padded_k / layout.group, 0);
  }

  // Values first_k to first_k + k of a row. False where a scale is not finite.
  bool read(Format format, Kind kind, const uint8_t* row, int first_k, int k) {
    const Layout layout = layout_of(format);
    const int values = block_values(kind), block = first_k / values, end = (first_k + k + values - 1) / values;
    const int skipped = first_k - block * values;
    if (!stored.read(kind, row + static_cast<size_t>(block) * block_bytes_of(kind), end - block)) return false;
    std::memcpy(codes.data(), stored.codes.data() + skipped, k);
    if (is_k(kind)) {
      for (int at = 0; at < k; at += layout.block) {
        d[at / layout.block] = stored.d[(skipped + at) / values];
        e[at / layout.block] = stored.e[(skipped + at) / values];
      }
      for (int at = 0; at < k; at += layout.group) {
        s[at / layout.group] = stored.s[(skipped + at) / 16];
        m[at / layout.group] = stored.m[(skipped + at) / 16];
      }
      return true;
    }
    for (int at = 0; at < k; at += layout.block) {
      d[at / layout.block] = stored.d[at / values];
      e[at / layout.block] = stored.e[at / values];
    }
    const int moved = layout.centred ? (1 << (layout.bits - 1)) - middle_of(kind) : 0;
    for (int i = 0; moved && i < k; i++) codes[i] = static_cast<uint8_t>(codes[i] + moved);
    return true;
  }
};

}  // namespace
}  // namespace monotape

extern "C" {

using namespace monotape;

// `count` rows become count / 8 tiles: row i is row order[i] of the file, or fills its tile (-1). Of each, values first_k
// to first_k + k. Returns -1, or the first i with a scale that is not finite.
int64_t monotape_pack_raw(Format format, Kind kind, const uint8_t* rows, int64_t row_bytes, const int64_t* order,
                          int64_t count, int32_t first_k, int32_t k, int32_t padded_k, uint8_t* out) {
  std::vector<RawRow> of_tile(kTileRows);
  for (int64_t tile = 0; tile < count / kTileRows; tile++, out += tile_bytes(format, padded_k)) {
    CodeRow views[kTileRows];
    for (int lane = 0; lane < kTileRows; lane++) {
      const int64_t at = tile * kTileRows + lane;
      of_tile[lane].clear(format, padded_k);
      if (order[at] >= 0 && !of_tile[lane].read(format, kind, rows + order[at] * row_bytes, first_k, k)) return at;
      views[lane] = of_tile[lane].view();
    }
    put_tile(format, views, padded_k, out);
  }
  return -1;
}

}  // extern "C"
