// Where a worker has a second team, the helpers: how the consumers and they tell each other what is in shared memory.
//
// The consumers poll the input of a stage, add up sums and publish; the helpers only multiply. Per token, stage and batch:
//
//   begun    thread 0 has set the token's position; the helpers may start its first stage
//   heard    a consumer warp has written its part of the input; the helper warp with the same blocks of k reads it
//   helped   the helpers' sums of a batch are written; a consumer warp awaits this before the consumers' barrier
//   met      the consumers have passed the barrier of a batch, so none of them reads the sums of the batch before; the
//            helpers may write those of the next batch into the same buffer
//
// Each is a barrier of shared memory that completes once a token, stage or batch. No side can be two phases ahead: the
// consumers wait for `helped` in every batch, and the helpers for all others. A token in which a worker has no batch is not
// begun; a worker that has none at all does without its helpers.
#pragma once
#include "worker/consumer.h"

namespace monotape {

// Waits for a phase; false when the request has failed or ended. All lanes learn the same, because they go on together.
__device__ __forceinline__ bool await_phase(const Shared& shared, uint64_t* barrier, uint32_t parity) {
  bool passed = barrier_passed(barrier, parity);
  while (!passed && !shared.failed && !shared.done) passed = barrier_passed(barrier, parity);
  return lanes_agree(passed);
}

__device__ __forceinline__ void init_helping(Shared& shared) {
  if constexpr (kHelped) {
    barrier_init(&shared.helping.begun, 1);
    barrier_init(&shared.helping.helped, kWarps);
    barrier_init(&shared.helping.met, 1);
    for (int w = 0; w < kWarps; w++) barrier_init(&shared.helping.heard[w], 1);
  }
}

// The consumers' side.
__device__ __forceinline__ void tell_begun(Consumer& c, bool head_only) {
  if constexpr (kHelped) {
    if (c.thread != 0 || (head_only && c.span(Stage::head).count == 0)) return;
    c.shared.helping.head_only = head_only;
    barrier_arrive(&c.shared.helping.begun);
  }
}
__device__ __forceinline__ void tell_heard(Consumer& c) {
  if constexpr (kHelped)
    if (c.lane() == 0) barrier_arrive(&c.shared.helping.heard[c.warp()]);
}
__device__ __forceinline__ void await_helpers(Consumer& c) {
  if constexpr (kHelped)
    if (c.warp() == kWarps - 1 && !await_phase(c.shared, &c.shared.helping.helped, c.batches & 1)) c.lost = true;
}
__device__ __forceinline__ void tell_met(Consumer& c) {
  if constexpr (kHelped) {
    if (c.thread == 0) barrier_arrive(&c.shared.helping.met);
    c.batches++;
  }
}

}  // namespace monotape
