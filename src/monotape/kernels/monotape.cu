// The monokernel: one launch runs a whole request. Every block is a worker; eight warps take each token through the
// model, one plays the tape, and worker 0 has a clerk. One token's life is `run` below, then `forward` in model.h.
#include "model.h"
#include "sample.h"

namespace monotape {

// Everybody decides alike whether to go on; worker 0 tells the clerk.
__device__ Finish tell(Consumer& c, int produced) {
  const Params& p = c.params;
  const int token = c.shared.next_token;
  Finish finish = Finish::running;
  for (int i = 0; i < p.stop_count; i++)
    if (p.stop_ids[i] == token) finish = Finish::stop;
  if (finish == Finish::running && produced + 1 == p.max_tokens) finish = Finish::length;
  if (c.shared.stopping) finish = Finish::cancelled;
  if (token < 0) finish = Finish::numerical_fault;
  if (blockIdx.x == 0 && c.thread == 0) {
    if (token >= 0 && finish != Finish::cancelled) mail(c.shared, token);
    if (finish != Finish::running) c.shared.finish = static_cast<int>(finish);
  }
  return finish;
}

// For tests: the logits of every position of the prompt.
__device__ void keep_logits(Consumer& c, int row) {
  const Span& span = c.span(Stage::head);
  const int first = span.first * kTileRows, end = smaller(kVocab, first + span.count * kTileRows);
  for (int id = first + c.thread; id < end; id += kConsumers)
    c.params.logits_out[static_cast<int64_t>(row) * kVocab + id] = c.params.logits[id];
}

__device__ void begin_playing(Consumer& c, int position, bool head_first) {
  if (c.thread != 0) return;
  c.shared.position = position;
  c.shared.head_first = head_first;
  fence_block();
  c.shared.playing = 1;
}

__device__ void run(Consumer& c) {
  const Params& p = c.params;
  int token = p.prompt[p.cached];
  begin_playing(c, p.cached, false);
  for (int position = p.cached;; position++) {
    c.trace.start_token(p, position + 1 - p.prompt_length);
    if (!forward(c, token, position, false) || !choose(c)) return;
    if (p.logits_out) keep_logits(c, position - p.cached);
    if (position + 1 < p.prompt_length) {
      token = p.prompt[position + 1];
    } else {
      if (p.logits_out && c.thread == 0) c.shared.finish = static_cast<int>(Finish::length);
      if (p.logits_out || tell(c, position + 1 - p.prompt_length) != Finish::running) return;
      token = c.shared.next_token;
    }
    if (c.thread == 0) c.shared.position = position + 1;
  }
}

}  // namespace monotape

extern "C" __global__ void __launch_bounds__(monotape::kThreads, 1)
    monotape_request(const __grid_constant__ monotape::Params params) {
  using namespace monotape;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingPages; i++) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    barrier_init_fence();
    shared.waiting = shared.done = shared.playing = shared.mailed = shared.delivered = shared.cancel = 0;
    shared.finish = shared.failed = shared.position = shared.progress = 0;
    shared.nan_place = shared.awaited_progress = -1;
    shared.own_count[0] = shared.own_count[1] = 0;
  }
  if (threadIdx.x < kMatrixStages) shared.spans[threadIdx.x] = params.spans[blockIdx.x * kMatrixStages + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == kConsumers) Producer(shared, params).play(blockIdx.x);
  if (threadIdx.x == kConsumers + 32) Clerk(shared, params).work();
  if (threadIdx.x >= kConsumers) return;
  Consumer consumer(params, shared);
  run(consumer);
  if (consumer.thread == 0) {
    fence_block();
    shared.done = 1;
  }
}
