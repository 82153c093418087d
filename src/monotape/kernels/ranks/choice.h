// From logits to one token that all ranks agree on. Greedy: each rank elects the best token of its part of the vocabulary,
// and all choose among those. Sampled: every rank gets all logits and draws for itself, with the same seed and order.
#pragma once
#include "ranks/words.h"

namespace monotape {

// The ids that a worker handles when a token is drawn: its own rows, or an even part of the vocabulary on several ranks.
__device__ __forceinline__ int drawn_from(const Consumer& c) {
  if constexpr (kRanks > 1) return static_cast<int>(static_cast<int64_t>(kAllVocab) * worker_number() / kWorkers);
  return c.span(Stage::head).first * kTileRows;
}
__device__ __forceinline__ int drawn_until(const Consumer& c) {
  if constexpr (kRanks > 1) return static_cast<int>(static_cast<int64_t>(kAllVocab) * (worker_number() + 1) / kWorkers);
  return smaller(kVocab, (c.span(Stage::head).first + c.span(Stage::head).count) * kTileRows);
}

__device__ __forceinline__ void push_logit(Consumer& c, int id, float logit) {
  const uint32_t number = token_number(c);
#pragma unroll
  for (int to = 0; to < kRanks; to++)
    push(c.params.ranks.inbox[to].logits + static_cast<int>(number % 2) * kAllVocab + id, __float_as_uint(logit), number);
}

// Stores this worker's part of all ranks' logits in params.logits; its threads must meet before they read it.
__device__ __forceinline__ void collect_logits(Consumer& c) {
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = token_number(c);
  const LinkWord* words = ranks.own.logits + static_cast<int>(number % 2) * kAllVocab;
  LinkPatience patience(c, Stage::sample, kLayers);
#pragma unroll 1
  for (int id = drawn_from(c) + c.thread; id < drawn_until(c); id += kConsumers) {
    // Vocabularies are split evenly, so this is the rank that owes the logit, or its neighbour.
    const int peer = static_cast<int>(static_cast<int64_t>(id) * kRanks / kAllVocab);
    c.params.logits[id] = __uint_as_float(receive(words + id, number, ranks, peer, id, patience));
  }
}

// Worker 0 of each rank pushes its rank's choice to all ranks, and every worker picks the best of them. Called by warp 0 with
// the choice of its rank, the same in all lanes. Lane 4 * rank + i has part i of a rank's choice.
struct Choice {
  float score;
  int id, stop;
  float logit;
};
template <class Better>
__device__ __forceinline__ Choice agree(Consumer& c, const Choice& mine, Better better) {
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = token_number(c);
  const int rank = c.lane() / 4, part = c.lane() % 4, place = static_cast<int>(number % 2) * kRanks * 4;
  const uint32_t value = part == 0   ? __float_as_uint(mine.score)
                         : part == 1 ? static_cast<uint32_t>(mine.id)
                         : part == 2 ? static_cast<uint32_t>(mine.stop)
                                     : __float_as_uint(mine.logit);
  if (worker_number() == 0 && rank < kRanks) push(ranks.inbox[rank].choices + place + part, value, number);
  uint32_t told = 0;
  if (rank < kRanks) {
    LinkPatience patience(c, Stage::sample, kLayers);
    told = receive(ranks.own.choices + place + c.lane(), number, ranks, rank, part, patience);
  }
  warp_meets();
  Choice best = {0, 0, 0, 0};
#pragma unroll
  for (int from = 0; from < kRanks; from++) {
    const Choice other = {__uint_as_float(lane_at(told, 4 * from)), static_cast<int>(lane_at(told, 4 * from + 1)),
                          static_cast<int>(lane_at(told, 2)),  // rank 0 says whether to stop
                          __uint_as_float(lane_at(told, 4 * from + 3))};
    if (from == 0 || better(other.score, other.id, best.score, best.id)) best = other;
  }
  return best;
}

}  // namespace monotape
