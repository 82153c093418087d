// The head's input where ranks have residuals of their own: their sum, or the mean of the normalised residuals. Every rank
// pushes its final residual, and the owner of an element combines all of them.
#pragma once
#include "ranks/words.h"

namespace monotape {

// Each rank's sum of squares, added up from its workers by one warp per rank. The scale includes the division of the mean.
__device__ __forceinline__ void share_squares(Consumer& c, uint32_t number) {
  const Ranks& ranks = c.params.ranks;
  const int place = static_cast<int>(number % 2) * kRanks * kWorkers;
  if (c.warp() == 0) {
    float squares = 0;
    for (int i = c.lane(); i < c.span(kResidualStage).count * kTileRows; i += kLanes) {
      const float value = c.shared.residual[0][i];
      squares += value * value;
    }
#pragma unroll
    for (int o = kLanes / 2; o; o >>= 1) squares += lane_across(squares, o);
    if (c.lane() < kRanks)
      push(ranks.inbox[c.lane()].squares + place + worker_number(), __float_as_uint(squares), number);
  }
  if (c.warp() >= kRanks) return;
  const LinkWord* words = ranks.own.squares + place + c.warp() * kWorkers;
  LinkPatience patience(c, Stage::head, kLayers);
  float squares = 0;
  for (int worker = c.lane(); worker < kWorkers; worker += kLanes)
    squares += __uint_as_float(receive(words + worker, number, ranks, c.warp(), worker, patience));
#pragma unroll
  for (int o = kLanes / 2; o; o >>= 1) squares += lane_across(squares, o);
  if (c.lane() == 0) c.shared.lane_scale[c.warp()] = inverse_root(squares / kWidth + kNormEps) / kRanks;
}

__device__ __forceinline__ bool combine_lanes(Consumer& c) {
  if (!c.meet()) return false;  // the residual is complete
  c.begin(Stage::head, kLayers);
  const Ranks& ranks = c.params.ranks;
  const Span& owned = c.span(kResidualStage);
  const uint32_t number = token_number(c);
  const int place = static_cast<int>(number % 2) * kRanks * kLinkWidth, first = owned.first * kTileRows;
#pragma unroll 1
  for (int i = c.thread; i < owned.count * kTileRows; i += kConsumers) {
    const bool gains = kHeadInput == HeadInput::mean && first + i < kWidth;
    const float value = c.shared.residual[0][i] * (gains ? c.params.vectors[static_cast<int>(row_of(Stage::head).gain)][first + i] : 1);
#pragma unroll
    for (int to = 0; to < kRanks; to++)
      push(ranks.inbox[to].lanes + place + first + i, __float_as_uint(value), number);
  }
  if constexpr (kHeadInput == HeadInput::mean) {
    share_squares(c, number);
    if (!c.meet()) return false;
  }
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(owned.count * kTileRows); i += kConsumers) {  // whole warps: they shuffle
    float sum = 0;
    if (i < owned.count * kTileRows) {
      LinkPatience patience(c, Stage::head, kLayers);
      Arrivals found;
      found.wait(ranks.own.lanes + place + first + i, kLinkWidth, number, ranks, kAllRanks, first + i, patience);
#pragma unroll
      for (int from = 0; from < kRanks; from++)
        sum += found.value(from) * (kHeadInput == HeadInput::mean ? c.shared.lane_scale[from] : 1);
    }
    const uint4 word = gather_word(sum);
    if (i < owned.count * kTileRows && i % kTileRows == 0)
      publish<Buffer::final_residual>(*c.params.exchange, c.sample_turn(), owned.first + i / kTileRows, word);
  }
  return true;
}

}  // namespace monotape
