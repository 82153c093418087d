// The prompt, a chunk of rows at a time, through all layers. Its last row is left to the head.
#pragma once
#include "rows/attention.h"
#include "rows/heads.h"
#include "rows/matrix.h"
#include "rows/norm.h"

namespace monotape {

__device__ __forceinline__ void normalise_rows(Consumer& c) {
  const Params& p = c.params;
  const RowsState& state = rows_state(c);
  const Stage stage = state.part.stage;
  const bool first = stage == kFirstStage && state.layer == 0;
  const int vector = static_cast<int>(of_stage(stage, [](StageRow row) { return row.gain; }));
  const float* gain = p.vectors[vector] + (stage == Stage::head ? 0 : static_cast<int64_t>(state.layer) * kWidth);
  Pieces pieces = pieces_of(c, residual_before(stage));
  if (first) pieces.count = 0;
  if (state.chunk.count - state.first_row() <= kWorkers) RowNorm<1>(c, pieces, gain, first).run();
  else RowNorm<RowNorm<1>::kWords == 1 ? 4 : 2>(c, pieces, gain, first).run();
}

// One call of each part, so that each is in the kernel once.
__device__ __forceinline__ void run_part(Consumer& c) {
  const PartKind part = rows_state(c).part.kind;
  if (kHeadInput == HeadInput::mean && rows_state(c).layer == kLayers && part == PartKind::norm) pack_rows(c);
  else if (part == PartKind::norm) normalise_rows(c);
  else if (part == PartKind::heads) finish_heads(c, pieces_of(c, kAttends));
  else if (part == PartKind::attention) attend_rows(c);
  else if (part == PartKind::combine) combine_splits(c);
  else if (kExperts > 0 && part == PartKind::choose) choose_rows(c, pieces_of(c, kRouter));
  else if (kExperts > 0 && part == PartKind::group) group_rows(c);
  else multiply_rows(c);
}

enum class Prefilled { failed, cancelled, done };

__device__ __forceinline__ Prefilled run_chunk(Consumer& c) {
  const Params& p = c.params;
#pragma unroll 1
  for (;;) {
    c.refresh();
    const RowsState& state = rows_state(c);
    const Part part = state.part;
    if (state.layer == kLayers && state.number == (p.logits_out ? 2 : 0)) return Prefilled::done;
    if constexpr (kRanks == 1) {
      // Worker 0 sets the stop flag before a layer's last barrier, and all workers read it after the barrier.
      const bool begins = state.number == 0, ends = state.ends_layer();
      if (begins && read_counter(&p.exchange->going_on) == 0) return Prefilled::cancelled;
      if (ends && worker_number() == 0 && c.thread == 0 && c.shared.cancel) mark_unhealthy(&p.exchange->going_on);
    }
    run_part(c);
    if (kRanks > 1 && part.kind == PartKind::product && adds_to_residual(part.stage)) {
      if (!end_module_rows(c, pieces_of(c, part.stage))) return Prefilled::failed;
      if (c.shared.stopping) return Prefilled::cancelled;
      continue;
    }
    const bool whole = rows_state(c).part.kind == PartKind::attention && splits_of(c).count == 1;  // nothing to combine
    if (!all_meet(c, whole ? 2 : 1)) return Prefilled::failed;
  }
}

__device__ __forceinline__ Prefilled prefill(Consumer& c) {
  const Params& p = c.params;
#pragma unroll 1
  for (int start = p.cached; start < p.prompt_length; start = rows_state(c).chunk.start + p.chunk) {
    if (!begin_chunk(c, start)) return Prefilled::failed;
    if (kRanks > 1 && c.thread == 0) c.shared.position = start;  // for the report of how far a rank has come
    const Prefilled prefilled = run_chunk(c);
    if (prefilled != Prefilled::done) return prefilled;
    // All workers stored their KV before the last barrier.
    if (worker_number() == 0 && c.thread == 0) store_to_host(&p.status->filled, end_of(rows_state(c).chunk));
  }
  if (!p.logits_out) publish_last_row(c, pieces_of(c, kLastStage));
  return Prefilled::done;
}

}  // namespace monotape
