// The kernels, written once over eight float lanes (one lane is one row of a tile) and compiled for each instruction
// set. The file that includes this has set MONOTAPE_ISA and included that set's lanes.
//
// Sums have a fixed order that does not depend on how many rows are computed together or on who computes them, so a
// token's numbers are the same in prefill and in decode and with any number of workers.
#include <cfloat>
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"

namespace monotape::MONOTAPE_ISA {
namespace {

constexpr int kRowsTogether = 4;  // activation rows that share one pass over a tile
constexpr float kIntegerPeak = 32639.0f;  // 127 * 256 + 127: the largest integer that splits into two int8
constexpr size_t kQ8BlockBytes = kTileRows * (kQ8Block + 2);

// exp(x) to about one unit in the last place; below -87 it stays at exp(-87), which no sum notices.
inline f32x8 exponential(f32x8 x) {
  const f32x8 clamped = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  const f32x8 n = round(mul(clamped, broadcast(1.44269504f)));
  f32x8 r = fma(n, broadcast(-0.693145752f), clamped);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  // Taylor series of exp on [-ln 2 / 2, ln 2 / 2], Horner form.
  f32x8 p = broadcast(1.0f / 5040.0f);
  constexpr float kTaylor[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
  for (float c : kTaylor) p = fma(p, r, broadcast(c));
  return mul(p, power_of_two(n));
}

template <Format F>
inline f32x8 load_as(const uint8_t* p) {
  if constexpr (F == Format::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (F == Format::f16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (F == Format::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
}

size_t prepared_bytes(Format format, int padded_k) {
  const size_t bytes = format == Format::q8 ? padded_k / kQ8Block * sizeof(Q8Block) : sizeof(float) * padded_k;
  return (bytes + 63) / 64 * 64;
}

void quantise(const float* x, int count, Q8Block& block) {
  float values[kQ8Block] = {}, largest = 0;
  std::memcpy(values, x, sizeof(float) * count);
  bool finite = true;
  for (float v : values) finite &= (f32_to_bits(v) & 0x7f800000u) != 0x7f800000u;
  if (!finite) {  // integers cannot carry a NaN, so the scale does
    std::memset(&block, 0, sizeof block);
    block.scale = bits_to_f32(0x7fc00000u);
    return;
  }
  for (float v : values) largest = std::fmax(largest, std::fabs(v));
  const float inverse = largest > 0 ? kIntegerPeak / largest : 0;
  int16_t integers[kQ8Block];
  for (int i = 0; i < kQ8Block; i++) integers[i] = static_cast<int16_t>(std::nearbyint(values[i] * inverse));
  split_integers(integers, block);
  block.scale = largest / kIntegerPeak;
}

void prepare(Format format, const float* x, int k, int padded_k, uint8_t* prepared) {
  if (format != Format::q8) {
    std::memcpy(prepared, x, sizeof(float) * k);
    return;
  }
  auto* blocks = reinterpret_cast<Q8Block*>(prepared);
  for (int start = 0; start < padded_k; start += kQ8Block)
    quantise(x + start, k - start < kQ8Block ? k - start : kQ8Block, blocks[start / kQ8Block]);
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
template <int R>
inline void q8_tile(const uint8_t* tile, int k, const Q8Block* const* x, f32x8* y) {
  for (int r = 0; r < R; r++) y[r] = broadcast(0);
  for (int b = 0; b < k / kQ8Block; b++, tile += kQ8BlockBytes) {
    const f32x8 scales = load_f16(reinterpret_cast<const uint16_t*>(tile));
    const Q8Block* block[R];
    for (int r = 0; r < R; r++) block[r] = x[r] + b;
    f32x8 dots[R];
    q8_block<R>(reinterpret_cast<const int8_t*>(tile + 2 * kTileRows), block, dots);
    for (int r = 0; r < R; r++) y[r] = fma(dots[r], mul(scales, broadcast(block[r]->scale)), y[r]);
  }
}

template <Format F, int R>
inline void tile_rows(const uint8_t* tile, int k, const uint8_t* prepared, size_t stride, f32x8* y) {
  if constexpr (F == Format::q8) {
    const Q8Block* x[R];
    for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const Q8Block*>(prepared + r * stride);
    q8_tile<R>(tile, k, x, y);
  } else {
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const float*>(prepared + r * stride);
    float_tile<F, R>(tile, k, x, y);
  }
}

template <Format F>
void multiply_as(const uint8_t* tiles, int count, int k, const uint8_t* prepared, size_t stride, int rows, float* y,
                 size_t y_stride) {
  for (int t = 0; t < count; t++, tiles += tile_bytes(F, k), y += kTileRows) {
    int r = 0;
    f32x8 sums[kRowsTogether];
    for (; r + kRowsTogether <= rows; r += kRowsTogether) {
      tile_rows<F, kRowsTogether>(tiles, k, prepared + r * stride, stride, sums);
      for (int j = 0; j < kRowsTogether; j++) store(y + (r + j) * y_stride, sums[j]);
    }
    for (; r < rows; r++) {
      tile_rows<F, 1>(tiles, k, prepared + r * stride, stride, sums);
      store(y + r * y_stride, sums[0]);
    }
  }
}

void multiply(Format format, const uint8_t* tiles, int count, int padded_k, const uint8_t* prepared, size_t stride,
              int rows, float* y, size_t y_stride) {
  switch (format) {
    case Format::f32: return multiply_as<Format::f32>(tiles, count, padded_k, prepared, stride, rows, y, y_stride);
    case Format::f16: return multiply_as<Format::f16>(tiles, count, padded_k, prepared, stride, rows, y, y_stride);
    case Format::bf16: return multiply_as<Format::bf16>(tiles, count, padded_k, prepared, stride, rows, y, y_stride);
    case Format::q8: return multiply_as<Format::q8>(tiles, count, padded_k, prepared, stride, rows, y, y_stride);
  }
}

inline float value_at(Format format, const uint8_t* base, size_t index) {
  if (format == Format::f32) return reinterpret_cast<const float*>(base)[index];
  const uint16_t half = reinterpret_cast<const uint16_t*>(base)[index];
  return format == Format::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

void unpack_tile_row(Format format, const uint8_t* tile, int lane, int k, float* row) {
  for (int i = 0; i < k; i++) {
    if (format == Format::q8) {
      const uint8_t* block = tile + i / kQ8Block * kQ8BlockBytes;
      const int within = i % kQ8Block;
      const auto integer = static_cast<int8_t>(block[2 * kTileRows + within / 4 * 32 + lane * 4 + within % 4]);
      row[i] = integer * value_at(Format::f16, block, lane);
    } else {
      row[i] = value_at(format, tile, static_cast<size_t>(i) * kTileRows + lane);
    }
  }
}

// A row of a q8 table: all scales, then all integers.
void unpack_table_row(Format format, const uint8_t* table, int64_t row, int k, int padded_k, float* out) {
  if (format == Format::q8) {
    const int blocks = padded_k / kQ8Block;
    const uint8_t* base = table + row * (padded_k + 2 * blocks);
    const auto* integers = reinterpret_cast<const int8_t*>(base + 2 * blocks);
    for (int i = 0; i < k; i++) out[i] = integers[i] * value_at(Format::f16, base, i / kQ8Block);
    return;
  }
  for (int i = 0; i < k; i++) out[i] = value_at(format, table, row * k + i);
}

void normalise(const float* x, const float* gain, int count, float eps, float* out) {
  double squares = 0;  // a double: the order of this sum cannot matter
  for (int i = 0; i < count; i++) squares += static_cast<double>(x[i]) * x[i];
  const float scale = static_cast<float>(1.0 / std::sqrt(squares / count + eps));
  for (int i = 0; i < count; i++) out[i] = x[i] * scale * gain[i];
}

void gated_tile(const float* gate, const float* up, float* out) {
  const f32x8 g = load(gate);
  const f32x8 sigmoid = div(broadcast(1), add(broadcast(1), exponential(sub(broadcast(0), g))));
  store(out, mul(mul(g, sigmoid), load(up)));
}

void store_kv(Format format, const float* x, int count, void* out) {
  if (format == Format::f32) {
    std::memcpy(out, x, sizeof(float) * count);
    return;
  }
  for (int i = 0; i < count; i++) static_cast<uint16_t*>(out)[i] = f32_to_f16(x[i]);
}

// A run of up to 8 values, zeros behind it. Heads are rarely not a multiple of 8, so this is off the fast path.
template <Format F>
inline f32x8 load_partly(const uint8_t* p, int count) {
  alignas(32) uint8_t bytes[8 * sizeof(float)] = {};
  std::memcpy(bytes, p, count * value_bytes(F));
  return load_as<F>(bytes);
}
template <Format F>
inline f32x8 load_lanes(const uint8_t* p, int left) {
  return left >= 8 ? load_as<F>(p) : load_partly<F>(p, left);
}
inline f32x8 load_floats(const float* p, int left) {
  return load_lanes<Format::f32>(reinterpret_cast<const uint8_t*>(p), left);
}
inline void store_lanes(float* p, f32x8 a, int left) {
  if (left >= 8) return store(p, a);
  float lanes[8];
  store(lanes, a);
  std::memcpy(p, lanes, sizeof(float) * left);
}

// Dot products of one position with G query heads: each key value is loaded and widened once for all of them.
template <Format F, int G>
void score_heads(const float* q, int head_dim, const uint8_t* keys, int count, float* scores, int stride) {
  for (int p = 0; p < count; p++, keys += head_dim * value_bytes(F)) {
    f32x8 dot[G];
    for (int g = 0; g < G; g++) dot[g] = broadcast(0);
    for (int d = 0; d < head_dim; d += 8) {
      const f32x8 key = load_lanes<F>(keys + d * value_bytes(F), head_dim - d);
      for (int g = 0; g < G; g++) dot[g] = fma(load_floats(q + g * head_dim + d, head_dim - d), key, dot[g]);
    }
    for (int g = 0; g < G; g++) scores[g * stride + p] = sum(dot[g]);
  }
}

// Scores become weights in place; returns their peak and sum.
inline void soften(float* scores, int count, float* header) {
  const int padded = (count + 7) / 8 * 8;
  for (int p = count; p < padded; p++) scores[p] = -FLT_MAX;
  f32x8 top = load(scores), total = broadcast(0);
  for (int p = 8; p < padded; p += 8) top = max(top, load(scores + p));
  const float highest = peak(top);
  for (int p = 0; p < padded; p += 8) {
    const f32x8 weight = exponential(sub(load(scores + p), broadcast(highest)));
    store(scores + p, weight);
  }
  for (int p = count; p < padded; p++) scores[p] = 0;
  for (int p = 0; p < padded; p += 8) total = add(total, load(scores + p));
  header[0] = highest;
  header[1] = sum(total);
}

// Values weighted by G heads' softmax: each value is loaded and widened once for all of them.
template <Format F, int G>
void weigh_heads(const float* weights, int stride, int head_dim, const uint8_t* values, int count, float* out,
                 size_t out_stride) {
  for (int d = 0; d < head_dim; d += 8) {
    const int left = head_dim - d;
    f32x8 acc[G];
    for (int g = 0; g < G; g++) acc[g] = broadcast(0);
    const uint8_t* value = values + d * value_bytes(F);
    for (int p = 0; p < count; p++, value += head_dim * value_bytes(F)) {
      const f32x8 v = load_lanes<F>(value, left);
      for (int g = 0; g < G; g++) acc[g] = fma(broadcast(weights[g * stride + p]), v, acc[g]);
    }
    for (int g = 0; g < G; g++) store_lanes(out + g * out_stride + d, acc[g], left);
  }
}

template <Format F, int G>
void attend_heads(const float* q, int head_dim, const uint8_t* keys, const uint8_t* values, int count, float* scores,
                  float* partials, size_t partial_stride) {
  const int stride = (count + 7) / 8 * 8;
  score_heads<F, G>(q, head_dim, keys, count, scores, stride);
  for (int g = 0; g < G; g++) soften(scores + g * stride, count, partials + g * partial_stride);
  weigh_heads<F, G>(scores, stride, head_dim, values, count, partials + kPartialHeader, partial_stride);
}

// Up to eight query heads at a time; what a head gets does not depend on which others are computed with it.
template <Format F>
void attend_as(const float* q, int group, int head_dim, const void* keys, const void* values, int count, float* scores,
               float* partials, size_t partial_stride) {
  using Attend = void (*)(const float*, int, const uint8_t*, const uint8_t*, int, float*, float*, size_t);
  constexpr Attend kAttend[] = {attend_heads<F, 1>, attend_heads<F, 2>, attend_heads<F, 3>, attend_heads<F, 4>,
                                attend_heads<F, 5>, attend_heads<F, 6>, attend_heads<F, 7>, attend_heads<F, 8>};
  for (int first = 0; first < group; first += 8) {
    const int together = group - first < 8 ? group - first : 8;
    kAttend[together - 1](q + first * head_dim, head_dim, static_cast<const uint8_t*>(keys),
                          static_cast<const uint8_t*>(values), count, scores, partials + first * partial_stride,
                          partial_stride);
  }
}

void attend(Format format, const float* q, int group, int head_dim, const void* keys, const void* values, int count,
            float* scores, float* partials, size_t partial_stride) {
  const auto run = format == Format::f32 ? attend_as<Format::f32> : attend_as<Format::f16>;
  run(q, group, head_dim, keys, values, count, scores, partials, partial_stride);
}

void combine(const float* partials, int blocks, size_t block_stride, int head_dim, float* out) {
  float highest = -FLT_MAX, total = 0;
  for (int b = 0; b < blocks; b++) highest = std::fmax(highest, partials[b * block_stride]);
  for (int d = 0; d < head_dim; d++) out[d] = 0;
  for (int b = 0; b < blocks; b++) {
    const float* partial = partials + b * block_stride;
    const float weight = std::exp(partial[0] - highest);
    total += partial[1] * weight;
    for (int d = 0; d < head_dim; d++) out[d] += partial[kPartialHeader + d] * weight;
  }
  for (int d = 0; d < head_dim; d++) out[d] /= total;
}

void exponentials(const float* x, int count, float peak_value, float* out) {
  int i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, exponential(sub(load(x + i), broadcast(peak_value))));
  if (i < count) store_lanes(out + i, exponential(sub(load_floats(x + i, count - i), broadcast(peak_value))), count - i);
}

}  // namespace

const Kernels kKernels = {
    MONOTAPE_ISA_NAME, prepared_bytes, prepare, multiply, unpack_tile_row, unpack_table_row, normalise,
    gated_tile,        store_kv,       attend,  combine,  exponentials,
};

}  // namespace monotape::MONOTAPE_ISA
