// Matrix products, and what they read: activations as integers, alone or in panels. Part of kernels_impl.h.

namespace monotape::MONOTAPE_ISA {
namespace {

constexpr size_t kLineBytes = 64;

size_t round_to_lines(size_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

size_t prepared_bytes(Format format, int padded_k) {
  if (is_float(format)) return round_to_lines(sizeof(float) * padded_k);
  return layout_of(format).group == 32 ? round_to_lines(padded_k / 32 * sizeof(InputBlock<32>))
                                       : round_to_lines(padded_k / 16 * sizeof(InputBlock<16>));
}

size_t panel_bytes(Format format, int padded_k) {
  if (is_float(format)) return kPanelRows * prepared_bytes(format, padded_k);
  return layout_of(format).group == 32 ? round_to_lines(padded_k / 32 * sizeof(PanelBlock<32>))
                                       : round_to_lines(padded_k / 16 * sizeof(PanelBlock<16>));
}

// The scale of 32 values as integers: the smallest power of two for which no integer exceeds 127 * 256 + 127, the largest
// that splits into two int8. Multiplying by a power of two never rounds, so sums of products may be scaled before or
// after they are converted. A NaN where a value is not finite: integers cannot carry it, so the scale does.
float integer_scale(const float* x) {
  constexpr float kRoom = 1.004f;  // 2^15 / 32639, rounded up
  // Exponents for which scales, even divided by 2^4, and offsets of sums are normal numbers.
  constexpr uint32_t kLowest = 19, kHighest = 237;
  f32x8 largest = broadcast(0), probe = broadcast(0);  // zero times what is not finite is a NaN
  for (int i = 0; i < kPart; i += 8) {
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
    std::memset(integers, 0, sizeof(int16_t) * kPart);
    return;
  }
  const f32x8 inverse = broadcast(bits_to_f32((254u << 23) - f32_to_bits(scale)));
  for (int i = 0; i < kPart; i += 8) store_integers(integers + i, mul(load(x + i), inverse));
}

// put(part, integers, scale) for every 32 values of a row; values past k are zeros. The scales of some parts come first
// and then their integers, because a scale takes long to find and does not depend on the one before.
template <class Put>
inline void quantise(const float* x, int k, int padded_k, Put put) {
  constexpr int kAhead = 16;
  static constexpr float kZeros[kPart] = {};
  float scales[kAhead], last[kPart] = {};
  const int parts = padded_k / kPart, whole = k / kPart;
  if (k % kPart) std::memcpy(last, x + whole * kPart, sizeof(float) * (k % kPart));
  const auto values = [&](int part) { return part < whole ? x + part * kPart : part == whole ? last : kZeros; };
  for (int first = 0; first < parts; first += kAhead) {
    const int end = first + kAhead < parts ? first + kAhead : parts;
    for (int p = first; p < end; p++) scales[p - first] = integer_scale(values(p));
    for (int p = first; p < end; p++) {
      int16_t integers[kPart];
      to_integers(values(p), scales[p - first], integers);
      put(p, integers, scales[p - first]);
    }
  }
}

template <int Group>
void prepare_codes(const Layout& layout, const float* x, int k, int padded_k, uint8_t* prepared) {
  auto* blocks = reinterpret_cast<InputBlock<Group>*>(prepared);
  const int lacks = layout.centred ? 0 : 128;
  quantise(x, k, padded_k, [&](int part, const int16_t* integers, float scale) {
    for (int g = 0; g < kPart / Group; g++)
      put_row<Group>(integers + g * Group, scale, 8 - layout.value_bits(), lacks, blocks[part * (kPart / Group) + g]);
  });
}

void prepare(Format format, const float* x, int k, int padded_k, uint8_t* prepared) {
  if (is_float(format)) {
    std::memcpy(prepared, x, sizeof(float) * k);
    return;
  }
  const Layout layout = layout_of(format);
  (layout.group == 32 ? prepare_codes<32> : prepare_codes<16>)(layout, x, k, padded_k, prepared);
}

template <int Group>
void prepare_codes_in_panel(const Layout& layout, const float* x, int k, int padded_k, int row, uint8_t* panel) {
  auto* blocks = reinterpret_cast<PanelBlock<Group>*>(panel);
  const int shift = 8 - layout.value_bits(), lacks = layout.centred ? 0 : 128;
  if (!x) {
    constexpr int16_t kZeros[Group] = {};
    for (int b = 0; b < padded_k / Group; b++) put_panel_row<Group>(kZeros, 1.0f, shift, lacks, row, blocks[b]);
    return;
  }
  quantise(x, k, padded_k, [&](int part, const int16_t* integers, float scale) {
    for (int g = 0; g < kPart / Group; g++)
      put_panel_row<Group>(integers + g * Group, scale, shift, lacks, row, blocks[part * (kPart / Group) + g]);
  });
}

void prepare_in_panel(Format format, const float* x, int k, int padded_k, int row, uint8_t* panel) {
  if (!is_float(format)) {
    const Layout layout = layout_of(format);
    const auto run = layout.group == 32 ? prepare_codes_in_panel<32> : prepare_codes_in_panel<16>;
    return run(layout, x, k, padded_k, row, panel);
  }
  float* out = reinterpret_cast<float*>(panel + row * prepared_bytes(format, padded_k));
  if (x) std::memcpy(out, x, sizeof(float) * k);
  else std::memset(out, 0, sizeof(float) * k);
}

// Brings the lines of `bytes` bytes that the tape has kPrefetchAhead bytes further on. Beyond its end that is no fault.
inline __attribute__((always_inline)) void prefetch_ahead(const uint8_t* tape, int bytes) {
  if constexpr (kPrefetchAhead > 0)
    for (int at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(tape + kPrefetchAhead + at);
}

// One tile times R rows; two interleaved sums along k keep both multipliers of a core busy.
template <Format F, int R, bool Ahead = true>
inline void float_tile(const uint8_t* tile, int k, const float* const* x, f32x8* y) {
  constexpr size_t stride = kTileRows * value_bytes(F);
  f32x8 even[R], odd[R];
  for (int r = 0; r < R; r++) even[r] = odd[r] = broadcast(0);
  int i = 0;
  for (; i + 1 < k; i += 2, tile += 2 * stride) {
    if constexpr (Ahead) prefetch_ahead(tile, 2 * stride);
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

template <Format F, int Group, int R>
inline __attribute__((always_inline)) void dots_with(const uint8_t* codes, const InputBlock<Group>* x, f32x8 (&y)[R]) {
  if constexpr (layout_of(F).table) {
    alignas(16) int8_t values[kPart * kTileRows];
    look_up(codes, values);
    asm volatile("" ::: "memory");  // compilers do not connect these stores with what assembly reads
    dots_of<8>(reinterpret_cast<const uint8_t*>(values), x, y);
  } else {
    dots_of<layout_of(F).bits>(codes, x, y);
  }
}

// One tile of codes times R rows, whose blocks of activations alternate in `prepared`. Products with codes and sums with
// minima are added up apart: one order here, where they alternate, and in prefill, where they do not.
template <Format F, int R>
inline __attribute__((always_inline)) void code_tile(const uint8_t* tile, int k, const uint8_t* prepared, float* y,
                                                     size_t y_stride) {
  static constexpr Layout layout = layout_of(F);
  static constexpr int kGroups = kPart / layout.group;
  const auto* x = reinterpret_cast<const InputBlock<layout.group>*>(prepared);
  f32x8 products[R], minima[R];
  repeat<R>(MT_BODY(r) { products[r] = minima[r] = broadcast(0); });
  for (int b = 0; b < k / layout.block; b++) {
    const Scales<F> scales(tile);
    tile += layout.head_bytes;
    for (int p = 0; p < layout.block / kPart; p++, tile += layout.part_bytes()) {
      prefetch_ahead(tile, layout.part_bytes());
      repeat<kGroups>(MT_BODY(g) {
        const uint8_t* codes = tile + layout.scale_bytes + g * (layout.code_bytes() / kGroups);
        const f32x8 scale = scales.scale(tile, g);
        f32x8 dots[R];
        dots_with<F>(codes, x, dots);
        repeat<R>(MT_BODY(r) { products[r] = fma(dots[r], scale, products[r]); });
        if constexpr (layout.has_minimum) {
          const f32x8 minimum = scales.minimum(tile, g);
          repeat<R>(MT_BODY(r) { minima[r] = add_sum_by(x[r], minimum, minima[r]); });
        }
        x += R;
      });
    }
  }
  repeat<R>(MT_BODY(r) { store(y + r * y_stride, layout.has_minimum ? add(products[r], minima[r]) : products[r]); });
}

void multiply(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* prepared, float* y) {
  if (is_float(format))
    return with_floats(format, [&](auto f) {
      const float* x = reinterpret_cast<const float*>(prepared);
      for (int t = 0; t < count; t++, tiles += tile_bytes(f, padded_k), y += kTileRows) {
        f32x8 sums;
        float_tile<f, 1>(tiles, padded_k, &x, &sums);
        store(y, sums);
      }
    });
  with_codes(format, [&](auto f) {
    for (int t = 0; t < count; t++, tiles += tile_bytes(f, padded_k), y += kTileRows)
      code_tile<f, 1>(tiles, padded_k, prepared, y, 0);
  });
}

constexpr int kSlice = 2048;  // values of k for which a panel goes over a tile: 16 KB of codes stay in the L1 cache

// A slice of a tile: where its codes are, int8 in blocks of a group, and its scales and minima as floats.
template <int Group>
struct Slice {
  const uint8_t* codes;
  size_t stride;
  float scales[kSlice / Group * kTileRows], minima[kSlice / Group * kTileRows];
  int8_t unpacked[kSlice * kTileRows];
};

template <Format F>
inline void unpack_slice(const uint8_t* tile, int k, Slice<layout_of(F).group>& slice) {
  static constexpr Layout layout = layout_of(F);
  static constexpr int kGroups = kPart / layout.group;
  slice.codes = reinterpret_cast<const uint8_t*>(slice.unpacked);
  slice.stride = layout.group * kTileRows;
  if (F == Format::q8) slice.codes = tile + layout.head_bytes, slice.stride = layout.block_bytes();
  int8_t* out = slice.unpacked;
  for (int b = 0, at = 0; b < k / layout.block; b++) {
    const Scales<F> scales(tile);
    tile += layout.head_bytes;
    for (int p = 0; p < layout.block / kPart; p++, tile += layout.part_bytes()) {
      for (int g = 0; g < kGroups; g++, at += kTileRows) {
        store(slice.scales + at, scales.scale(tile, g));
        if constexpr (layout.has_minimum) store(slice.minima + at, scales.minimum(tile, g));
      }
      if constexpr (layout.table) look_up(tile + layout.scale_bytes, out);
      else if constexpr (F != Format::q8)
        each_pair<layout.bits, kPart>(
            tile + layout.scale_bytes,
            MT_BODY_OF(i, w) { store_pair(out + 32 * i, for_panels<layout.bits, layout.centred>(w)); });
      out += kPart * kTileRows;
    }
  }
}

// minima[row] += minimum * sum of the activations, group by group.
template <int Group>
inline void add_minima(const Slice<Group>& slice, int blocks, const PanelBlock<Group>* panel, float* minima) {
  f32x8 sums[kPanelRows];
  repeat<kPanelRows>(MT_BODY(r) { sums[r] = load(minima + r * kTileRows); });
  for (int b = 0; b < blocks; b++) {
    const f32x8 minimum = load(slice.minima + b * kTileRows);
    repeat<kPanelRows>(MT_BODY(r) { sums[r] = fma(minimum, broadcast(panel_sum(panel[b], r)), sums[r]); });
  }
  repeat<kPanelRows>(MT_BODY(r) { store(minima + r * kTileRows, sums[r]); });
}

// A tile goes over k in slices. All panels use a slice while it lies in the L1 cache, and it is unpacked once for all of
// them; sums wait in y for the next slice. Each panel brings its share of the next slice.
template <Format F>
void code_tile_panels(const uint8_t* tile, int k, const uint8_t* panels, size_t stride, int rows, float* y,
                      size_t y_stride) {
  static constexpr Layout layout = layout_of(F);
  static constexpr int kGroup = layout.group;
  static constexpr float kZeros[kTileRows] = {};
  static thread_local Slice<kGroup> slice;
  constexpr int kMost = 256;  // rows whose minima are kept here
  float minima[layout.has_minimum ? kMost * kTileRows : 1];
  if constexpr (layout.has_minimum) {
    for (; rows > kMost; rows -= kMost, panels += kMost / kPanelRows * stride, y += kMost * y_stride)
      code_tile_panels<F>(tile, k, panels, stride, kMost, y, y_stride);
    std::memset(minima, 0, sizeof(float) * kTileRows * whole_panels(rows));
  }
  for (int first = 0; first < k; first += kSlice) {
    const int count = k - first < kSlice ? k - first : kSlice;
    const uint8_t* from = tile + tile_bytes(F, first);
    unpack_slice<F>(from, count, slice);
    const size_t bytes = tile_bytes(F, count);
    const uint8_t* next = from + bytes;  // the tape goes on with the next slice, or the next tile
    const size_t share = (bytes * kPanelRows / rows + kLineBytes) / kLineBytes * kLineBytes;
    for (int r = 0; r < rows; r += kPanelRows, next += share) {
      for (size_t at = 0; at < share; at += kLineBytes) __builtin_prefetch(next + at);
      const auto* panel = reinterpret_cast<const PanelBlock<kGroup>*>(panels + r / kPanelRows * stride) + first / kGroup;
      float* out = y + r * y_stride;
      panel_product<kGroup>(slice.codes, slice.stride, count / kGroup, panel, slice.scales, first ? out : kZeros,
                            first ? y_stride : 0, out, y_stride);
      if constexpr (layout.has_minimum) add_minima<kGroup>(slice, count / kGroup, panel, minima + r * kTileRows);
    }
  }
  if constexpr (layout.has_minimum)
    for (int r = 0; r < whole_panels(rows); r++)
      store(y + r * y_stride, add(load(y + r * y_stride), load(minima + r * kTileRows)));
}

// One panel alone, as a pass of decode has it: codes are unpacked in registers, as for a single row.
template <Format F>
void code_tile_panel(const uint8_t* tile, int k, const uint8_t* panel, size_t, int, float* y, size_t y_stride) {
  if constexpr (kRowsInPanels) code_tile<F, kPanelRows>(tile, k, panel, y, y_stride);
}

template <Format F>
void float_tile_panels(const uint8_t* tile, int k, const uint8_t* panels, size_t stride, int rows, float* y,
                       size_t y_stride) {
  for (int r = 0; r < rows; r += kPanelRows) {
    const float* x[kPanelRows];
    f32x8 sums[kPanelRows];
    for (int j = 0; j < kPanelRows; j++)
      x[j] = reinterpret_cast<const float*>(panels + r / kPanelRows * stride + j * prepared_bytes(F, k));
    (r ? float_tile<F, kPanelRows, false> : float_tile<F, kPanelRows>)(tile, k, x, sums);
    for (int j = 0; j < kPanelRows; j++) store(y + (r + j) * y_stride, sums[j]);
  }
}

void multiply_panels(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* panels,
                     size_t panel_stride, int rows, float* y, size_t y_stride) {
  const auto each = [&](auto run) {
    for (int t = 0; t < count; t++, tiles += tile_bytes(format, padded_k), y += kTileRows)
      run(tiles, padded_k, panels, panel_stride, rows, y, y_stride);
  };
  if (is_float(format)) return with_floats(format, [&](auto f) { each(float_tile_panels<f>); });
  with_codes(format, [&](auto f) { each(rows <= kPanelRows && kRowsInPanels ? code_tile_panel<f> : code_tile_panels<f>); });
}

// One row of a tile. Codes are unpacked 32 at a time, eight rows of them.
template <Format F>
void unpack_codes_row(const uint8_t* tile, int lane, int k, float* row) {
  static constexpr Layout layout = layout_of(F);
  constexpr int kLacks = layout.centred ? 0 : 1 << (layout.value_bits() - 1);
  for (int first = 0; first < k; tile += layout.head_bytes + layout.block / kPart * layout.part_bytes()) {
    const Scales<F> scales(tile);
    const uint8_t* part = tile + layout.head_bytes;
    for (int p = 0; p < layout.block / kPart && first < k; p++, part += layout.part_bytes(), first += kPart) {
      int8_t codes[kPart * kTileRows];
      if constexpr (layout.table) look_up(part + layout.scale_bytes, codes);
      else
        each_pair<layout.bits, kPart>(
            part + layout.scale_bytes, MT_BODY_OF(i, w) { store_pair(codes + 32 * i, w); });
      float factors[2][kTileRows], minima[2][kTileRows] = {};
      for (int g = 0; g < kPart / layout.group; g++) {
        store(factors[g], scales.scale(part, g));
        if constexpr (layout.has_minimum) store(minima[g], scales.minimum(part, g));
      }
      for (int i = 0; i < kPart && first + i < k; i++) {
        const int g = i / layout.group;
        const int code = (codes[i / 4 * 32 + lane * 4 + i % 4] >> (8 - layout.value_bits())) + kLacks;
        row[first + i] = static_cast<float>(code) * factors[g][lane] + minima[g][lane];
      }
    }
  }
}

template <Format F>
void unpack_float_row(const uint8_t* tile, int lane, int k, float* row) {
  for (int i = 0; i < k; i++) {
    float lanes[kTileRows];
    store(lanes, load_as<F>(tile + i * kTileRows * value_bytes(F)));
    row[i] = lanes[lane];
  }
}

void unpack_row(Format format, const uint8_t* tile, int lane, int k, float* row) {
  if (is_float(format)) return with_floats(format, [&](auto f) { unpack_float_row<f>(tile, lane, k, row); });
  with_codes(format, [&](auto f) { unpack_codes_row<f>(tile, lane, k, row); });
}

}  // namespace
}  // namespace monotape::MONOTAPE_ISA
