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

// Where a stage's input is and what it is multiplied with before, and where its output goes.
__device__ __forceinline__ Matrix matrix_of(Consumer& c, Stage stage, int layer) {
  Exchange& exchange = *c.params.exchange;
  const int turn = c.turn & 1, sample_turn = c.sample_turn() & 1, norm = layer * kWidth, first = c.span(stage).first;
  const bool last = layer == kLayers - 1;
  Matrix matrix = {stage, layer, k_blocks(stage), divide_up(stage_k(stage), 8), nullptr, nullptr, nullptr, nullptr};
  const auto pass = [&](const uint4* input, const float* gain, uint4* output) {
    matrix.input = input, matrix.gain = gain, matrix.output = output;
  };
  // What the head starts from may be made of more than this rank has: see ranks.h.
  uint4* final_output = kHeadInput == HeadInput::own ? exchange.final_residual[sample_turn] + first : nullptr;
  if (stage == Stage::qkv) pass(exchange.residual[turn], c.params.attention_norm + norm, exchange.qkv[turn] + first);
  if (kQkvBias && stage == Stage::qkv) matrix.bias = c.params.qkv_bias + layer * kQkvRows + first * kTileRows;
  if (stage == Stage::output) pass(exchange.attended[turn], nullptr, exchange.after_attention[turn] + first);
  if (stage == Stage::gate_up)
    pass(exchange.after_attention[turn], c.params.ffn_norm + norm, exchange.activation[turn] + first / 2);
  if (stage == Stage::down)
    pass(exchange.activation[turn], nullptr, last ? final_output : exchange.residual[turn ^ 1] + first);
  const float* final_gain = kHeadInput == HeadInput::mean ? nullptr : c.params.final_norm;  // a mean is of normalised values
  if (stage == Stage::head) pass(exchange.final_residual[sample_turn], final_gain, nullptr);
  return matrix;
}

// An element of the residual stream after a module, of which this rank has `partial`.
__device__ __forceinline__ float end_module(Consumer& c, Stage stage, int layer, int own, float partial) {
  float& residual = c.shared.residual[own];
  if constexpr (kRanks == 1) return residual += partial;
  return residual = settle(c, stage, layer, own, residual, partial);
}

// What becomes of a finished row. Whole warps: a word is gathered from eight lanes.
__device__ __forceinline__ void end_row(Consumer& c, const Matrix& matrix, int tile, int row, float y, bool real) {
  const Stage stage = matrix.stage;
  if (stage == Stage::head) {
    const int index = (c.span(stage).first + tile) * kTileRows + row, id = first_id(c.params) + index;
    if (!real || index >= kVocab) return;
    if (kRanks > 1 && c.params.sampling.active) push_logit(c, id, y);
    else c.params.logits[id] = y;
    if (better({y, id}, c.best)) c.best = {y, id};
    return;
  }
  const bool paired = stage == Stage::gate_up;  // gate tiles are even, their up tiles follow
  const float up = __shfl_down_sync(~0u, y, kTileRows);
  if (paired) y = __fdividef(y, 1 + __expf(-y)) * up;
  if ((stage == Stage::output || stage == Stage::down) && real) y = end_module(c, stage, matrix.layer, tile * kTileRows + row, y);
  const uint4 word = gather_word(y);
  if (row == 0 && real && !(paired && tile % 2) && matrix.output) store_word(matrix.output + (paired ? tile / 2 : tile), word);
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
    if (stage == Stage::head) fence_device(), c.best = nobody();
    if constexpr (kRanks > 1)
      if (stage == Stage::output || stage == Stage::down) look_early(c, c.shared.steps[step / 2]);
    const Matrix matrix = matrix_of(c, stage, layer);
    const auto ending = [&](int tile, int row, float y, bool real) { end_row(c, matrix, tile, row, y, real); };
    if (!run_matrix(c, matrix, ending)) return false;
    if (stage == Stage::head) {
      c.token_step += kTokenSteps;
      return c.meet();
    }
    if (stage == Stage::qkv) {
      const int here = c.shared.position;  // what follows from it would not fit the registers if kept for all layers
      if (!attend(c, layer, here)) return false;
      if (!combine(c, layer, here)) return false;
    }
    if constexpr (kHeadInput != HeadInput::own)
      if (step == 4 * kLayers - 1 && !combine_lanes(c)) return false;
    if (stage == Stage::down) c.turn++;
  }
}

}  // namespace monotape
