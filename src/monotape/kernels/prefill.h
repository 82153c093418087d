// The prompt, a chunk of rows at a time, through all layers. Its last row is left to the head.
#pragma once
#include "rows_attention.h"
#include "rows_matrix.h"

namespace monotape {

// What a chunk passes in each layer, in this order; a barrier after each. One loop runs them all, so that each is in
// the kernel once.
enum class Part : int { attention_norm, qkv, heads, attention, combine, output, ffn_norm, gate_up, down };
constexpr int kParts = 9;

// Few rows take no time to multiply: the memory would rest while parts without weights run. So each of those asks for
// weights that come after it, as much as arrives meanwhile.
__device__ __forceinline__ void fetch_tiles(Consumer& c, Stage stage, int layer, int first, int count) {
  const TilePlace* places = c.params.places + c.params.first_place[static_cast<int>(stage)];
#pragma unroll 1
  for (int tile = first + c.thread * kWorkers + blockIdx.x; tile < smaller(first + count, tiles_of(stage)); tile += kConsumers * kWorkers)
    fetch_ahead(c.params.tapes + places[tile].start + layer * places[tile].stride, k_blocks(stage) * kBlockBytes);
}
__device__ __forceinline__ void fetch_weights(Consumer& c, int layer, Part part) {
  constexpr int kSome = divide_up(tiles_of(Stage::gate_up), 3);
  if (part == Part::attention_norm) fetch_tiles(c, Stage::qkv, layer, 0, tiles_of(Stage::qkv));
  if (part == Part::heads) fetch_tiles(c, Stage::output, layer, 0, tiles_of(Stage::output));
  if (part == Part::attention) fetch_tiles(c, Stage::gate_up, layer, 0, kSome);
  if (part == Part::ffn_norm) fetch_tiles(c, Stage::gate_up, layer, kSome, kSome);
}

__device__ __forceinline__ void run_part(Consumer& c, Chunk chunk, int layer, Part part) {
  const Params& p = c.params;
  const bool after = layer == kLayers;  // for tests: logits of all rows
  if (part == Part::attention_norm || part == Part::ffn_norm) {
    const bool first = part == Part::attention_norm && layer == 0;
    const float* gain = part == Part::ffn_norm ? p.ffn_norm : p.attention_norm;
    Pieces pieces = pieces_of(c, part == Part::ffn_norm ? Stage::output : Stage::down, chunk);
    if (first) pieces.count = 0;
    RowNorm(c, chunk, pieces, after ? p.final_norm : gain + static_cast<int64_t>(layer) * kWidth, first).run();
  } else if (part == Part::heads) {
    finish_heads(c, chunk, pieces_of(c, Stage::qkv, chunk), layer);
  } else if (part == Part::attention) {
    attend_rows(c, chunk, layer);
  } else if (part == Part::combine) {
    combine_splits(c, chunk, layer);
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
  const int parts = kLayers * kParts + (p.logits_out ? 2 : 0);
  constexpr int kFewRows = 128;
#pragma unroll 1
  for (int i = 0; i < parts; i++) {
    const Part part = static_cast<Part>(i % kParts);
    const int layer = i / kParts;
    // Worker 0 says before a layer's last barrier that the host wants to stop; after it all workers know.
    if (part == Part::attention_norm && read_counter(&p.exchange->going_on) == 0) return Prefilled::cancelled;
    if (part == Part::down && blockIdx.x == 0 && c.thread == 0 && c.shared.cancel) mark_unhealthy(&p.exchange->going_on);
    if (part == Part::combine && splits_of(c, chunk, layer).count == 1) continue;
    if (chunk.count <= kFewRows && layer < kLayers) fetch_weights(c, layer, part);
    run_part(c, chunk, layer, part);
    if (!all_meet(c, layer)) return Prefilled::failed;
  }
  return Prefilled::done;
}

__device__ __forceinline__ Prefilled prefill(Consumer& c) {
  const Params& p = c.params;
#pragma unroll 1
  for (int start = p.cached; start < p.prompt_length; start += p.chunk) {
    const Chunk chunk = {start, smaller(p.chunk, p.prompt_length - start)};
    find_cuts(c, chunk);
    const Prefilled prefilled = run_chunk(c, chunk);
    if (prefilled != Prefilled::done) return prefilled;
    if (start + p.chunk >= p.prompt_length && !p.logits_out)
      publish_last_row(c, pieces_of(c, Stage::down, chunk), chunk.count - 1);
  }
  return Prefilled::done;
}

}  // namespace monotape
