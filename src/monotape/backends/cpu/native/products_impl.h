// Matrix products, and what they read: activations as integers, alone or in panels. Part of kernels_impl.h.

namespace monotape::MONOTAPE_ISA {
namespace {

constexpr int kSliceBlocks = 64;  // blocks along k for which a panel goes over a tile: 17 KB of it stay in the L1 cache

constexpr size_t kLineBytes = 64;

size_t round_to_lines(size_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

size_t prepared_bytes(Format format, int padded_k) {
  return round_to_lines(format == Format::q8 ? padded_k / kQ8Block * sizeof(Q8Block) : sizeof(float) * padded_k);
}

size_t panel_bytes(Format format, int padded_k) {
  return format == Format::q8 ? round_to_lines(padded_k / kQ8Block * sizeof(PanelBlock))
                              : kPanelRows * prepared_bytes(format, padded_k);
}

// The scale of 32 values as integers: the smallest power of two for which no integer exceeds 127 * 256 + 127, the largest
// that splits into two int8. Multiplying by a power of two never rounds, so sums of products may be scaled before or
// after they are converted. A NaN where a value is not finite: integers cannot carry it, so the scale does.
float integer_scale(const float* x) {
  constexpr float kRoom = 1.004f;  // 2^15 / 32639, rounded up
  constexpr uint32_t kLowest = 15, kHighest = 237;  // exponents for which scales and offsets of sums are normal numbers
  f32x8 largest = broadcast(0), probe = broadcast(0);  // zero times what is not finite is a NaN
  for (int i = 0; i < kQ8Block; i += 8) {
    const f32x8 v = load(x + i);
    largest = max(largest, max(v, sub(broadcast(0), v)));
    probe = fma(v, broadcast(0), probe);
  }
  const uint32_t exponent = f32_to_bits(peak(largest) * kRoom) >> 23;
  if (!(sum(probe) == 0) || exponent > kHighest) return bits_to_f32(0x7fc00000u);
  return bits_to_f32(((exponent < kLowest ? kLowest : exponent) - 14) << 23);
}

void to_integers(const float* x, float scale, int16_t* integers) {
  if (scale != scale) {
    std::memset(integers, 0, sizeof(int16_t) * kQ8Block);
    return;
  }
  const f32x8 inverse = broadcast(bits_to_f32((254u << 23) - f32_to_bits(scale)));
  for (int i = 0; i < kQ8Block; i += 8) store_integers(integers + i, mul(load(x + i), inverse));
}

// put(block, integers, scale) for every block of 32 of a row. The scales of some blocks come first and then their
// integers, because a scale takes long to find and does not depend on the one before.
template <class Put>
inline void quantise(const float* x, int k, int padded_k, Put put) {
  constexpr int kAhead = 16;
  float scales[kAhead], last[kQ8Block] = {};
  if (k < padded_k) std::memcpy(last, x + padded_k - kQ8Block, sizeof(float) * (k - (padded_k - kQ8Block)));
  const int blocks = padded_k / kQ8Block, whole = k / kQ8Block;
  const auto values = [&](int block) { return block < whole ? x + block * kQ8Block : last; };
  for (int first = 0; first < blocks; first += kAhead) {
    const int end = first + kAhead < blocks ? first + kAhead : blocks;
    for (int b = first; b < end; b++) scales[b - first] = integer_scale(values(b));
    for (int b = first; b < end; b++) {
      int16_t integers[kQ8Block];
      to_integers(values(b), scales[b - first], integers);
      put(b, integers, scales[b - first]);
    }
  }
}

void prepare(Format format, const float* x, int k, int padded_k, uint8_t* prepared) {
  if (format != Format::q8) {
    std::memcpy(prepared, x, sizeof(float) * k);
    return;
  }
  auto* blocks = reinterpret_cast<Q8Block*>(prepared);
  quantise(x, k, padded_k, [&](int b, const int16_t* integers, float scale) { put_row(integers, scale, blocks[b]); });
}

void prepare_in_panel(Format format, const float* x, int k, int padded_k, int row, uint8_t* panel) {
  if (format != Format::q8) {
    float* out = reinterpret_cast<float*>(panel + row * prepared_bytes(format, padded_k));
    if (x) std::memcpy(out, x, sizeof(float) * k);
    else std::memset(out, 0, sizeof(float) * k);
    return;
  }
  auto* blocks = reinterpret_cast<PanelBlock*>(panel);
  if (!x) {
    constexpr int16_t kZeros[kQ8Block] = {};
    for (int b = 0; b < padded_k / kQ8Block; b++) put_panel_row(kZeros, 1.0f, row, blocks[b]);
    return;
  }
  quantise(x, k, padded_k,
           [&](int b, const int16_t* integers, float scale) { put_panel_row(integers, scale, row, blocks[b]); });
}

// One tile times R rows; two interleaved sums along k keep both multipliers of a core busy.
template <Format F, int R>
inline void float_tile(const uint8_t* tile, int k, const float* const* x, f32x8* y) {
  constexpr size_t stride = kTileRows * value_bytes(F);
  f32x8 even[R], odd[R];
  for (int r = 0; r < R; r++) even[r] = odd[r] = broadcast(0);
  int i = 0;
  for (; i + 1 < k; i += 2, tile += 2 * stride) {
    const f32x8 w0 = load_as<F>(tile), w1 = load_as<F>(tile + stride);
    for (int r = 0; r < R; r++) {
      even[r] = fma(w0, broadcast(x[r][i]), even[r]);
      odd[r] = fma(w1, broadcast(x[r][i + 1]), odd[r]);
    }
  }
  if (i < k)
    for (int r = 0; r < R; r++) even[r] = fma(load_as<F>(tile), broadcast(x[r][i]), even[r]);
  for (int r = 0; r < R; r++) y[r] = add(even[r], odd[r]);
}

// A block is 8 scales (f16), then 32 k values of 8 rows as [k / 4][row][4] int8.
inline f32x8 q8_tile(const uint8_t* tile, int k, const Q8Block* x) {
  f32x8 y = broadcast(0);
  for (int b = 0; b < k / kQ8Block; b++, tile += kQ8BlockBytes) {
    const f32x8 scales = load_f16(reinterpret_cast<const uint16_t*>(tile));
    const f32x8 dots = q8_block(reinterpret_cast<const int8_t*>(tile + 2 * kTileRows), x[b]);
    y = fma(mul(dots, broadcast(x[b].scale)), scales, y);
  }
  return y;
}

template <Format F>
void multiply_as(const uint8_t* tiles, int count, int k, const uint8_t* prepared, float* y) {
  for (int t = 0; t < count; t++, tiles += tile_bytes(F, k), y += kTileRows) {
    f32x8 sums;
    if constexpr (F == Format::q8) {
      sums = q8_tile(tiles, k, reinterpret_cast<const Q8Block*>(prepared));
    } else {
      const float* x = reinterpret_cast<const float*>(prepared);
      float_tile<F, 1>(tiles, k, &x, &sums);
    }
    store(y, sums);
  }
}

void multiply(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* prepared, float* y) {
  switch (format) {
    case Format::f32: return multiply_as<Format::f32>(tiles, count, padded_k, prepared, y);
    case Format::f16: return multiply_as<Format::f16>(tiles, count, padded_k, prepared, y);
    case Format::bf16: return multiply_as<Format::bf16>(tiles, count, padded_k, prepared, y);
    case Format::q8: return multiply_as<Format::q8>(tiles, count, padded_k, prepared, y);
  }
}

// A tile goes over k in slices. All panels use a slice while it lies in the L1 cache, and its scales are widened once
// for all of them; sums wait in y for the next slice. Each panel brings its share of the next slice.
void q8_tile_panels(const uint8_t* tile, int k, const uint8_t* panels, size_t stride, int rows, float* y,
                    size_t y_stride) {
  static constexpr float kZeros[kTileRows] = {};
  float scales[kSliceBlocks * kTileRows];
  const int blocks = k / kQ8Block;
  for (int first = 0; first < blocks; first += kSliceBlocks) {
    const int count = blocks - first < kSliceBlocks ? blocks - first : kSliceBlocks;
    const uint8_t* slice = tile + first * kQ8BlockBytes;
    for (int b = 0; b < count; b++)
      store(scales + b * kTileRows, load_f16(reinterpret_cast<const uint16_t*>(slice + b * kQ8BlockBytes)));
    const uint8_t* next = slice + count * kQ8BlockBytes;  // the tape goes on with the next slice, or the next tile
    const size_t share = (count * kQ8BlockBytes * kPanelRows / rows + kLineBytes) / kLineBytes * kLineBytes;
    for (int r = 0; r < rows; r += kPanelRows, next += share) {
      for (size_t at = 0; at < share; at += kLineBytes) __builtin_prefetch(next + at);
      const auto* panel = reinterpret_cast<const PanelBlock*>(panels + r / kPanelRows * stride) + first;
      float* out = y + r * y_stride;
      q8_panel(slice, count, panel, scales, first ? out : kZeros, first ? y_stride : 0, out, y_stride);
    }
  }
}

template <Format F>
void float_tile_panels(const uint8_t* tile, int k, const uint8_t* panels, size_t stride, int rows, float* y,
                       size_t y_stride) {
  for (int r = 0; r < rows; r += kPanelRows) {
    const float* x[kPanelRows];
    f32x8 sums[kPanelRows];
    for (int j = 0; j < kPanelRows; j++)
      x[j] = reinterpret_cast<const float*>(panels + r / kPanelRows * stride + j * prepared_bytes(F, k));
    float_tile<F, kPanelRows>(tile, k, x, sums);
    for (int j = 0; j < kPanelRows; j++) store(y + (r + j) * y_stride, sums[j]);
  }
}

void multiply_panels(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* panels,
                     size_t panel_stride, int rows, float* y, size_t y_stride) {
  const auto run = format == Format::f32    ? float_tile_panels<Format::f32>
                   : format == Format::f16  ? float_tile_panels<Format::f16>
                   : format == Format::bf16 ? float_tile_panels<Format::bf16>
                                            : q8_tile_panels;
  for (int t = 0; t < count; t++, tiles += tile_bytes(format, padded_k), y += kTileRows)
    run(tiles, padded_k, panels, panel_stride, rows, y, y_stride);
}

}  // namespace
}  // namespace monotape::MONOTAPE_ISA
