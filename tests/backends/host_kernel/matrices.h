// A kernel of matrix stages alone, for passes of several rows: attention, the residual stream and the sampler take one.
// Inputs of all stages are in the exchange from the start, and stay there; every stage's output goes to logits_out,
// [steps of a token][kMostRows][kRows].
#pragma once
#include "token/model.h"

namespace monotape {

__host__ __device__ constexpr int most_rows() {
  int most = 0;
  for (int i = 0; i < kMatrixStages; i++) most = larger(most, stage_row(i).tiles * kTileRows);
  return most;
}
constexpr int kMostRows = most_rows();

// The producer plays KV after the stage that attends. Here no position has any, and its pages are passed unread.
__device__ void pass_over_kv(Consumer& c, int layer) {
  const Share share = share_of(c.shared, layer, 0);
  for (int unit = 0; share.has_part && unit < share.count; unit += kPageUnits) {
    c.pages.take(c.lost);
    c.pages.give_back(c.lane(), c.lost);
  }
}

__device__ void multiply_all(Consumer& c) {
  for (int step = 0; step < kTokenSteps; step++) {
    const Stage stage = stage_of(step);
    const int layer = layer_of(step);
    const Matrix matrix = matrix_of(c, stage, layer);
    const bool ran = run_matrix<kRows>(c, matrix, kRows, [&](int p, int tile, int row, float y, bool real) {
      const int64_t at = static_cast<int64_t>(step) * kMostRows + (c.span(stage).first + tile) * kTileRows + row;
      if (real) c.params.logits_out[at * kRows + p] = y;
    });
    if (!ran) return;
    if (attention_follows(stage)) pass_over_kv(c, layer);
    if (stage == kLastStage) c.turn++;
  }
}

}  // namespace monotape

extern "C" __global__ void monotape_request() {
  using namespace monotape;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (thread_number() == 0) {
    for (int i = 0; i < kRingPages; i++) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    barrier_init_fence();
    shared.done = shared.failed = shared.position = shared.head_first = shared.copied = shared.sample_turn = 0;
    shared.nan_place = -1;
    if constexpr (kRows > 1) shared.drafts.pass = 0;
    shared.swept = 1 << 30;  // nothing is published, so nothing is reset
    shared.pace = kPolling, shared.playing = 1;
  }
  if (thread_number() < kMatrixStages) shared.spans[thread_number()] = request.spans[worker_number() * kMatrixStages + thread_number()];
  block_meets();
#ifdef MONOTAPE_RING
  if (thread_number() == kConsumers) Producer(shared, request).play(worker_number());
#endif
  if (thread_number() >= kConsumers) return;
  Consumer c(request, shared);
#ifdef MONOTAPE_DIE_COPIES
  if (!find_die(c)) return;
#endif
  multiply_all(c);
  if (!c.meet() || thread_number() != 0) return;
  shared.done = 1;
}
