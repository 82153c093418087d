// Attention of one token: the positions of each KV head are spread over as many workers as they can feed; partial
// results are combined in the order of the positions.
#pragma once
#include "matrix.h"

namespace monotape {

constexpr int kPositionsPerSplit = 64;
__host__ __device__ constexpr int lanes_per_position() {
  int lanes = 1;
  while (lanes * 8 < kHeadStride) lanes *= 2;
  return lanes;
}
constexpr int kLanes = lanes_per_position(), kAtOnce = 32 / kLanes;  // positions that a warp looks at together
static_assert(kLanes <= 32, "a head is at most 256 wide");

__device__ __forceinline__ int splits_for(int positions) {
  const int wanted = (positions + kPositionsPerSplit - 1) / kPositionsPerSplit;
  return wanted < kMaxSplits ? wanted : kMaxSplits;
}

// A head's values from the exchange into shared memory, as float32.
__device__ inline void fetch_rows(Consumer& c, const uint4* words, int first, int count, float* out, int from_thread,
                                  Patience& patience) {
  const int i = c.thread - from_thread;
  if (i < 0 || i >= count) return;
  const uint4 v = wait_word(words, first + i, patience);
  const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) out[i * 8 + 2 * j] = low_half(pair[j]), out[i * 8 + 2 * j + 1] = high_half(pair[j]);
}

// Normalises (where the model does) and rotates one head in shared memory; one warp does it.
__device__ inline void finish_head(Consumer& c, float* head, const float* gain, int position, float scale) {
  if constexpr (kQkNorm) {
    float squares = 0;
    for (int d = c.lane; d < kHeadDim; d += 32) squares += head[d] * head[d];
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    const float inverse = rsqrtf(squares / kHeadDim + kNormEps);
    for (int d = c.lane; d < kHeadDim; d += 32) head[d] = head[d] * inverse * gain[d];
    __syncwarp();
  }
  constexpr int half = kRopeDims / 2;
  for (int d = c.lane; d < half; d += 32) {
    const float cosine = c.params.cosines[static_cast<int64_t>(position) * half + d];
    const float sine = c.params.sines[static_cast<int64_t>(position) * half + d];
    const float a = head[d], b = head[d + half];
    head[d] = a * cosine - b * sine;
    head[d + half] = b * cosine + a * sine;
  }
  __syncwarp();
  for (int d = c.lane; d < kHeadStride; d += 32) head[d] *= scale;
}

// The softmax of some positions, not normalised, of the query heads that share a KV head; a lane has 8 of the values.
struct Running {
  float peak[kGroup], sum[kGroup], values[kGroup][8];

  __device__ void clear() {
#pragma unroll
    for (int g = 0; g < kGroup; g++) {
      peak[g] = -infinity(), sum[g] = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) values[g][i] = 0;
    }
  }
  __device__ void add(int g, float score, const float* v) {
    const float top = fmaxf(peak[g], score);
    const float old = __expf(peak[g] - top), now = __expf(score - top);
    sum[g] = sum[g] * old + now;
#pragma unroll
    for (int i = 0; i < 8; i++) values[g][i] = values[g][i] * old + now * v[i];
    peak[g] = top;
  }
  __device__ void merge_lanes(int distance) {
#pragma unroll
    for (int g = 0; g < kGroup; g++) {
      const float other = __shfl_xor_sync(~0u, peak[g], distance), top = fmaxf(peak[g], other);
      const float mine = peak[g] == -infinity() ? 0 : __expf(peak[g] - top);
      const float theirs = other == -infinity() ? 0 : __expf(other - top);
      sum[g] = sum[g] * mine + __shfl_xor_sync(~0u, sum[g], distance) * theirs;
#pragma unroll
      for (int i = 0; i < 8; i++)
        values[g][i] = values[g][i] * mine + __shfl_xor_sync(~0u, values[g][i], distance) * theirs;
      peak[g] = top;
    }
  }
};

__device__ __forceinline__ void unpack8(uint4 v, float* out) {
  const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = low_half(pair[i]), out[2 * i + 1] = high_half(pair[i]);
}

// This warp's share of the positions [start, end).
__device__ inline void look_at(Consumer& c, const uint16_t* keys, const uint16_t* values, int start, int end,
                               Running& running) {
  const int chunk = c.lane % kLanes;
  const bool real = chunk * 8 < kHeadStride;
  // Few query heads stay in registers; many are read from shared memory each time, or something else would spill.
  constexpr bool kKeepQuery = kGroup <= 4;
  float q[kKeepQuery ? kGroup : 1][8];
  const float* query = c.shared.query + (real ? chunk * 8 : 0);
#pragma unroll
  for (int g = 0; g < (kKeepQuery ? kGroup : 0); g++) {
#pragma unroll
    for (int i = 0; i < 8; i++) q[g][i] = query[g * kHeadStride + i];
  }
  const auto query_value = [&](int g, int i) {
    if constexpr (kKeepQuery) return q[g][i];
    else return const_cast<const volatile float*>(query)[g * kHeadStride + i];
  };
  running.clear();
  for (int base = start + c.warp * kAtOnce; base < end; base += kWarps * kAtOnce) {
    const int position = base + c.lane / kLanes;
    const bool there = position < end && real;
    const int64_t at = static_cast<int64_t>(position) * kHeadStride + chunk * 8;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 key_word = there ? load_word(reinterpret_cast<const uint4*>(keys + at)) : zero;
    const uint4 value_word = there ? load_word(reinterpret_cast<const uint4*>(values + at)) : zero;
    float k[8], v[8];
    unpack8(key_word, k);
    unpack8(value_word, v);
#pragma unroll
    for (int g = 0; g < kGroup; g++) {
      float score = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) score += query_value(g, i) * k[i];
#pragma unroll
      for (int o = kLanes / 2; o; o >>= 1) score += __shfl_xor_sync(~0u, score, o);
      if (position < end) running.add(g, score, v);
    }
  }
#pragma unroll
  for (int o = kLanes; o < 32; o <<= 1) running.merge_lanes(o);
}

// Adds up the warps' results of one head, in order: value `d` of it, and the peak and sum.
__device__ inline float combine_parts(const float* parts, int count, int stride, int d, float& peak, float& sum) {
  peak = -infinity(), sum = 0;
  for (int i = 0; i < count; i++) peak = fmaxf(peak, parts[i * stride + kHeadStride]);
  float value = 0;
  for (int i = 0; i < count; i++) {
    const float* part = parts + i * stride;
    const float weight = part[kHeadStride] == -infinity() ? 0 : __expf(part[kHeadStride] - peak);
    sum += part[kHeadStride + 1] * weight;
    value += part[d] * weight;
  }
  return value;
}

// Called by whole warps with consecutive d.
__device__ inline void publish_head(Consumer& c, int head, int d, float value, bool real) {
  const uint4 word = gather_word(value);
  if (real && d % 8 == 0) publish(c.params.exchange->attended, c.layer_turn, (head * kHeadStride + d) / 8, word);
}

// The words that publish_results() will write, made ready for the turn after.
__device__ inline void reset_results(Consumer& c, int kv_head, int split, int splits) {
  const int words = splits == 1 ? kHeadStride / 8 : kPartialWords;
  for (int i = c.thread; i < kGroup * words; i += kConsumers) {
    const int head = kv_head * kGroup + i / words, word = i % words;
    if (splits == 1) reset(c.params.exchange->attended, c.layer_turn, head * kHeadStride / 8 + word);
    else reset(c.params.exchange->partials, c.layer_turn, (head * kMaxSplits + split) * kPartialWords + word);
  }
}

__device__ inline void publish_results(Consumer& c, int kv_head, int split, int splits) {
  constexpr int kStride = kHeadStride + 2;
  constexpr int kValues = kGroup * kHeadStride;
  for (int i = c.thread; i < divide_up(kValues, 32) * 32; i += kConsumers) {  // whole warps: they shuffle
    const bool real = i < kValues;
    const int g = real ? i / kHeadStride : 0, d = i % kHeadStride, head = kv_head * kGroup + g;
    float peak, sum;
    const float value = combine_parts(c.shared.attention + g * kStride, kWarps, kGroup * kStride, d, peak, sum);
    if (splits == 1) {
      publish_head(c, head, d, value / sum, real);
      continue;
    }
    const int word = (head * kMaxSplits + split) * kPartialWords;
    const float b = __shfl_down_sync(~0u, value, 1), e = __shfl_down_sync(~0u, value, 2), f = __shfl_down_sync(~0u, value, 3);
    if (!real) continue;
    if (d % 4 == 0)
      publish(c.params.exchange->partials, c.layer_turn, word + d / 4,
              make_uint4(__float_as_uint(value), __float_as_uint(b), __float_as_uint(e), __float_as_uint(f)));
    if (d == 0)
      publish(c.params.exchange->partials, c.layer_turn, word + kPartialWords - 1,
              make_uint4(__float_as_uint(peak), __float_as_uint(sum), 0, 0));
  }
}

// The stage: q, k and v of this token arrive; the worker that has the last position also puts k and v into the KV.
__device__ bool attend(Consumer& c, int layer, int position) {
  const int window = c.params.windows[layer], end = position + 1;
  const int begin = window && end > window ? end - window : 0;
  const int splits = splits_for(end - begin), worker = blockIdx.x;
  if (worker >= kKvHeads * splits) return true;
  c.trace.begin();
  const int kv_head = worker % kKvHeads, split = worker / kKvHeads;
  const int share = (end - begin + splits - 1) / splits;
  const int start = begin + split * share, stop = start + share < end ? start + share : end;
  const bool has_new = start <= position && position < stop;
  const uint4* words = c.params.exchange->qkv[c.layer_turn & 1];
  Patience patience(c.params, c.shared, Stage::attention, layer);
  constexpr int kHeadWords = kHeadStride / 8;
  fetch_rows(c, words, kv_head * kGroup * kHeadWords, kGroup * kHeadWords, c.shared.query, 0, patience);
  if (has_new) {
    fetch_rows(c, words, kQueryRows / 8 + kv_head * kHeadWords, kHeadWords, c.shared.new_key, kConsumers - 64, patience);
    fetch_rows(c, words, (kQueryRows + kKvRows) / 8 + kv_head * kHeadWords, kHeadWords, c.shared.new_value,
               kConsumers - 32, patience);
  }
  if (!c.meet()) return false;
  c.trace.arrived(Stage::attention);
  reset_results(c, kv_head, split, splits);
  const float* q_gain = kQkNorm ? c.params.q_norm + layer * kHeadDim : nullptr;
  const float* k_gain = kQkNorm ? c.params.k_norm + layer * kHeadDim : nullptr;
  for (int g = c.warp; g < kGroup; g += kWarps)
    finish_head(c, c.shared.query + g * kHeadStride, q_gain, position, kAttentionScale);
  const int64_t cache = (static_cast<int64_t>(layer) * kKvHeads + kv_head) * c.params.kv_capacity * kHeadStride;
  if (has_new && c.warp == kWarps - 1) {
    finish_head(c, c.shared.new_key, k_gain, position, 1.0f);
    __syncwarp();
    for (int d = 2 * c.lane; d < kHeadStride; d += 64) {
      const int64_t at = cache + static_cast<int64_t>(position) * kHeadStride + d;
      *reinterpret_cast<uint32_t*>(c.params.keys + at) = pack_pair(c.shared.new_key[d], c.shared.new_key[d + 1]);
      *reinterpret_cast<uint32_t*>(c.params.values + at) = pack_pair(c.shared.new_value[d], c.shared.new_value[d + 1]);
    }
    fence_device();  // later tokens read this from other workers
  }
  if (!c.meet()) return false;
  Running running;
  look_at(c, c.params.keys + cache, c.params.values + cache, start, stop, running);
  if (c.lane < kLanes && c.lane * 8 < kHeadStride) {
#pragma unroll
    for (int g = 0; g < kGroup; g++) {
      float* part = c.shared.attention + (c.warp * kGroup + g) * (kHeadStride + 2);
#pragma unroll
      for (int i = 0; i < 8; i++) part[c.lane * 8 + i] = running.values[g][i];
      if (c.lane == 0) part[kHeadStride] = running.peak[g], part[kHeadStride + 1] = running.sum[g];
    }
  }
  if (!c.meet()) return false;
  publish_results(c, kv_head, split, splits);
  c.trace.end(Stage::attention);
  return true;
}

// Where several workers shared a KV head: one worker a query head adds up their parts.
__device__ bool combine(Consumer& c, int layer, int position) {
  const int window = c.params.windows[layer], end = position + 1;
  const int begin = window && end > window ? end - window : 0, splits = splits_for(end - begin);
  if (splits == 1) return true;
  constexpr int kStride = kHeadStride + 2;
  for (int head = kWorkers - 1 - blockIdx.x; head < kHeads; head += kWorkers) {
    const uint4* words = c.params.exchange->partials[c.layer_turn & 1] + head * kMaxSplits * kPartialWords;
    Patience patience(c.params, c.shared, Stage::combine, layer);
    float* parts = c.shared.combined;
    for (int i = c.thread; i < splits * kPartialWords; i += kConsumers) {
      const uint4 v = wait_word(words, i, patience);
      float* out = parts + i / kPartialWords * kStride + i % kPartialWords * 4;
      out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
      if (i % kPartialWords != kPartialWords - 1) out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
    }
    if (c.thread < kHeadStride / 8) reset(c.params.exchange->attended, c.layer_turn, head * kHeadStride / 8 + c.thread);
    if (!c.meet()) return false;
    if (c.thread < divide_up(kHeadStride, 32) * 32) {
      const bool real = c.thread < kHeadStride;
      float peak, sum;
      const float value = combine_parts(parts, splits, kStride, real ? c.thread : 0, peak, sum);
      publish_head(c, head, c.thread, value / sum, real);
    }
    if (!c.meet()) return false;
  }
  return true;
}

}  // namespace monotape
