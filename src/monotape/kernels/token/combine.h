// The parts of several workers, combined in the order of the positions.
#pragma once
#include "token/attention.h"

namespace monotape {

// Where several workers share a KV head: for a query head, each warp adds up the parts of every eighth split, a lane four
// values at a time. Then the warps' sums are added up, as in `attend`.
__device__ __forceinline__ void hear_parts(Consumer& c, int head, int splits, int layer, int row) {
  constexpr int kAtOnce = smaller(divide_up(kMaxSplits, kWarps), 5);  // limited by registers
  const bool has_values = c.lane() < kPartialWords - 1;
  float peak = -infinity(), sum = 0, value[4] = {0, 0, 0, 0};
  Patience patience(c.shared, c.lost, Stage::combine, layer);
#pragma unroll 1
  for (int first = c.warp(); first < splits; first += kAtOnce * kWarps) {
    int index[2 * kAtOnce];
    uint4 word[2 * kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int split = first + i * kWarps, start = row * kRowWords + (head * kMaxSplits + split) * kPartialWords;
      index[2 * i] = split < splits && has_values ? start + c.lane() : -1;
      index[2 * i + 1] = split < splits ? start + kPartialWords - 1 : -1;
    }
    poll(words_of<Buffer::partials>(*c.params.exchange, c.turn), index, word, patience);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const float its_peak = first + i * kWarps < splits ? __uint_as_float(word[2 * i + 1].x) : -infinity();
      const float higher = fmaxf(peak, its_peak), top = higher == -infinity() ? 0 : higher;
      const float fade = exponential(peak - top), weight = exponential(its_peak - top);
      peak = higher;
      sum = sum * fade + __uint_as_float(word[2 * i + 1].y) * weight;
      value[0] = value[0] * fade + __uint_as_float(word[2 * i].x) * weight;
      value[1] = value[1] * fade + __uint_as_float(word[2 * i].y) * weight;
      value[2] = value[2] * fade + __uint_as_float(word[2 * i].z) * weight;
      value[3] = value[3] * fade + __uint_as_float(word[2 * i].w) * weight;
    }
  }
  warp_meets();
  float* part = c.shared.attention[c.warp()][0];
  if (has_values) reinterpret_cast<float4*>(part)[c.lane()] = float4{value[0], value[1], value[2], value[3]};
  if (c.lane() == 0) part[kHeadDim] = peak, part[kHeadDim + 1] = sum;
}

template <int Rows>
__device__ __forceinline__ bool combine(Consumer& c, int layer, int position, int rows) {
  const int splits = split_count(position);
  if (splits == 1) return true;
  // From the last worker down: the first ones have the most to do in attention.
#pragma unroll 1
  for (int task = kWorkers - 1 - worker_number(); task < rows * kHeads; task += kWorkers) {
    const int head = Rows == 1 ? task : task % kHeads, row = Rows == 1 ? 0 : task / kHeads;
    c.begin(Stage::combine, layer);
    if (!c.meet()) return false;  // no warp reads the sums of qkv any more, as in `attend`, or the parts of the head before
    hear_parts(c, head, splits, layer, row);
    if (resets_in_attention(c) && worker_number() / kKvHeads >= splits) reset_in_attention(c, layer);  // not before, in `attend`
    if (!c.meet()) return false;
    if (c.warp() == 0) {
      const int quad = smaller(c.lane(), kHeadDim / 4 - 1);  // all lanes: they shuffle
      const Quad all = combine_warps(c.shared, kWarps, 0, quad * 4);
      publish_attended<Rows>(c, layer, head, c.lane(), all, c.lane() < kHeadDim / 4, row);
    }
    c.trace.end();
  }
  return worker_number() < kWorkers - rows * kHeads || c.meet();  // the next input lies where the parts are
}

}  // namespace monotape
