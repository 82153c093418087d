// From the mapped file to tiles of a GPU's tape, whatever the two formats are: many runs of rows in one call, during which
// Python's other threads go on. Nothing is rounded that was not asked to be.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../cpu/native/half.h"
#include "gguf_row.h"
#include "rounding.h"
#include "tile.h"

namespace monotape {
namespace {

// A tensor: rows one after another.
struct Source {
  const uint8_t* data;
  int64_t pitch;     // bytes from row to row
  int64_t columns;
  Kind kind;
  int64_t head_dim;  // of heads whose rotary pairs lie side by side; 0: rows lie in order
};
static_assert(sizeof(Source) == 40);

// Consecutive rows of a tensor, some of their columns, and where their tiles go.
struct Run {
  int64_t tensor;       // of a layer's sources
  int64_t first_row, rows, first_k, k, padded_k;
  int64_t at, step;     // bytes into the layer's part of the piece, from tile to tile
  Format format;
  float* scales;        // of rows in layer 0, or null
  int64_t layer_scales, tile_scales;  // from layer to layer, from tile to tile
};
static_assert(sizeof(Run) == 96);

const uint8_t* row_of(const Source& source, int64_t row) {
  if (source.head_dim) {
    const int64_t within = row % source.head_dim, half = within / (source.head_dim / 2);
    row += -within + 2 * (within % (source.head_dim / 2)) + half;
  }
  return source.data + row * source.pitch;
}

uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return half;
}

// What a thread needs for one row.
struct Scratch {
  GgufRow gguf;
  std::vector<float> floats;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
  Cost cost;
};

// Columns from `first_k` on, by the numbers of the stored groups of `size` columns that they are in.
struct Columns {
  int64_t first_k, k, skipped;  // skipped: columns of the stored groups that are before first_k
  int64_t groups(int width) const { return (k + width - 1) / width; }
  int64_t stored(int64_t group, int width, int size) const { return (skipped + group * width) / size; }
};

void put_blocks_of_32(Tile& tile, int lane, Kind kind, const GgufRow& row, const Columns& columns) {
  const int width = tile.shape.group;
  for (int64_t g = 0; g < columns.groups(width); g++) {
    const int64_t b = columns.stored(g, width, 32);
    if (tile.format == Format::mxfp4) {
      tile.groups<uint8_t>(0, lane)[g] = row.exponents[b];
    } else if (tile.format == Format::wide) {
      const uint8_t exponent = row.exponents[b];
      float scale = kind == Kind::mxfp4 ? bits_to_f32(exponent ? exponent << 23 : 0x00400000u) : f16_to_f32(row.d[b]);
      float shift = kind == Kind::q4_1 ? f16_to_f32(row.e[b]) : -static_cast<float>(middle_of(kind)) * scale;
      if (kind == Kind::mxfp4) shift = scale * -6.0f, scale *= 0.5f;
      tile.groups<float>(0, lane)[g] = scale;
      tile.groups<float>(1, lane)[g] = shift;
    } else {
      tile.groups<uint16_t>(0, lane)[g] = row.d[b];
      if (tile.shape.group_planes == 2)
        tile.groups<uint16_t>(1, lane)[g] = kind == Kind::q4_1 ? row.e[b] : f32_to_f16(static_cast<float>(middle_of(kind)));
    }
  }
  if (tile.shape.row_scales) tile.row_scale[lane] = 1;
}

void put_k_quant(Tile& tile, int lane, const GgufRow& row, const Columns& columns) {
  const int width = tile.shape.group;
  for (int64_t g = 0; g < columns.groups(width); g++) {
    const int64_t stored = columns.stored(g, width, 16), b = stored / 16;
    if (tile.format == Format::wide) {
      tile.groups<float>(0, lane)[g] = f16_to_f32(row.d[b]) * row.s[stored];
      tile.groups<float>(1, lane)[g] = -(f16_to_f32(row.e[b]) * row.m[stored]);
      continue;
    }
    tile.groups<int8_t>(0, lane)[g] = row.s[stored];
    if (tile.shape.group_planes == 2) tile.groups<int8_t>(1, lane)[g] = row.m[stored];
  }
  for (int64_t block = 0; tile.shape.row_planes && block < columns.groups(kBlockK); block++) {
    const int64_t b = columns.stored(block, kBlockK, 256);
    tile.rows(0, lane)[block] = row.d[b];
    if (tile.shape.row_planes == 2) tile.rows(1, lane)[block] = row.e[b];
  }
}

// Another middle than the file's, or halves of e2m1 as integers.
void move_codes(Tile& tile, int lane, Kind kind, const uint8_t* codes, int64_t k) {
  uint8_t* out = tile.codes(lane);
  std::memcpy(out, codes, k);
  if (kind == Kind::mxfp4 && tile.format == Format::wide) {
    constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    for (int64_t i = 0; i < k; i++) out[i] = kTable[out[i]];
  }
  const int middle = tile.format == Format::q8 ? 128 : tile.format == Format::q5_0 ? 16 : middle_of(kind);
  if (const int moved = middle - middle_of(kind))
    for (int64_t i = 0; i < k; i++) out[i] = static_cast<uint8_t>(out[i] + moved);
}

bool put_gguf(Tile& tile, int lane, const Source& source, const uint8_t* row, const Run& run, Scratch& scratch) {
  const int values = block_values(source.kind);
  const int64_t first = run.first_k / values, last = (run.first_k + run.k + values - 1) / values;
  if (!scratch.gguf.read(source.kind, row + first * block_bytes_of(source.kind), last - first)) return false;
  const Columns columns{run.first_k, run.k, run.first_k - first * values};
  move_codes(tile, lane, is_k(source.kind) ? Kind::q4_0 : source.kind, scratch.gguf.codes.data() + columns.skipped, run.k);
  is_k(source.kind) ? put_k_quant(tile, lane, scratch.gguf, columns)
                    : put_blocks_of_32(tile, lane, source.kind, scratch.gguf, columns);
  return true;
}

constexpr int64_t padded(int64_t columns) { return (columns + kRoundedTogether - 1) / kRoundedTogether * kRoundedTogether; }

// The whole row as float32, and zeros up to whole groups; false where a value is not finite.
bool widen(const Source& source, const uint8_t* row, std::vector<float>& out) {
  out.assign(padded(source.columns), 0.0f);
  const uint16_t exponent = source.kind == Kind::bf16 ? 0x7f80 : 0x7c00;
  uint16_t bad = 0;
  for (int64_t i = 0; i < source.columns; i++) {
    const uint16_t half = half_at(row + 2 * i);
    bad |= (half & exponent) == exponent ? 1 : 0;
  }
  if (source.kind == Kind::bf16)
    for (int64_t i = 0; i < source.columns; i++) out[i] = bf16_to_f32(half_at(row + 2 * i));
  else
    for (int64_t i = 0; i < source.columns; i++) out[i] = f16_to_f32(half_at(row + 2 * i));
  return !bad;
}

bool put_rounded(Tile& tile, int lane, const Source& source, const uint8_t* row, const Run& run, Scratch& scratch) {
  if (!widen(source, row, scratch.floats)) return false;
  scratch.codes.resize(scratch.floats.size());
  if (tile.format == Format::fp8) {
    tile.row_scale[lane] = round_fp8(scratch.floats.data(), scratch.floats.size(), scratch.codes.data(), scratch.cost);
    std::memcpy(tile.codes(lane), scratch.codes.data() + run.first_k, run.k);
    return true;
  }
  const int size = tile.format == Format::q8 ? 32 : 128, width = tile.shape.group;
  const int64_t first = run.first_k / size, last = (run.first_k + run.k + size - 1) / size;
  scratch.scales.resize(last);
  bool good = true;
  for (int64_t g = first; g < last; g++) {
    const int64_t at = g * size;
    scratch.scales[g] = (size == 32 ? round_q8 : round_int4)(scratch.floats.data() + at, scratch.codes.data() + at, scratch.cost);
    good &= (scratch.scales[g] & 0x7c00u) != 0x7c00u;
  }
  const Columns columns{run.first_k, run.k, run.first_k};
  for (int64_t g = 0; g < columns.groups(width); g++)
    tile.groups<uint16_t>(0, lane)[g] = scratch.scales[columns.stored(g, width, size)];
  std::memcpy(tile.codes(lane), scratch.codes.data() + run.first_k, run.k);
  if (tile.shape.row_scales) tile.row_scale[lane] = 1;
  return good;
}

// -1, or the first row that holds a number that is not finite.
int64_t pack_coded(const Run& run, const Source& source, int64_t layer, uint8_t* out, Scratch& scratch) {
  Tile tile(run.format, run.padded_k);
  for (int64_t first = 0, number = 0; first < run.rows; first += kTileRows, number++) {
    if (first) tile.clear();
    for (int lane = 0; lane < kTileRows && first + lane < run.rows; lane++) {
      const uint8_t* row = row_of(source, run.first_row + first + lane);
      const bool good = is_gguf(source.kind) ? put_gguf(tile, lane, source, row, run, scratch)
                                             : put_rounded(tile, lane, source, row, run, scratch);
      if (!good) return first + lane;
    }
    tile.put(out + number * run.step);
    if (run.scales)
      std::memcpy(run.scales + layer * run.layer_scales + number * run.tile_scales, tile.row_scale, sizeof tile.row_scale);
  }
  return -1;
}

// 16-bit floats that are only moved: blocks of 8 rows and 32 values.
int64_t pack_halves(const Run& run, const Source& source, uint16_t exponent, uint8_t* out) {
  for (int64_t first = 0; first < run.rows; first += kTileRows, out += run.step)
    for (int lane = 0; lane < kTileRows; lane++) {
      const bool there = first + lane < run.rows;
      const uint8_t* row = there ? row_of(source, run.first_row + first + lane) + 2 * run.first_k : nullptr;
      for (int64_t k = 0; k < run.padded_k; k += kHalfBlockK) {
        uint16_t values[kHalfBlockK] = {};
        const int64_t count = run.k - k < kHalfBlockK ? run.k - k : kHalfBlockK;
        if (there && count > 0) std::memcpy(values, row + 2 * k, 2 * count);
        uint16_t bad = 0;
        for (uint16_t value : values) bad |= (value & exponent) == exponent ? 1 : 0;
        if (bad) return first + lane;
        std::memcpy(out + k / kHalfBlockK * 512 + lane * 64, values, 64);
      }
    }
  return -1;
}

// Value i of a row that was read: rounded once to float32, as weights/gguf_matrix.py has it.
float value_at(Kind kind, const GgufRow& row, int64_t i) {
  const int code = row.codes[i];
  if (kind == Kind::mxfp4) {
    constexpr float kTable[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const uint8_t exponent = row.exponents[i / 32];
    return kTable[code] * bits_to_f32(exponent ? exponent << 23 : 0x00400000u);
  }
  if (!is_k(kind)) {
    const float scale = f16_to_f32(row.d[i / 32]);
    return kind == Kind::q4_1 ? scale * code + f16_to_f32(row.e[i / 32]) : scale * (code - middle_of(kind));
  }
  const float scale = f16_to_f32(row.d[i / 256]) * row.s[i / 16];
  return kind == Kind::q6_k ? scale * (code - 32) : scale * code - f16_to_f32(row.e[i / 256]) * row.m[i / 16];
}

uint16_t to_bf16(float value) {  // to nearest, ties to even
  const uint32_t bits = f32_to_bits(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace
}  // namespace monotape

extern "C" {

using namespace monotape;

// Bytes of a block of 8 rows and 128 values; plan/formats.py must say the same.
int64_t monotape_block_bytes(Format format) { return block_bytes(format); }

// The same runs of `layers` layers, from number `layer` on: `sources` has `tensors` of each layer, from layer 0 on, and a
// layer's part of `out` is layer_bytes after that of the layer before. `exponent`: of an infinity among halves that are
// moved. Returns -1, or which layer and run hold a number that is not finite, as layer * count + run; `bad_row` then is its
// row, from the first of the run. `costs`: squares of all weights that were rounded, and of their errors, added to.
int64_t monotape_pack_stored(const Run* runs, int64_t count, const Source* sources, int64_t tensors, int64_t layer,
                             int64_t layers, int64_t layer_bytes, uint16_t exponent, uint8_t* out, int64_t* bad_row,
                             double* costs) {
  Scratch scratch;
  for (int64_t l = 0; l < layers; l++, out += layer_bytes)
    for (int64_t i = 0; i < count; i++) {
      const Run& run = runs[i];
      const Source& source = sources[(layer + l) * tensors + run.tensor];
      *bad_row = source.kind == Kind::half ? pack_halves(run, source, exponent, out + run.at)
                                           : pack_coded(run, source, layer + l, out + run.at, scratch);
      if (*bad_row >= 0) return l * count + i;
    }
  costs[0] += scratch.cost.squares;
  costs[1] += scratch.cost.squared_errors;
  return -1;
}

// Tiles of rows that were read elsewhere: codes, one a byte, and planes of the numbers of groups and of blocks, as many as
// the format has. A tile is `step` bytes after the one before it.
void monotape_pack_codes(Format format, int64_t tiles, int64_t k, const uint8_t* codes, const uint8_t* const* groups,
                         const uint16_t* const* rows, uint8_t* out, int64_t step) {
  Tile tile(format, k);
  const int64_t group_bytes = tile.shape.group ? k / tile.shape.group * tile.shape.element : 0, blocks = k / kBlockK;
  for (int64_t t = 0; t < tiles; t++, out += step) {
    std::memcpy(tile.codes(0), codes + t * kTileRows * k, kTileRows * k);
    for (int p = 0; p < tile.shape.group_planes; p++)
      std::memcpy(tile.groups<uint8_t>(p, 0), groups[p] + t * kTileRows * group_bytes, kTileRows * group_bytes);
    for (int p = 0; p < tile.shape.row_planes; p++)
      std::memcpy(tile.rows(p, 0), rows[p] + t * kTileRows * blocks, 2 * kTileRows * blocks);
    tile.put(out);
  }
}

// Rows of GGUF blocks as rows of 16-bit floats: an embedding that is no head. Returns -1, or the first row that holds a
// number which is not finite, or not once it is rounded.
int64_t monotape_unpack_rows(const Source* source, int64_t first, int64_t rows, int64_t is_bf16, uint16_t* out) {
  GgufRow found;
  const uint16_t exponent = is_bf16 ? 0x7f80 : 0x7c00;
  for (int64_t r = 0; r < rows; r++) {
    if (!found.read(source->kind, row_of(*source, first + r), source->columns / block_values(source->kind))) return r;
    uint16_t bad = 0;
    for (int64_t i = 0; i < source->columns; i++, out++) {
      const float value = value_at(source->kind, found, i);
      *out = is_bf16 ? to_bf16(value) : f32_to_f16(value);
      bad |= (*out & exponent) == exponent ? 1 : 0;
    }
    if (bad) return r;
  }
  return -1;
}

// Rows of float32 to codes and scales; `format` is fp8, int4_g128 or q8. Scales are float32 for fp8, else float16.
void monotape_round_rows(Format format, const float* values, int64_t rows, int64_t columns, uint8_t* codes, void* scales) {
  Cost cost;
  std::vector<float> row(padded(columns));
  std::vector<uint8_t> found(row.size());
  uint16_t* halves = static_cast<uint16_t*>(scales);
  const int size = format == Format::q8 ? 32 : 128;
  for (int64_t r = 0; r < rows; r++, codes += columns) {
    std::memcpy(row.data(), values + r * columns, 4 * columns);
    if (format == Format::fp8) {
      static_cast<float*>(scales)[r] = round_fp8(row.data(), row.size(), found.data(), cost);
    } else {
      for (int64_t at = 0; at < columns; at += size)
        *halves++ = (size == 32 ? round_q8 : round_int4)(row.data() + at, found.data() + at, cost);
    }
    std::memcpy(codes, found.data(), columns);
  }
}

}  // extern "C"
