// Lays 16-bit weights out as a GPU's tape has them (blocks.py says how), straight from the mapped file: many runs of
// rows in one call, during which Python's other threads go on. Every value is checked on its way.
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTileRows = 8;
constexpr int64_t kBlockK = 32;
constexpr int64_t kBlockRowBytes = 2 * kBlockK;
constexpr int64_t kBlockBytes = kTileRows * kBlockRowBytes;

// Consecutive rows of a tensor, and where their tiles go. Tiles are padded with zeros.
struct Run {
  int64_t tensor;     // index into the addresses of a layer
  int64_t offset;     // bytes from there to the first value
  int64_t pitch;      // bytes from row to row
  int64_t rows;
  int64_t k;          // values of a row
  int64_t padded_k;   // a multiple of kBlockK
  int64_t at;         // bytes into the layer's part of the piece
  int64_t step;       // bytes from tile to tile
};
static_assert(sizeof(Run) == 64);

// Copies one row of a block, of which `count` values are there; whether any is an infinity or a NaN, which have an
// exponent of all ones.
bool put_block_row(const uint8_t* source, int64_t count, uint16_t exponent, uint8_t* out) {
  uint16_t values[kBlockK] = {};
  std::memcpy(values, source, 2 * count);  // in a file nothing needs to be aligned
  uint16_t bad = 0;
  for (int i = 0; i < kBlockK; i++) bad |= (values[i] & exponent) == exponent ? 1 : 0;
  std::memcpy(out, values, kBlockRowBytes);
  return bad != 0;
}

// One row of a tile: its part of each block.
bool put_row(const uint8_t* source, const Run& run, uint16_t exponent, uint8_t* out) {
  bool bad = false;
  int64_t k = 0;
  for (; k + kBlockK <= run.k; k += kBlockK)
    bad |= put_block_row(source + 2 * k, kBlockK, exponent, out + k / kBlockK * kBlockBytes);
  for (; k < run.padded_k; k += kBlockK)
    bad |= put_block_row(source + 2 * k, run.k > k ? run.k - k : 0, exponent, out + k / kBlockK * kBlockBytes);
  return bad;
}

// -1, or the first row that holds an infinity or a NaN.
int64_t pack_run(const Run& run, const uint8_t* source, uint16_t exponent, uint8_t* out) {
  const int64_t padded_rows = (run.rows + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t row = 0; row < padded_rows; row++) {
    uint8_t* target = out + row / kTileRows * run.step + row % kTileRows * kBlockRowBytes;
    if (row < run.rows) {
      if (put_row(source + row * run.pitch, run, exponent, target)) return row;
    } else {
      for (int64_t block = 0; block < run.padded_k / kBlockK; block++)
        std::memset(target + block * kBlockBytes, 0, kBlockRowBytes);
    }
  }
  return -1;
}

}  // namespace

extern "C" {

// The same runs of `layers` layers: `addresses` has where each layer's tensors begin, `tensors` of them a layer, and a
// layer's part of `out` is layer_bytes after that of the layer before. Returns -1, or which layer and run hold a value
// that is not finite, as layer * count + run; `bad_row` then is its row, from the first of the run.
int64_t monotape_pack_blocks(const Run* runs, int64_t count, const uint8_t* const* addresses, int64_t tensors,
                             int64_t layers, int64_t layer_bytes, uint16_t exponent, uint8_t* out, int64_t* bad_row) {
  for (int64_t layer = 0; layer < layers; layer++, addresses += tensors, out += layer_bytes)
    for (int64_t i = 0; i < count; i++) {
      *bad_row = pack_run(runs[i], addresses[runs[i].tensor] + runs[i].offset, exponent, out + runs[i].at);
      if (*bad_row >= 0) return layer * count + i;
    }
  return -1;
}

}  // extern "C"
