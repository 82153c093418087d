// One token through the model: embed, the layers, the head.
#pragma once
#include "token/attention_rows.h"
#include "token/combine.h"
#include "token/matrix.h"
#include "ranks/head.h"
#include "ranks/choice.h"

namespace monotape {

// Value k of a token's embedding, or eight from k on. A tied embedding is read off the tape of the worker that owns its row
// of the head.
using HeadWeight = Stored<product(row_of(Stage::head).product).format>;
constexpr bool kTableFloat16 = Stored<kEmbeddingFormat>::kFloat16;

__device__ __forceinline__ const uint8_t* embedding_block(const Params& params, int token, int k) {
  const TilePlace& place = params.places[params.first_place[static_cast<int>(Stage::head)] + token / kTileRows];
  return params.tapes + place.start + k / (kBlockK * HeadWeight::kSub) * HeadWeight::kBlockBytes;
}
__device__ __forceinline__ float embedding_scale(const Params& params, int token) {
  constexpr Vector kScale = row_of(Stage::head).scale;
  return kScale == kNoVector ? 1 : params.vectors[static_cast<int>(kScale)][token];
}
__device__ __forceinline__ float embedding_value(const Params& params, int token, int k) {
  if (params.embedding) return widen<kTableFloat16>(params.embedding[static_cast<int64_t>(token) * kWidth + k]);
  const float value = HeadWeight::value(embedding_block(params, token, k), token % kTileRows, k % (kBlockK * HeadWeight::kSub));
  return kScalesRows ? value * embedding_scale(params, token) : value;
}
__device__ __forceinline__ void embedding_values(const Params& params, int token, int k, float (&out)[8]) {
  const uint16_t* table = params.embedding + static_cast<int64_t>(token) * kWidth + k;
  if (params.embedding) return unpack8<kTableFloat16>(*reinterpret_cast<const uint4*>(table), out);
  HeadWeight::values(embedding_block(params, token, k), token % kTileRows, k % (kBlockK * HeadWeight::kSub), out);
  if constexpr (kScalesRows)
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] *= embedding_scale(params, token);
}

// The token's embedding becomes this worker's elements of the residual stream.
__device__ __forceinline__ void embed(Consumer& c, int token, int row_of_pass = 0) {
  c.refresh();
  const Span& owned = c.span(kResidualStage);
#pragma unroll 1
  for (int i = c.thread; i < whole_warps(owned.count * kTileRows); i += kConsumers) {  // whole warps: they shuffle
    const int tile = i / kTileRows, row = i % kTileRows, k = (owned.first + tile) * kTileRows + row;
    const bool mine = tile < owned.count;
    const float value = mine && k < kWidth ? embedding_value(c.params, token, k) : 0;
    if (mine) c.shared.residual[row_of_pass][i] = value;  // zeros where the last tile is padded
    const uint4 word = gather_word(value);
    if (mine && row == 0) publish<Buffer::residual>(*c.params.exchange, c.turn, row_of_pass * kRowWords + owned.first + tile, word);
  }
}

// The addresses of a stage's input, gain, bias and output: the table's row, with pointers for its names.
template <int I = 0>
__device__ __forceinline__ Matrix matrix_of(Consumer& c, Stage stage, int layer) {
  constexpr StageRow kRow = stage_row(I);
  constexpr Stage kStage = static_cast<Stage>(I);
  if constexpr (I + 1 < kMatrixStages)
    if (stage != kStage) return matrix_of<I + 1>(c, stage, layer);
  Exchange& exchange = *c.params.exchange;
  constexpr int kBlocks = product(kRow.product).blocks * format_of(kRow).sub;
  Matrix matrix = {kStage, layer, kBlocks, divide_up(kRow.k, 8), nullptr, nullptr, nullptr, nullptr, nullptr};
  const int first = own_first(c.span(kStage), kStage);
  matrix.input = words_of<kRow.reads>(exchange, kRow.reads == Buffer::final_residual ? c.head_turn() : c.turn);
  if constexpr (kRow.gain != kNoVector && !(kStage == Stage::head && kHeadInput == HeadInput::mean))  // a mean is of normalised values
    matrix.gain = MONOTAPE_UNIFORM(c.params.vectors[static_cast<int>(kRow.gain)]) + (kStage == Stage::head ? 0 : layer * kWidth);
  if constexpr (kRow.bias != kNoVector)
    matrix.bias = MONOTAPE_UNIFORM(c.params.vectors[static_cast<int>(kRow.bias)]) + (layer * kRow.tiles + c.span(kStage).first) * kTileRows;
  if constexpr (kRow.scale != kNoVector) {
    const int in = kStage == Stage::head ? 0 : layer;
    matrix.scale = c.params.vectors[static_cast<int>(kRow.scale)] + (static_cast<int64_t>(in) * kRow.tiles + c.span(kStage).first) * kTileRows;
  }
  if constexpr (kRow.routed > 0) {  // all experts' rows of the layer
    const int64_t first_row = static_cast<int64_t>(layer) * kExperts * kRow.tiles * kTileRows;
    if constexpr (kRow.bias != kNoVector) matrix.bias = c.params.vectors[static_cast<int>(kRow.bias)] + first_row;
    if constexpr (kRow.scale != kNoVector) matrix.scale = c.params.vectors[static_cast<int>(kRow.scale)] + first_row;
  }
  if constexpr (kRow.writes == Buffer::residual) {  // the next layer starts from it, or the head
    uint4* next = words_of<Buffer::residual>(exchange, c.turn ^ 1) + first;
    // The head's input may combine several ranks: see ranks/head.h.
    uint4* last = kHeadInput == HeadInput::own ? words_of<Buffer::final_residual>(exchange, c.head_turn()) + first : nullptr;
    matrix.output = layer == kLayers - 1 ? last : next;
  } else if constexpr (kRow.writes != Buffer::none) {
    matrix.output = words_of<kRow.writes>(exchange, c.turn) + first;
  }
  return matrix;
}

// An element of the residual stream after a module; `partial` is this rank's sum.
__device__ __forceinline__ float end_module(Consumer& c, Stage stage, int layer, int row_of_pass, int own, float partial) {
  float& residual = c.shared.residual[row_of_pass][own];
  if constexpr (kRanks == 1) return residual += partial;
  return residual = settle(c, stage, layer, own, residual, partial);
}

// Publishes the choice of weights for this layer's published stages: here by the token, as hash routing does.
__device__ __forceinline__ void publish_choice(Consumer& c, int token) {
  if (worker_number() != 0 || c.thread != 0) return;
  const uint64_t pass = static_cast<uint32_t>(c.turn);
  store_link(&c.params.exchange->choice[c.turn % 2], pass << 32 | static_cast<uint32_t>(token % kChoices));
}

// A router's float32 logits, four a word.
__device__ __forceinline__ void publish_logits(const Matrix& matrix, int tile, int row, float y, bool real) {
  const uint4 word = make_uint4(bits_of(y), bits_of(lane_above(y, 1)), bits_of(lane_above(y, 2)), bits_of(lane_above(y, 3)));
  if (row % 4 == 0 && real) store_word(matrix.output + 2 * tile + row / 4, word);
}

// The epilogue of a finished row. Whole warps: a word is gathered from eight lanes.
template <int Rows>
__device__ __forceinline__ void end_row(Consumer& c, const Matrix& matrix, int row_of_pass, int tile, int row, float y, bool real) {
  const Stage stage = matrix.stage;
  if (stage == Stage::head) {
    const int index = (c.span(stage).first + tile) * kTileRows + row, id = first_id(c.params) + index;
    if (!real || index >= kVocab) return;
    if (kRanks > 1 && c.params.sampling.active) push_logit(c, id, y);
    else c.params.logits[row_of_pass * kRowLogits + id] = y;
    if (better({y, id}, c.best)) c.best = {y, id};
    return;
  }
  if constexpr (kExperts > 0)
    if (stage == kRouter) return publish_logits(matrix, tile, row, y, real);
  const bool paired = is_gated(stage);  // gate tiles are even, their up tiles follow
  const float up = lane_above(y, kTileRows);
  if (paired) y = gated(y, up);
  if constexpr (kExperts > 0)
    if (is_dealt(stage) && real) y *= c.shared.chosen_weight[(c.span(stage).first + tile) / row_of(kFirstRouted).tiles];
  if (adds_to_residual(stage) && real) y = end_module(c, stage, matrix.layer, row_of_pass, tile * kTileRows + row, y);
  const bool direct = of_stage(stage, [](StageRow its) { return is_read_directly(Rows, its.writes); });
  const uint4 word = direct ? input_order(gather_word(y)) : gather_word(y);
  if (row == 0 && real && !(paired && tile % 2) && matrix.output) store_word(matrix.output + row_of_pass * kRowWords + (paired ? tile / 2 : tile), word);
}

template <int Rows>
__device__ __forceinline__ bool attend_all(Consumer& c, int layer, int position, int rows) {
#ifdef MONOTAPE_RING
  if constexpr (Rows > 1) return attend_rows(c, layer, position) && combine<Rows>(c, layer, position, rows);
#endif
  return attend(c, layer, position) && combine<1>(c, layer, position, 1);
}

template <int Rows>
__device__ __forceinline__ void begin_rows(Consumer& c, int token, int position, int rows) {
  if constexpr (Rows == 1) {
    keep_angles(c, position);
    embed(c, token);
  } else {
#pragma unroll 1
    for (int row = 0; row < rows; row++) embed(c, c.shared.drafts.token[row], row);
  }
}

// A matrix stage, and attention where it follows. `First` is the lowest number that the stage may have.
template <int Rows, int First>
__device__ __forceinline__ bool run_stage(Consumer& c, Stage stage, int layer) {
  if constexpr (kFewRegisters) c.best = nobody();  // no register for it from stage to stage
  if constexpr (kRanks > 1)
    if (adds_to_residual(stage)) look_early(c, c.shared.steps[module_of(stage, layer)]);
  const Matrix matrix = matrix_of<First>(c, stage, layer);
  const auto ending = [&](int p, int tile, int row, float y, bool real) { end_row<Rows>(c, matrix, p, tile, row, y, real); };
  if (!run_matrix<Rows>(c, matrix, Rows == 1 ? 1 : c.shared.drafts.rows, ending)) return false;
  if (stage == kAttends) {
    const int here = c.shared.position;  // reloaded here to limit live registers
    return attend_all<Rows>(c, layer, here, Rows == 1 ? 1 : c.shared.drafts.rows);
  }
  return true;
}
// The stages of a layer, each as a constant: it has code of its own, without what others need.
template <int Rows, int I = 0>
__device__ __forceinline__ bool run_layer(Consumer& c, int layer) {
  if (!run_stage<Rows, I>(c, static_cast<Stage>(I), layer)) return false;
  if constexpr (I + 1 < kLayerSteps) return run_layer<Rows, I + 1>(c, layer);
  c.turn++;
  return true;
}

// Orders this token's KV and the reset of the candidates before this worker's next candidate.
__device__ __forceinline__ void begin_head(Consumer& c) { fence_device(), c.best = nobody(); }

// The layers and the head in one copy.
template <int Rows>
__device__ __forceinline__ bool run_alike(Consumer& c, int token, bool head_only) {
#pragma unroll 1
  for (int step = head_only ? kTokenSteps - 1 : 0; step < kTokenSteps; step++) {
    const Stage stage = stage_of(step);
    if constexpr (kChoices > 1)
      if (stage == kFirstStage) publish_choice(c, token);
    if constexpr (kHeadInput != HeadInput::own)
      if (stage == Stage::head && !head_only && !combine_lanes(c)) return false;
    if (stage == Stage::head) begin_head(c);
    if (!run_stage<Rows, 0>(c, stage, layer_of(step))) return false;
    if (stage == kLastStage) c.turn++;
  }
  return true;
}

// A token through all layers and the head, or the last row of a prefill through the head only. The logits of this
// worker's part of the vocabulary are in params.logits then. Of several rows, drafts.token has the tokens.
template <int Rows>
__device__ __forceinline__ bool forward(Consumer& c, int token, int position, bool head_only) {
  if (!head_only) {
    const int rows = Rows == 1 ? 1 : c.shared.drafts.rows;
    c.pages.begin_token(c.thread);
    keep_lists(c, position, rows);
    begin_rows<Rows>(c, token, position, rows);
    if constexpr (kRanks > 1) count_sends(c);
    if (!c.meet()) return false;
  }
  if constexpr (kShortOfRegisters) {
    if (!run_alike<Rows>(c, token, head_only)) return false;
    c.token_step += kTokenSteps;
    return c.meet();
  }
  if (!head_only) {
#pragma unroll 1
    for (int layer = 0; layer < kLayers; layer++) {
      if constexpr (kChoices > 1) publish_choice(c, token);
      if (!run_layer<Rows>(c, layer)) return false;
    }
    if constexpr (kHeadInput != HeadInput::own)
      if (!combine_lanes(c)) return false;
  }
  begin_head(c);
  if (!run_stage<Rows, static_cast<int>(Stage::head)>(c, Stage::head, kLayers)) return false;
  c.token_step += kTokenSteps;
  return c.meet();
}

}  // namespace monotape
