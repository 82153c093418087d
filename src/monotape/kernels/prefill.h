// The prompt, a chunk of rows at a time, through all layers. Its last row is left to the head.
#pragma once
#include "rows_attention.h"
#include "rows_matrix.h"

namespace monotape {

// What a chunk passes in each layer, in this order; a barrier after each. One loop runs them all, so that each is in
// the kernel once.
enum class Part : int { attention_norm, qkv, keys, attention, output, ffn_norm, gate_up, down };
constexpr int kParts = 8;

__device__ __forceinline__ void run_part(Consumer& c, Chunk chunk, int layer, Part part) {
  const Params& p = c.params;
  const bool after = layer == kLayers;  // for tests: logits of all rows
  if (kHeadInput == HeadInput::mean && after && part == Part::attention_norm) {
    pack_rows(c, chunk);
  } else if (part == Part::attention_norm || part == Part::ffn_norm) {
    const float* gain = part == Part::ffn_norm ? p.ffn_norm : p.attention_norm;
    normalise_rows(c, chunk, after ? p.final_norm : gain + static_cast<int64_t>(layer) * kWidth);
  } else if (part == Part::keys) {
    keep_keys_and_values(c, chunk, layer);
  } else if (part == Part::attention) {
    attend_rows(c, chunk, layer);
  } else {
    const Stage stage = after                  ? Stage::head
                        : part == Part::qkv    ? Stage::qkv
                        : part == Part::output ? Stage::output
                        : part == Part::down   ? Stage::down
                                               : Stage::gate_up;
    multiply_rows(c, chunk, stage, after ? 0 : layer);
  }
}

enum class Prefilled { failed, cancelled, done };

__device__ __forceinline__ Prefilled run_chunk(Consumer& c, Chunk chunk) {
  const Params& p = c.params;
  if (kRanks > 1 && c.thread == 0) c.shared.position = chunk.start;  // for whoever asks how far a rank has come
  embed_rows(c, chunk);
  if (!all_meet(c, 0)) return Prefilled::failed;
  const int parts = kLayers * kParts + (p.logits_out ? 2 : 0);
#pragma unroll 1
  for (int i = 0; i < parts; i++) {
    const Part part = static_cast<Part>(i % kParts);
    if constexpr (kRanks == 1) {
      // Worker 0 says before a layer's last barrier that the host wants to stop; after it all workers know.
      if (part == Part::attention_norm && read_counter(&p.exchange->going_on) == 0) return Prefilled::cancelled;
      if (part == Part::down && blockIdx.x == 0 && c.thread == 0 && c.shared.cancel) mark_unhealthy(&p.exchange->going_on);
    }
    run_part(c, chunk, i / kParts, part);
    if constexpr (kRanks > 1) {
      const bool module_ends = part == Part::output || part == Part::down;
      if (module_ends && !settle_rows(c, chunk, 2 * (i / kParts) + (part == Part::down))) return Prefilled::failed;
      if (module_ends && c.shared.stopping) return Prefilled::cancelled;
    }
    if (!all_meet(c, i / kParts)) return Prefilled::failed;
    if constexpr (kHeadInput != HeadInput::own) {
      if (i != kLayers * kParts - 1 || !ends_together(p, chunk)) continue;
      if (!combine_rows(c, chunk)) return Prefilled::failed;
      if (c.shared.stopping) return Prefilled::cancelled;
      if (!all_meet(c, kLayers)) return Prefilled::failed;
    }
  }
  return Prefilled::done;
}

__device__ __forceinline__ Prefilled prefill(Consumer& c) {
  const Params& p = c.params;
#pragma unroll 1
  for (int start = p.cached; start < p.prompt_length; start += p.chunk) {
    const Chunk chunk = {start, smaller(p.chunk, p.prompt_length - start)};
    const Prefilled prefilled = run_chunk(c, chunk);
    if (prefilled != Prefilled::done) return prefilled;
    if (start + p.chunk >= p.prompt_length) publish_last_row(c, chunk.count - 1);
  }
  return Prefilled::done;
}

}  // namespace monotape
