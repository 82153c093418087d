// Results of attention: the parts of a worker's warps added up in order, and published, finished or as a part of several workers'.
#pragma once
#include "token/kv.h"

namespace monotape {

// Four neighbouring values of a head with their peak and sum: the parts of all warps, added up in order.
struct Quad {
  float value[4], peak, sum;
};
__device__ __forceinline__ Quad combine_warps(const Shared& shared, int warps, int g, int d, int first = 0) {
  Quad all = {{0, 0, 0, 0}, -infinity(), 0};
  if (warps == 0) return all;
  float2 ends[kWarps];  // peak and sum of each warp
  float4 part[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; w++) {  // not behind branches, so that all loads are in flight together
    const float(&its)[kPartValues] = shared.attention[first + smaller(w, warps - 1)][g];
    ends[w] = *reinterpret_cast<const float2*>(&its[kHeadDim]), part[w] = *reinterpret_cast<const float4*>(&its[d]);
    if (w >= warps) ends[w].x = -infinity();
    all.peak = fmaxf(all.peak, ends[w].x);
  }
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float weight = exponential(ends[w].x - all.peak);
    all.sum += ends[w].y * weight;
    all.value[0] += part[w].x * weight, all.value[1] += part[w].y * weight;
    all.value[2] += part[w].z * weight, all.value[3] += part[w].w * weight;
  }
  return all;
}
// The part of a lone warp.
__device__ __forceinline__ Quad part_of_warp(const float (&part)[kPartValues], int d) {
  const float4 value = *reinterpret_cast<const float4*>(&part[d]);
  return {{value.x, value.y, value.z, value.w}, part[kHeadDim], part[kHeadDim + 1]};
}

// What finished values of a head are multiplied by.
__device__ __forceinline__ float scale_of_head(Consumer& c, int layer, int head, const Quad& all) {
  float sum = all.sum;
  if constexpr (kSinks >= 0) sum += exponential(c.params.vectors[kSinks][layer * kHeads + head] - all.peak);  // weighs in, and is worth nothing
  return quotient(1, sum);
}
__device__ __forceinline__ uint2 packed(const Quad& all, float scale) {
  return make_uint2(pack_pair(all.value[0] * scale, all.value[1] * scale), pack_pair(all.value[2] * scale, all.value[3] * scale));
}
// Two neighbouring lanes' values of a head, finished, are a word.
template <int Rows>
__device__ __forceinline__ void publish_attended(Consumer& c, int layer, int head, int quad, const Quad& all, bool real, int row) {
  const uint2 half = packed(all, scale_of_head(c, layer, head, all));
  const uint4 whole = make_uint4(half.x, half.y, lane_above(half.x, 1), lane_above(half.y, 1));
  const uint4 word = is_read_directly(Rows, Buffer::attended) ? input_order(whole) : whole;
  if (real && quad % 2 == 0) publish<Buffer::attended>(*c.params.exchange, c.turn, row * kRowWords + head * kHeadWords + quad / 2, word);
}

// A part's values, not yet combined with those of other splits, and its peak and sum.
__device__ __forceinline__ void publish_part(Consumer& c, const Share& share, int row, int g, int quad, const Quad& all) {
  publish<Buffer::partials>(*c.params.exchange, c.turn, row * kRowWords + part_word(share.kv_head, g, share.split, quad),
                            make_uint4(bits_of(all.value[0]), bits_of(all.value[1]), bits_of(all.value[2]), bits_of(all.value[3])));
  if (quad == 0)
    publish<Buffer::partials>(*c.params.exchange, c.turn, row * kRowWords + part_word(share.kv_head, g, share.split, kPartialWords - 1),
                              make_uint4(bits_of(all.peak), bits_of(all.sum), 0, 0));
}
// Eight values of a head.
__device__ __forceinline__ void publish_whole(Consumer& c, int layer, const Share& share, int g, int word, const Quad& low, const Quad& high) {
  if (share.splits > 1) return publish_part(c, share, 0, g, 2 * word, low), publish_part(c, share, 0, g, 2 * word + 1, high);
  const int head = share.kv_head * kGroup + g;
  const float scale = scale_of_head(c, layer, head, low);
  const uint2 first = packed(low, scale), second = packed(high, scale);
  publish<Buffer::attended>(*c.params.exchange, c.turn, head * kHeadWords + word, make_uint4(first.x, first.y, second.x, second.y));
}

// Four values of a head, of one row: a single split publishes the attended values themselves; several splits publish their
// parts, for `combine`.
template <int Rows>
__device__ __forceinline__ void publish_result(Consumer& c, int layer, const Share& share, int row, int g, int quad, const Quad& all, bool real) {
  if (share.splits == 1) return publish_attended<Rows>(c, layer, share.kv_head * kGroup + g, quad, all, real, row);
  if (real) publish_part(c, share, row, g, quad, all);
}

// Each thread has four values of a head per iteration.
__device__ __forceinline__ void publish_results(Consumer& c, int layer, const Share& share) {
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(kGroup * kQuads); i += kConsumers) {  // whole warps: they shuffle
    const bool real = i < kGroup * kQuads;
    const int g = real ? i / kQuads : 0, quad = i % kQuads;
    const Quad all = combine_warps(c.shared, smaller(share.count, kWarps), g, quad * 4);
    publish_result<1>(c, layer, share, 0, g, quad, all, real);
  }
}
// The same by the warp that alone has a part. A lane has whole words, so that none shuffles, and loads all that it has before it
// stores the first.
__device__ __forceinline__ void publish_lone(Consumer& c, int layer, const Share& share) {
  constexpr int kWords = kGroup * kHeadWords, kAtOnce = smaller(2, divide_up(kWords, kLanes));
  static_assert(kHeadDim % 8 == 0, "whole words");
#pragma unroll 1
  for (int first = c.lane(); first < kWords; first += kAtOnce * kLanes) {
    Quad low[kAtOnce], high[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = smaller(first + n * kLanes, kWords - 1);
      const float(&part)[kPartValues] = c.shared.attention[0][i / kHeadWords];
      low[n] = part_of_warp(part, i % kHeadWords * 8), high[n] = part_of_warp(part, i % kHeadWords * 8 + 4);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int i = first + n * kLanes, g = i / kHeadWords, word = i % kHeadWords;
      if (i < kWords) publish_whole(c, layer, share, g, word, low[n], high[n]);
    }
  }
}
// The same for several rows from `group` on, each of which has so many parts.
__device__ __forceinline__ void publish_rows(Consumer& c, int layer, const Share& share, int chains, int group, int rows) {
  constexpr int kQuads = kHeadDim / 4, kEach = kGroup * kQuads;
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(rows * kEach); i += kConsumers) {
    const bool real = i < rows * kEach;
    const int row = real ? i / kEach : 0, g = real ? i % kEach / kQuads : 0, quad = i % kQuads;
    const Quad all = combine_warps(c.shared, chains, g, quad * 4, row * chains);
    publish_result<kRows>(c, layer, share, group + row, g, quad, all, real);
  }
}

}  // namespace monotape
