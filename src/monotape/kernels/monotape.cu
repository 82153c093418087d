// The monokernel: one launch runs a whole request. Every thread block is a worker: eight consumer warps compute, a producer
// copies the tape into the ring, a scout loads ahead of it, a janitor resets published words, and a clerk keeps the deadline
// and, in worker 0, talks to the host. To follow a token, read `decode` below, then `forward` in token/model.h.
#include "sampling/draw.h"
#include "token/model.h"
#include "rows/prefill.h"
#include "sampling/elect.h"
#ifdef MONOTAPE_RING
#include "worker/scout.h"
#endif

namespace monotape {

#ifndef MONOTAPE_RING
static_assert(kRows == 1, "several rows attend to units in a ring");
#endif
static_assert(kRows == 1 || (kRanks == 1 && kExperts == 0 && kKinds == 1), "models whose passes may have several rows");

// Every worker decides for itself, and all decide alike; worker 0 passes the token to the clerk.
__device__ Finish tell(Consumer& c, int produced, int token) {
  const Params& p = c.params;
  Finish finish = Finish::running;
  for (int i = 0; i < p.stop_count; i++)
    if (p.stop_ids[i] == token) finish = Finish::stop;
  if (finish == Finish::running && produced + 1 == p.max_tokens) finish = Finish::length;
  if (token == kTextComplete) finish = Finish::stop;
  if (c.shared.stopping) finish = Finish::cancelled;
  if (token < 0 && token != kTextComplete) finish = Finish::numerical_fault;
  if (worker_number() == 0 && c.thread == 0) {
    if (token >= 0 && finish != Finish::cancelled) mail(c.shared, token);
    if (finish != Finish::running) c.shared.finish = static_cast<int>(finish);
  }
  return finish;
}

// For tests: the logits of every position of the prompt.
__device__ void keep_token_logits(Consumer& c, int row) {
  const Span& span = c.span(Stage::head);
  const int first = span.first * kTileRows, end = smaller(kVocab, first + span.count * kTileRows);
  for (int id = first + c.thread; id < end; id += kConsumers)
    c.params.logits_out[static_cast<int64_t>(row) * kAllVocab + first_id(c.params) + id] = c.params.logits[first_id(c.params) + id];
}

__device__ void begin_playing(Consumer& c, int position, bool head_first) {
  if (c.thread != 0) return;
  c.shared.position = position;
  c.shared.head_first = head_first;
  fence_block();
  c.shared.playing = 1;
}

__device__ void end_with(Consumer& c, Finish finish) {
  if (c.thread == 0) c.shared.finish = static_cast<int>(finish);
}

__device__ __forceinline__ bool choose_next(Consumer& c, int produced) {
  const Params& p = c.params;
  if (!p.sampling.active || produced < 0) return choose(c);
  return draw(c, p.sampling, c.shared.select, c.shared.sampler, p.sampler_words, p.prompt_length + produced, produced);
}

// A pass with drafts: its rows are accepted up to the first whose token is not the draft after it. Returns how many tokens it
// gave; 0: the request has ended.
template <int Rows>
__device__ __forceinline__ int play_rows(Consumer& c, int position, int& token) {
  const Params& p = c.params;
  const int rows = c.shared.drafts.rows, first = position + 1 - p.prompt_length;
  c.trace.start_token(p, first);
  if (!forward<Rows>(c, 0, position, false)) return 0;
  hear_offer(c);
  if (!p.sampling.active) {
    c.begin(Stage::sample, kLayers);
    if (!elect_rows(c, rows)) return 0;
  }
#pragma unroll 1
  for (int row = 0; row < rows; row++) {
    if (p.sampling.active) {
      if (c.thread == 0) c.shared.drafts.row = row;
      if (row > 0) fence_device();  // as between two tokens: see sampling/team.h
      if (!c.meet() || !choose_next(c, first + row)) return 0;
    }
    token = p.sampling.active ? c.shared.next_token : c.shared.drafts.chosen[row];
    const bool ends = tell(c, first + row, token) != Finish::running;
    if (!ends && row + 1 < rows && token == c.shared.drafts.token[row + 1]) continue;
    if (c.thread == 0) c.shared.drafts.drafted = c.shared.drafts.drafted + rows - 1, c.shared.drafts.accepted = c.shared.drafts.accepted + row;
    return ends ? 0 : row + 1;
  }
  return 0;
}

// What the loops over passes leave to each other: all consumers of a worker have the same.
__device__ __forceinline__ void leave_off(Consumer& c, int position, int token) {
  if (c.thread == 0) c.shared.drafts.left = {c.carried(), position, token};
}
__device__ __forceinline__ bool go_on(Consumer& c, int& position, int& token) {
  if (!c.meet()) return false;  // thread 0 has written it
  const Left left = c.shared.drafts.left;
  c.go_on(left.state);
  position = left.position, token = left.token;
  return true;
}

// Passes with drafts, as long as there are any. False: the request has ended.
template <int Rows>
__device__ __noinline__ bool play_drafts(Shared& shared) {
  Consumer c(changeable(request), kept(shared, ~0u));
  const Params& p = c.params;
  int position, token;
  if (!go_on(c, position, token)) return false;
#pragma unroll 1
  for (int rows = c.shared.drafts.rows; rows != 1;) {
    const int told = rows == 0 ? 0 : play_rows<Rows>(c, position, token);
    if (told == 0) return false;
    position += told;
    rows = plan_rows(c, token, position, p.prompt_length + p.max_tokens - position, told == rows);
  }
  leave_off(c, position, token);
  return true;
}

// All tokens after the prompt, one a pass; without rows, the prompt's tokens too. Where passes may have drafts this loop ends
// before the first that has, returns true, and goes on from there when it is called again. It does not call the other loop,
// because a loop that calls something keeps its values where the call leaves them alone. Nor is it inlined: registers and
// instruction order are chosen for this loop alone, as if there were neither prefill nor drafts.
template <int Rows>
using Going = Chosen<(Rows > 1), bool, void>;
template <int Rows>
__device__ __noinline__ Going<Rows> decode(Shared& shared) {
  Consumer c(changeable(request), kept(shared, ~0u));
  const Params& p = c.params;
  bool head_first = false;
  int position, token;
  if (Rows > 1 && shared.drafts.left.position > 0) {
    if (!go_on(c, position, token)) return Going<Rows>();
  } else {
    const bool in_rows = has_rows(p);
    // Rows used ordinary accesses; bulk copies follow.
    fence_copies();
    if (!c.meet()) return Going<Rows>();
#ifdef MONOTAPE_DIE_COPIES
    if (!find_die(c)) return Going<Rows>();
#endif
    if (p.sampling.active && !begin_drawing(c, p.sampling, c.shared.select, c.shared.sampler, p.sampler_words)) return Going<Rows>();
    position = in_rows ? p.prompt_length : p.cached;
    begin_playing(c, position, in_rows);
    token = in_rows ? 0 : p.prompt[p.cached];
    c.turn = in_rows ? kLayers : 0;  // as if the rows had been a token
    head_first = in_rows;
  }
#pragma unroll 1
  for (bool head_only = head_first;; head_only = false) {
    const int produced = position + (head_only ? 0 : 1) - p.prompt_length;
    c.trace.start_token(p, produced);
    if (!forward<1>(c, token, position, head_only)) return Going<Rows>();
    if constexpr (Rows > 1) hear_offer(c);
    if (!choose_next(c, produced)) return Going<Rows>();
    if (!head_only) position++;
    if (p.logits_out) keep_token_logits(c, position - 1 - p.cached);
    if (produced < 0 && c.shared.stopping) {
      end_with(c, Finish::cancelled);
      return Going<Rows>();
    }
    if (produced < 0) {
      token = p.prompt[position];
    } else {
      if (p.logits_out) end_with(c, Finish::length);
      if (p.logits_out || tell(c, produced, c.shared.next_token) != Finish::running) return Going<Rows>();
      token = c.shared.next_token;
    }
    if constexpr (Rows > 1) {
      const int rows = plan_rows(c, token, position, p.max_tokens - produced - 1, produced >= 0);
      if (rows == 0) return Going<Rows>();
      if (rows > 1) {
        leave_off(c, position, token);
        return true;
      }
    } else {
      if (c.thread == 0) c.shared.position = position;
    }
  }
}

template <int Rows>
__device__ __forceinline__ void decode_all(Shared& shared) {
  if constexpr (Rows > 1) {
    while (decode<Rows>(shared) && play_drafts<Rows>(shared)) {}
  } else {
    decode<Rows>(shared);
  }
}

__device__ __forceinline__ void run(Shared& shared) {
  if constexpr (kPrefill) {
    if (has_rows(request)) {
      Consumer c(changeable(request), shared);
      const Prefilled prefilled = prefill(c);
      if (prefilled == Prefilled::cancelled) end_with(c, Finish::cancelled);
      if (prefilled == Prefilled::done && request.logits_out) end_with(c, Finish::length);
      if (prefilled != Prefilled::done || request.logits_out) return;
    }
  }
  decode_all<kRows>(shared);
}

// The clerk's warp where passes have several rows: lane 0 is the clerk, and all lanes of worker 0's are the drafter.
__device__ __forceinline__ void work_and_draft(Shared& shared) {
  const Params& p = changeable(request);
  Clerk clerk(shared, p);
  Drafter drafter(shared, p);
  const bool drafts = worker_number() == 0 && p.history;
  if (lane_number() == 0) clerk.begin();
  for (int done = 0; !done; done = lane_at(static_cast<int>(shared.done), 0)) {
    const int pass = lane_at(static_cast<int>(shared.drafts.pass), 0);
    fence_block();  // tokens before that pass have been mailed
    if (lane_number() == 0) clerk.look();
    warp_meets();
    if (drafts) drafter.look(pass);
    rest(500);
  }
  if (lane_number() == 0) clerk.end();
}

}  // namespace monotape

extern "C" __global__ void __launch_bounds__(monotape::kThreads, 1) monotape_request() {
  using namespace monotape;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (thread_number() == 0) {
    for (int i = 0; i < kRingPages; i++) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    barrier_init_fence();
    shared.done = shared.playing = shared.mailed = shared.delivered = shared.cancel = 0;
    shared.finish = shared.failed = shared.position = shared.progress = 0;
    shared.nan_place = shared.awaited_progress = -1;
    if constexpr (kRanks > 1) shared.owed_progress = -1;
    shared.copied = 0;
    shared.sampler = {0, {0, 0, 0}};
    shared.own_count[0][0] = shared.own_count[1][0] = shared.barriers = 0;
    if constexpr (kRows > 1) {
      Drafts& drafts = shared.drafts;
      drafts.rows = 1;
      for (int i = 0; i < 4; i++) drafts.rows_of[i] = 1;
      drafts.left.position = 0;
      drafts.row = drafts.pass = drafts.drafted = drafts.accepted = 0;
      drafts.offer_of = -1;
    }
    shared.list_of[0] = shared.list_of[1] = shared.listed_splits = shared.sample_turn = 0;
    shared.pace = kPolling, shared.swept = -1;
    if constexpr (kExperts > 0) shared.chosen_step = -1;
  }
  for (int i = thread_number(); i < kLayerSteps * kWarps; i += kThreads) shared.first_look[i / kWarps][i % kWarps] = FirstLook::kFirst;
  if (thread_number() < kMatrixStages) shared.spans[thread_number()] = request.spans[worker_number() * kMatrixStages + thread_number()];
  if constexpr (kKinds > 1)
    for (int layer = thread_number(); layer < kLayers; layer += kThreads) shared.windows[layer] = request.windows[layer];
  if constexpr (kRanks > 1)
    for (int i = thread_number(); i < kSteps; i += kThreads) shared.steps[i] = request.ranks.steps[i];
  block_meets();
  if (thread_number() >= kConsumers) {
    give_registers<kOtherRegisters>();
#ifdef MONOTAPE_RING
    if (thread_number() == kConsumers) Producer(shared, request).play(worker_number());
#endif
    if (kRows > 1 && warp_number() == kWarps + 1) return work_and_draft(shared);
    if (thread_number() == kConsumers + kLanes) Clerk(shared, changeable(request)).work();
    if (warp_number() == kWarps + 2) Janitor(shared, changeable(request)).work();
#ifdef MONOTAPE_RING
    if (kLeadBytes > 0 && warp_number() == kWarps + 3) Scout(shared, request, worker_number()).work();
#endif
    return;
  }
  take_registers<kConsumerRegisters>();
  run(shared);
  if (thread_number() == 0) {
    fence_block();
    shared.done = 1;
  }
}
