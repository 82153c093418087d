// From logits to the next token.
#pragma once
#include "sampling/offers.h"
#include "ranks/choice.h"
#ifdef MONOTAPE_DIE_COPIES
#include "exchange/dies.h"
#endif

namespace monotape {

// A loop, although it is short: see Team::over_lanes.
__device__ __forceinline__ Candidate best_of_warp(Candidate mine) {
#pragma unroll 1
  for (int o = kLanes / 2; o; o >>= 1) {
    const Candidate other = {lane_across(mine.score, o), lane_across(mine.id, o)};
    if (better(other, mine)) mine = other;
  }
  return mine;
}

// One thread passes the next token to the others of its worker, after it has polled a word of this token from every worker.
// So all workers have read the words of the exchange before, and this worker resets its own: three copies are used in turn,
// and + 2 is the one before this.
__device__ __forceinline__ void announce(Consumer& c, int token, int stop) {
  publish<Buffer::candidates>(*c.params.exchange, c.sample_turn() + 2, worker_number(), not_yet());
  if constexpr (kRows > 1) {
#pragma unroll
    for (int row = 1; row < kRows; row++)
      publish<Buffer::candidates>(*c.params.exchange, c.sample_turn() + 2, row * kWorkers + worker_number(), not_yet());
    if (worker_number() == 0) store_word(offer_word(*c.params.exchange, c.head_turn() + 2), not_yet());
  }
  c.shared.next_token = token;
  c.shared.stopping = stop;
  c.shared.sample_turn = c.shared.sample_turn + 1;
}

// Every worker publishes its best token, and every worker finds the best of all. Worker 0's word also says whether the host
// wants to stop. A worker that has polled all words knows that all workers are done with this token. `chosen_logit`, in
// shared memory, receives the logit of the chosen token.
__device__ __forceinline__ bool elect(Consumer& c, Candidate mine, float* chosen_logit = nullptr) {
  c.set_pace(kPolling);
  mine = best_of_warp(mine);
  if (c.lane() == 0) c.shared.best_value[c.warp()] = mine.score, c.shared.best_id[c.warp()] = mine.id;
  if (!c.meet()) return false;
  if (c.warp() == 0) {
    mine = c.lane() < kWarps ? Candidate{c.shared.best_value[c.lane()], c.shared.best_id[c.lane()]} : nobody();
    mine = best_of_warp(mine);
    uint4* candidates = words_of<Buffer::candidates>(*c.params.exchange, c.sample_turn());
    if (c.lane() == 0) {
      const float logit = chosen_logit && mine.id < kAllVocab ? c.logits()[mine.id] : 0;
      store_word(candidates + worker_number(),
                 make_uint4(__float_as_uint(mine.score), mine.id, worker_number() == 0 && c.shared.cancel, __float_as_uint(logit)));
    }
    constexpr int kCount = divide_up(kWorkers, kLanes);
    int index[kCount];
    uint4 word[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) index[i] = c.lane() + kLanes * i < kWorkers ? c.lane() + kLanes * i : -1;
    Patience patience(c.shared, c.lost, Stage::sample, kLayers);
#ifdef MONOTAPE_DIE_COPIES
    poll_on_die(candidates, copy_of<Buffer::candidates>(c, c.sample_turn()), index, word, patience,
                [&](int i) { return brings_over(c, kMatrixStages, index[i]); });
#else
    poll(candidates, index, word, patience);
#endif
    mine = nobody();
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const Candidate other = {__uint_as_float(word[i].x), static_cast<int>(word[i].y)};
      if (index[i] >= 0 && better(other, mine)) mine = other;
    }
    mine = best_of_warp(mine);
    if (chosen_logit) {
#pragma unroll
      for (int i = 0; i < kCount; i++)
        if (index[i] >= 0 && static_cast<int>(word[i].y) == mine.id) *chosen_logit = __uint_as_float(word[i].w);
    }
    int stop = word[0].z;
    if constexpr (kRanks > 1) {
      warp_meets();
      const Choice told = {mine.score, mine.id, lane_at(stop, 0), chosen_logit ? *chosen_logit : 0};
      const auto beats = [](float a, int id_a, float b, int id_b) { return better({a, id_a}, {b, id_b}); };
      const Choice best = agree(c, told, beats);
      mine = {best.score, best.id}, stop = best.stop;
      if (chosen_logit && c.lane() == 0) *chosen_logit = best.logit;
    }
    warp_meets();  // since the last barrier only this warp has read the turn
    if (c.lane() == 0) announce(c, mine.score == mine.score ? mine.id : -1, stop);
  }
  return c.meet();
}

// Of every row of a pass at once: warp r elects for row r, whose candidates threads 64 r onwards have.
__device__ __forceinline__ bool elect_rows(Consumer& c, int rows) {
  const int turn = c.sample_turn();  // before the barrier: one warp counts it on after it
  c.set_pace(kPolling);
  const Candidate best = best_of_warp(c.best);
  if (c.lane() == 0) c.shared.best_value[c.warp()] = best.score, c.shared.best_id[c.warp()] = best.id;
  if (!c.meet()) return false;
  if (c.warp() < rows) {
    constexpr int kShare = kMostRowBatch * kTileRows / kLanes;  // warps that have finished one row
    Candidate mine = nobody();
    if (c.lane() < kShare) mine = {c.shared.best_value[c.warp() * kShare + c.lane()], c.shared.best_id[c.warp() * kShare + c.lane()]};
    mine = best_of_warp(mine);
    uint4* candidates = words_of<Buffer::candidates>(*c.params.exchange, turn) + c.warp() * kWorkers;
    if (c.lane() == 0)
      store_word(candidates + worker_number(), make_uint4(__float_as_uint(mine.score), mine.id, worker_number() == 0 && c.shared.cancel, 0));
    constexpr int kCount = divide_up(kWorkers, kLanes);
    int index[kCount];
    uint4 word[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) index[i] = c.lane() + kLanes * i < kWorkers ? c.lane() + kLanes * i : -1;
    Patience patience(c.shared, c.lost, Stage::sample, kLayers);
    poll(candidates, index, word, patience);
    mine = nobody();
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const Candidate other = {__uint_as_float(word[i].x), static_cast<int>(word[i].y)};
      if (index[i] >= 0 && better(other, mine)) mine = other;
    }
    mine = best_of_warp(mine);
    const int token = mine.score == mine.score ? mine.id : -1;
    if (c.lane() == 0) c.shared.drafts.chosen[c.warp()] = token;
    if (c.lane() == 0 && c.warp() == 0) announce(c, token, word[0].z);
  }
  return c.meet();
}

__device__ __forceinline__ bool choose(Consumer& c) {
  c.begin(Stage::sample, kLayers);
  c.trace.arrived();
  const bool good = elect(c, c.best);
  c.trace.end();
  return good;
}

}  // namespace monotape
