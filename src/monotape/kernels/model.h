// One token through the model: embed, the layers, the head.
#pragma once
#include "attention.h"
#include "matrix.h"
#include "ranks_head.h"
#include "ranks_sample.h"

namespace monotape {

// Value k of a token's embedding. A tied embedding is read off the tape of whoever owns its row of the head.
__device__ __forceinline__ const uint16_t* embedding_value(const Params& params, int token, int k) {
  if (params.embedding) return params.embedding + static_cast<int64_t>(token) * kWidth + k;
  const TilePlace& place = params.places[params.first_place[static_cast<int>(Stage::head)] + token / kTileRows];
  const uint8_t* block = params.tapes + place.start + k / kBlockK * kBlockBytes;
  return reinterpret_cast<const uint16_t*>(block) + token % kTileRows * kBlockK + k % kBlockK;
}

// The token's embedding becomes this worker's elements of the residual stream.
__device__ __forceinline__ void embed(Consumer& c, int token) {
  c.refresh();
  const Span& owned = c.span(Stage::output);
#pragma unroll 1
  for (int i = c.thread; i < divide_up(owned.count * kTileRows, 32) * 32; i += kConsumers) {  // whole warps: they shuffle
    const int tile = i / kTileRows, row = i % kTileRows, k = (owned.first + tile) * kTileRows + row;
    const bool mine = tile < owned.count;
    const float value = mine && k < kWidth ? widen(*embedding_value(c.params, token, k)) : 0;
    if (mine) c.shared.residual[i] = value;  // zeros where the last tile is padded
    const uint4 word = gather_word(value);
    if (mine && row == 0) publish(c.params.exchange->residual, c.turn, owned.first + tile, word);
  }
}

// Where a stage's input is, and what it is multiplied with before.
__device__ __forceinline__ Matrix matrix_of(Consumer& c, Stage stage, int layer) {
  Exchange& exchange = *c.params.exchange;
  const int turn = c.turn & 1, norm = layer * kWidth;
  const int blocks = k_blocks(stage), words = divide_up(stage_k(stage), 8), in_page = tiles_in_page(stage);
  switch (stage) {
    case Stage::qkv: return {stage, layer, blocks, words, in_page, exchange.residual[turn], c.params.attention_norm + norm};
    case Stage::output: return {stage, layer, blocks, words, in_page, exchange.attended[turn], nullptr};
    case Stage::gate_up: return {stage, layer, blocks, words, in_page, exchange.after_attention[turn], c.params.ffn_norm + norm};
    case Stage::down: return {stage, layer, blocks, words, in_page, exchange.activation[turn], nullptr};
    default: {
      const float* gain = kHeadInput == HeadInput::mean ? nullptr : c.params.final_norm;  // a mean is of normalised values
      return {stage, layer, blocks, words, in_page, exchange.final_residual[c.sample_turn & 1], gain};
    }
  }
}

// An element of the residual stream after a module, of which this rank has `partial`.
__device__ __forceinline__ float end_module(Consumer& c, Stage stage, int layer, int own, float partial) {
  float& residual = c.shared.residual[own];
  if constexpr (kRanks == 1) return residual += partial;
  return residual = settle(c, stage, layer, own, residual, partial);
}

// What becomes of a finished row. Whole warps: a word is gathered from eight lanes.
__device__ __forceinline__ void end_row(Consumer& c, Stage stage, int layer, int tile, int row, float y, bool real) {
  Exchange& exchange = *c.params.exchange;
  const int word = c.span(stage).first + tile, index = word * kTileRows + row;
  if (stage == Stage::head) {
    if (!real || index >= kVocab) return;
    if (kRanks > 1 && c.params.sampling.active) push_logit(c, first_id(c.params) + index, y);
    else c.params.logits[first_id(c.params) + index] = y;
    return;
  }
  const float up = __shfl_down_sync(~0u, y, kTileRows);
  if (stage == Stage::gate_up) y = __fdividef(y, 1 + __expf(-y)) * up;  // gate tiles are even, their up tiles follow
  if (kQkvBias && stage == Stage::qkv && real) y += c.params.qkv_bias[layer * kQkvRows + index];
  if ((stage == Stage::output || stage == Stage::down) && real) y = end_module(c, stage, layer, tile * kTileRows + row, y);
  const uint4 value = gather_word(y);
  if (row != 0 || !real) return;
  if (stage == Stage::qkv) publish(exchange.qkv, c.turn, word, value);
  else if (stage == Stage::output) publish(exchange.after_attention, c.turn, word, value);
  else if (stage == Stage::gate_up && tile % 2 == 0) publish(exchange.activation, c.turn, word / 2, value);
  else if (stage == Stage::down && layer < kLayers - 1) publish(exchange.residual, c.turn + 1, word, value);
  else if (stage == Stage::down && kHeadInput == HeadInput::own) publish(exchange.final_residual, c.sample_turn, word, value);
}

// A token through all layers and the head, or the last row of a prefill through the head only. The logits of this
// worker's part of the vocabulary are in params.logits then.
__device__ __forceinline__ bool forward(Consumer& c, int token, int position, bool head_only) {
  if (!head_only) {
    keep_lists(c, position);
    keep_angles(c, position);
    embed(c, token);
    if constexpr (kRanks > 1) count_sends(c);
    if (!c.meet()) return false;
  }
#pragma unroll 1
  for (int step = head_only ? 4 * kLayers : 0;; step++) {  // four matrices a layer, then the head
    const int layer = step / 4;
    const Stage stage = step == 4 * kLayers ? Stage::head : static_cast<Stage>(step % 4);
    // This token's KV, and the candidates' reset, come before the word that this worker elects with.
    if (stage == Stage::head) fence_device();
    const auto resets = [&] { return resets_at(c, stage, layer); };
    if constexpr (kRanks > 1)
      if (stage == Stage::output || stage == Stage::down) look_early(c, c.shared.steps[step / 2]);
    const auto ending = [&](int tile, int row, float y, bool real) { end_row(c, stage, layer, tile, row, y, real); };
    if (!run_matrix(c, matrix_of(c, stage, layer), resets, ending)) return false;
    if (stage == Stage::head) return c.meet();
    if (stage == Stage::qkv) {
      if (!attend(c, layer, position)) return false;
      combine(c, layer, position);
    }
    if constexpr (kHeadInput != HeadInput::own)
      if (step == 4 * kLayers - 1 && !combine_lanes(c)) return false;
    if (stage == Stage::down) c.turn++;
  }
}

}  // namespace monotape
