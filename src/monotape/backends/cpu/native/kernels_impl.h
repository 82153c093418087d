// The kernels, written once over eight float lanes (one lane is one row of a tile) and compiled for each instruction
// set. The file that includes this has set MONOTAPE_ISA and included that set's lanes.
//
// Sums have a fixed order that does not depend on how many rows are computed together or by which worker, so a token's
// numbers are the same in prefill and in decode and with any number of workers.
#include <cfloat>
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "repeat.h"

namespace monotape::MONOTAPE_ISA {
namespace {

// exp(x) of N vectors to about one unit in the last place; below -87 it stays at exp(-87), which no sum notices. Each
// step is taken for all of them before the next, so that their latencies overlap.
template <int N>
inline __attribute__((always_inline)) void exponentiate(f32x8 (&x)[N]) {
  // A float near 1.5 * 2^23 is a whole number whose lowest bits are those of the integer: adding that much rounds.
  const f32x8 offset = broadcast(12582912.0f);
  f32x8 rounded[N], p[N];
  repeat<N>(MT_BODY(i) { x[i] = min(max(x[i], broadcast(-87.0f)), broadcast(88.0f)); });
  repeat<N>(MT_BODY(i) { rounded[i] = fma(x[i], broadcast(1.44269504f), offset); });
  repeat<N>(MT_BODY(i) { x[i] = fma(sub(rounded[i], offset), broadcast(-0.693145752f), x[i]); });
  repeat<N>(MT_BODY(i) { x[i] = fma(sub(rounded[i], offset), broadcast(-1.42860677e-6f), x[i]); });
  // Taylor series of exp on [-ln 2 / 2, ln 2 / 2], Horner form.
  constexpr float kTaylor[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
  repeat<N>(MT_BODY(i) { p[i] = broadcast(1.0f / 5040.0f); });
  repeat<7>(MT_BODY(t) { repeat<N>(MT_BODY(i) { p[i] = fma(p[i], x[i], broadcast(kTaylor[t])); }); });
  repeat<N>(MT_BODY(i) { x[i] = add_to_exponent(p[i], rounded[i]); });
}

inline f32x8 exponential(f32x8 x) {
  f32x8 one[1] = {x};
  exponentiate(one);
  return one[0];
}

constexpr int kTogether = 2;  // vectors whose exponentials are computed together

template <Format F>
inline f32x8 load_as(const uint8_t* p) {
  if constexpr (F == Format::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (F == Format::f16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  if constexpr (F == Format::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
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

}  // namespace
}  // namespace monotape::MONOTAPE_ISA

#include "codes_impl.h"
#include "scales_impl.h"
#include "products_impl.h"
#include "attend_impl.h"

namespace monotape::MONOTAPE_ISA {
namespace {

void normalise(const float* x, const float* gain, int count, float eps, float* out) {
  double squares = 0;  // a double: the order of this sum cannot matter
  for (int i = 0; i < count; i++) squares += static_cast<double>(x[i]) * x[i];
  const float scale = static_cast<float>(1.0 / std::sqrt(squares / count + eps));
  for (int i = 0; i < count; i++) out[i] = x[i] * scale * gain[i];
}

template <int N>
inline __attribute__((always_inline)) void gate_some(const float* products, float* out, size_t out_stride) {
  f32x8 e[N];
  repeat<N>(MT_BODY(i) { e[i] = sub(broadcast(0), load(products + i * 2 * kTileRows)); });
  exponentiate(e);
  repeat<N>(MT_BODY(i) {
    const float* gate = products + i * 2 * kTileRows;
    store(out + i * out_stride, mul(div(load(gate), add(broadcast(1), e[i])), load(gate + kTileRows)));
  });
}

void gate_rows(const float* products, int rows, float* out, size_t out_stride) {
  int r = 0;
  for (; r + kTogether <= rows; r += kTogether)
    gate_some<kTogether>(products + r * 2 * kTileRows, out + r * out_stride, out_stride);
  for (; r < rows; r++) gate_some<1>(products + r * 2 * kTileRows, out + r * out_stride, out_stride);
}

// A limit is the first operand of min() and max(): on every machine the second one is returned where it is a NaN.
void gate_limited_rows(const float* products, int rows, float alpha, float limit, float shift, float* out,
                       size_t out_stride) {
  for (int r = 0; r < rows; r++, products += 2 * kTileRows, out += out_stride) {
    const f32x8 gate = min(broadcast(limit), load(products));
    const f32x8 up = max(broadcast(-limit), min(broadcast(limit), load(products + kTileRows)));
    const f32x8 e = exponential(mul(gate, broadcast(-alpha)));
    store(out, mul(div(gate, add(broadcast(1), e)), add(up, broadcast(shift))));
  }
}

void store_kv(Format format, const float* x, int count, void* out) {
  if (format == Format::f32) {
    std::memcpy(out, x, sizeof(float) * count);
    return;
  }
  for (int i = 0; i < count; i++) static_cast<uint16_t*>(out)[i] = f32_to_f16(x[i]);
}

void exponentials(const float* x, int count, float peak_value, float* out) {
  int i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, exponential(sub(load(x + i), broadcast(peak_value))));
  if (i < count) store_lanes(out + i, exponential(sub(load_floats(x + i, count - i), broadcast(peak_value))), count - i);
}

}  // namespace

const Kernels kKernels = {
    MONOTAPE_ISA_NAME, prepared_bytes,   panel_bytes, prepare,    prepare_in_panel, multiply, multiply_panels,
    unpack_row,        normalise,        gate_rows,   gate_limited_rows, store_kv,        widen_kv, attend,
    combine,           exponentials,
};

}  // namespace monotape::MONOTAPE_ISA
