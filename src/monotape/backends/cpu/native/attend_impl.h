// Attention over one block of positions. Part of kernels_impl.h.

namespace monotape::MONOTAPE_ISA {
namespace {

// Dot products of one position with G query heads: each key value is loaded and widened once for all of them.
template <Format F, int G>
void score_heads(const float* q, int head_dim, const uint8_t* keys, int count, float* scores, int stride) {
  for (int p = 0; p < count; p++, keys += head_dim * value_bytes(F)) {
    f32x8 dot[G];
    repeat<G>(MT_BODY(g) { dot[g] = broadcast(0); });
    for (int d = 0; d < head_dim; d += 8) {
      const f32x8 key = load_lanes<F>(keys + d * value_bytes(F), head_dim - d);
      repeat<G>(MT_BODY(g) { dot[g] = fma(load_floats(q + g * head_dim + d, head_dim - d), key, dot[g]); });
    }
    repeat<G>(MT_BODY(g) { scores[g * stride + p] = sum(dot[g]); });
  }
}

// P positions with H heads at a time, where nothing has to be widened: every load serves several multiply-adds.
template <int P, int H>
inline __attribute__((always_inline)) void score_tile(const float* q, int head_dim, const float* keys, float* scores, int stride) {
  f32x8 dot[H * P];
  repeat<H * P>(MT_BODY(i) { dot[i] = broadcast(0); });
  for (int d = 0; d < head_dim; d += 8) {
    f32x8 query[H];
    repeat<H>(MT_BODY(h) { query[h] = load(q + h * head_dim + d); });
    repeat<P>(MT_BODY(p) {
      const f32x8 key = load(keys + p * head_dim + d);
      repeat<H>(MT_BODY(h) { dot[h * P + p] = fma(query[h], key, dot[h * P + p]); });
    });
  }
  repeat<H>(MT_BODY(h) {
    if constexpr (P == 4) store_sums(dot[h * P], dot[h * P + 1], dot[h * P + 2], dot[h * P + 3], scores + h * stride);
    else repeat<P>(MT_BODY(p) { scores[h * stride + p] = sum(dot[h * P + p]); });
  });
}

template <int G>
void score_wide(const float* q, int head_dim, const float* keys, int count, float* scores, int stride) {
  int p = 0;
  for (; p + 4 <= count; p += 4, keys += 4 * head_dim) {
    int g = 0;
    for (; g + 2 <= G; g += 2) score_tile<4, 2>(q + g * head_dim, head_dim, keys, scores + g * stride + p, stride);
    if (g < G) score_tile<4, 1>(q + g * head_dim, head_dim, keys, scores + g * stride + p, stride);
  }
  for (; p < count; p++, keys += head_dim)
    for (int g = 0; g < G; g++) score_tile<1, 1>(q + g * head_dim, head_dim, keys, scores + g * stride + p, stride);
}

// Scores become weights in place; returns their peak and sum.
inline void soften(float* scores, int count, float* header) {
  const int padded = (count + 7) / 8 * 8;
  for (int p = count; p < padded; p++) scores[p] = -FLT_MAX;
  f32x8 top = load(scores), total = broadcast(0);
  for (int p = 8; p < padded; p += 8) top = max(top, load(scores + p));
  const float highest = peak(top);
  int next = 0;
  for (; next + 8 * kTogether <= padded; next += 8 * kTogether) {
    f32x8 weights[kTogether];
    repeat<kTogether>(MT_BODY(i) { weights[i] = sub(load(scores + next + 8 * i), broadcast(highest)); });
    exponentiate(weights);
    repeat<kTogether>(MT_BODY(i) { store(scores + next + 8 * i, weights[i]); });
  }
  for (; next < padded; next += 8) store(scores + next, exponential(sub(load(scores + next), broadcast(highest))));
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
    repeat<G>(MT_BODY(g) { acc[g] = broadcast(0); });
    const uint8_t* value = values + d * value_bytes(F);
    for (int p = 0; p < count; p++, value += head_dim * value_bytes(F)) {
      const f32x8 v = load_lanes<F>(value, left);
      repeat<G>(MT_BODY(g) { acc[g] = fma(broadcast(weights[g * stride + p]), v, acc[g]); });
    }
    repeat<G>(MT_BODY(g) { store_lanes(out + g * out_stride + d, acc[g], left); });
  }
}

// The same where nothing has to be widened: four positions a step, whose weights lie side by side.
template <int G>
void weigh_wide(const float* weights, int stride, int head_dim, const float* values, int count, float* out,
                size_t out_stride) {
  for (int d = 0; d < head_dim; d += 8) {
    f32x8 acc[G];
    repeat<G>(MT_BODY(g) { acc[g] = broadcast(0); });
    const float* value = values + d;
    int p = 0;
    for (; p + 4 <= count; p += 4, value += 4 * head_dim) {
      const f32x8 v0 = load(value), v1 = load(value + head_dim);
      const f32x8 v2 = load(value + 2 * head_dim), v3 = load(value + 3 * head_dim);
      repeat<G>(MT_BODY(g) {
        const Factors factors = load_factors(weights + g * stride + p);
        acc[g] = fma_by<0>(v0, factors, acc[g]);
        acc[g] = fma_by<1>(v1, factors, acc[g]);
        acc[g] = fma_by<2>(v2, factors, acc[g]);
        acc[g] = fma_by<3>(v3, factors, acc[g]);
      });
    }
    for (; p < count; p++, value += head_dim) {
      const f32x8 v = load(value);
      repeat<G>(MT_BODY(g) { acc[g] = fma(broadcast(weights[g * stride + p]), v, acc[g]); });
    }
    repeat<G>(MT_BODY(g) { store(out + g * out_stride + d, acc[g]); });
  }
}

template <Format F, int G>
void attend_heads(const float* q, int head_dim, const uint8_t* keys, const uint8_t* values, int count, float* scores,
                  float* partials, size_t partial_stride) {
  const int stride = (count + 7) / 8 * 8;
  const bool wide = F == Format::f32 && head_dim % 8 == 0;
  if (wide) score_wide<G>(q, head_dim, reinterpret_cast<const float*>(keys), count, scores, stride);
  else score_heads<F, G>(q, head_dim, keys, count, scores, stride);
  for (int g = 0; g < G; g++) soften(scores + g * stride, count, partials + g * partial_stride);
  if (wide)
    return weigh_wide<G>(scores, stride, head_dim, reinterpret_cast<const float*>(values), count,
                         partials + kPartialHeader, partial_stride);
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

void widen_kv(Format format, const void* values, int count, float* out) {
  if (format == Format::f32) {
    std::memcpy(out, values, sizeof(float) * count);
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(values);
  int i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, load_f16(halves + i));
  for (; i < count; i++) out[i] = f16_to_f32(halves[i]);
}

void combine(const float* partials, int blocks, size_t block_stride, int head_dim, const float* sink, float* out) {
  float highest = sink ? *sink : -FLT_MAX, total = 0;
  for (int b = 0; b < blocks; b++) highest = std::fmax(highest, partials[b * block_stride]);
  if (sink) total = std::exp(*sink - highest);
  for (int d = 0; d < head_dim; d++) out[d] = 0;
  for (int b = 0; b < blocks; b++) {
    const float* partial = partials + b * block_stride;
    const float weight = std::exp(partial[0] - highest);
    total += partial[1] * weight;
    for (int d = 0; d < head_dim; d++) out[d] += partial[kPartialHeader + d] * weight;
  }
  for (int d = 0; d < head_dim; d++) out[d] /= total;
}

}  // namespace
}  // namespace monotape::MONOTAPE_ISA
