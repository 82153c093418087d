// One token through the model: embed, the layers, the head.
#pragma once
#include "attention.h"
#include "matrix.h"

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

// The three stages that start from the residual stream: qkv, gate_up and the head. They are one piece of code, because
// a layer's instructions must stay in the instruction cache.
__device__ __forceinline__ bool from_residual(Consumer& c, Stage stage, int layer) {
  Exchange& exchange = *c.params.exchange;
  const int first = c.span(stage).first;
  const bool is_qkv = stage == Stage::qkv, is_head = stage == Stage::head;
  const uint4* buffer = is_qkv ? exchange.residual[c.turn & 1]
                        : is_head ? exchange.final_residual[c.sample_turn & 1] : exchange.after_attention[c.turn & 1];
  const float* gain = is_head ? c.params.final_norm
                              : (is_qkv ? c.params.attention_norm : c.params.ffn_norm) + static_cast<int64_t>(layer) * kWidth;
  const auto resets = [&] {
    return is_qkv ? reset_turn_before(c, layer, kConsumers) : is_head ? Reset() : reset_activation(c);
  };
  const auto ending = [&](int tile, int row, float y, bool real) {
    const int index = (first + tile) * kTileRows + row;
    if (is_head) {
      if (real && index < kVocab) c.params.logits[index] = y;
      return;
    }
    const float up = __shfl_down_sync(~0u, y, kTileRows);
    if (!is_qkv) y = y / (1 + __expf(-y)) * up;  // gate tiles are even, their up tiles follow
    if (kQkvBias && is_qkv && real) y += c.params.qkv_bias[static_cast<int64_t>(layer) * kQkvRows + index];
    const uint4 word = gather_word(y);
    if (row != 0 || !real) return;
    if (is_qkv) publish(exchange.qkv, c.turn, first + tile, word);
    else if (tile % 2 == 0) publish(exchange.activation, c.turn, (first + tile) / 2, word);
  };
  return matrix_stage<Stage::qkv, true>(c, stage, layer, buffer, gain, resets, ending);
}

__device__ __forceinline__ bool output(Consumer& c, int layer) {
  const int first = c.span(Stage::output).first;
  const auto ending = [&](int tile, int row, float y, bool real) {
    float value = 0;
    if (real) value = c.shared.residual[tile * kTileRows + row] += y;
    const uint4 word = gather_word(value);
    if (row == 0 && real) publish(c.params.exchange->after_attention, c.turn, first + tile, word);
  };
  return matrix_stage<Stage::output, false>(c, Stage::output, layer, c.params.exchange->attended[c.turn & 1], nullptr,
                                            [] { return Reset(); }, ending);
}

// The last layer's result goes to the head.
__device__ __forceinline__ bool down(Consumer& c, int layer) {
  Exchange& exchange = *c.params.exchange;
  const int first = c.span(Stage::down).first;
  const auto ending = [&](int tile, int row, float y, bool real) {
    float value = 0;
    if (real) value = c.shared.residual[tile * kTileRows + row] += y;
    const uint4 word = gather_word(value);
    if (row != 0 || !real) return;
    if (layer < kLayers - 1) publish(exchange.residual, c.turn + 1, first + tile, word);
    else publish(exchange.final_residual, c.sample_turn, first + tile, word);
  };
  return matrix_stage<Stage::down, false>(c, Stage::down, layer, exchange.activation[c.turn & 1], nullptr,
                                          [&] { return reset_turn(c, layer); }, ending);
}

// A token through all layers and the head, or the last row of a prefill through the head only. The logits of this
// worker's part of the vocabulary are in params.logits then.
__device__ __forceinline__ bool forward(Consumer& c, int token, int position, bool head_only) {
  if (!head_only) {
    keep_lists(c, position);
    embed(c, token);
  }
#pragma unroll 1
  for (int step = head_only ? 2 * kLayers : 0;; step++) {
    const int layer = step / 2;
    const Stage stage = step == 2 * kLayers ? Stage::head : step % 2 ? Stage::gate_up : Stage::qkv;
    // This token's KV, and the candidates' reset, come before the word that this worker elects with.
    if (stage == Stage::head) fence_device();
    if (!from_residual(c, stage, layer)) return false;
    if (stage == Stage::head) return c.meet();
    if (stage == Stage::qkv) {
      if (!attend(c, layer, position)) return false;
      combine(c, layer, position);
      if (!output(c, layer)) return false;
    } else {
      if (!down(c, layer)) return false;
      c.turn++;
    }
  }
}

}  // namespace monotape
