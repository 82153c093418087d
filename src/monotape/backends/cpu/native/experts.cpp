// The feed-forward block of a sparse layer: a router, and the experts that it chooses. models/experts.py defines it.
//
// A worker has the same tiles of every expert, so any choice gives every worker the same work, and the owner of an output
// row has that row of all experts: it adds them up in the order of the expert index, in decode as in prefill.
#include <algorithm>
#include <cmath>

#include "worker.h"

namespace monotape {
namespace {

// sums += weight * (product + bias) for one row of a tile. In one place, so that decode and prefill add alike.
void add_expert(const float* product, const float* bias, int lanes, float weight, float* sums) {
  for (int lane = 0; lane < kTileRows; lane++) {
    const float value = bias && lane < lanes ? product[lane] + bias[lane] : product[lane];
    sums[lane] += weight * value;
  }
}

const float* row_of(const float* values, size_t row, size_t width) { return values ? values + row * width : nullptr; }

}  // namespace

const uint8_t* Worker::expert_tiles(Stage stage, int layer, int expert) const {
  const size_t index = static_cast<size_t>(layer) * model_.experts + expert;
  return model_.library + index * model_.expert_bytes + span(stage).offset;
}

// Logits of all experts, then the choices; rows are dealt out to the workers, so a single row is chosen for by worker 0.
bool Worker::router(int layer, const Rows& rows) {
  Input input;
  if (!prepare(Stage::router, shared_.residual.data(), shared_.width_stride,
               row_of(model_.ffn_norm, layer, model_.width), model_.width, rows.count, input))
    return false;
  const Span& owned = span(Stage::router);
  const uint8_t* tape = tiles(Stage::router, layer);
  const float* bias = row_of(model_.router_bias, layer, model_.experts);
  for (int t = 0; t < owned.count; t++, tape += tile_bytes(input.format, input.padded_k)) {
    if (quits()) return false;
    product(tape, 1, input, rows.count);
    const int first = (owned.first + t) * kTileRows, lanes = std::min(kTileRows, model_.experts - first);
    for (int r = 0; r < rows.count; r++)
      for (int lane = 0; lane < lanes; lane++)
        shared_.choice[r * shared_.choice_stride + first + lane] =
            product_[r * kTileRows + lane] + (bias ? bias[first + lane] : 0.0f);
  }
  if (!meet(Stage::router)) return false;
  for (int r = index_; r < rows.count; r += model_.workers) choose_experts(r);
  if (!meet(Stage::router)) return false;
  if (rows.count > 1) group_rows(rows.count);
  return true;
}

// The highest logits; of equal ones the lower index. No logit passes a NaN, so that it reaches the weights and the residual.
void Worker::choose_experts(int row) {
  const float* logits = shared_.choice.data() + row * shared_.choice_stride;
  const int count = model_.chosen;
  int32_t* best = shared_.chosen.data() + static_cast<size_t>(row) * count;
  float* weights = shared_.expert_weights.data() + static_cast<size_t>(row) * count;
  int found = 0;
  for (int e = 0; e < model_.experts; e++) {
    int at = found;
    while (at > 0 && logits[e] > logits[best[at - 1]]) at--;
    if (at == count) continue;
    for (int i = std::min(found, count - 1); i > at; i--) best[i] = best[i - 1];
    best[at] = e;
    found = std::min(found + 1, count);
  }
  const float peak = logits[best[0]];
  std::sort(best, best + count);
  float total = 0;
  for (int i = 0; i < count; i++) weights[i] = std::exp(logits[best[i]] - peak);
  for (int i = 0; !model_.softmax_over_all && i < count; i++) total += weights[i];
  for (int e = 0; model_.softmax_over_all && e < model_.experts; e++) total += std::exp(logits[e] - peak);
  for (int i = 0; i < count; i++) weights[i] /= total;
}

// Rows by expert: every worker makes the same table.
void Worker::group_rows(int rows) {
  const int pairs = rows * model_.chosen;
  std::fill(group_first_.begin(), group_first_.end(), 0);
  for (int i = 0; i < pairs; i++) group_first_[shared_.chosen[i] + 1]++;
  panel_first_[0] = 0;
  for (int e = 0; e < model_.experts; e++) {
    panel_first_[e + 1] = panel_first_[e] + whole_panels(group_first_[e + 1]) / kPanelRows;
    group_first_[e + 1] += group_first_[e];
  }
  std::vector<int>& next = next_entry_;
  next.assign(group_first_.begin(), group_first_.end());
  for (int i = 0; i < pairs; i++) {
    const int entry = next[shared_.chosen[i]]++;
    entry_row_[entry] = i / model_.chosen;
    entry_weight_[entry] = shared_.expert_weights[i];
  }
}

// Panels of the rows of each expert, dealt out to all workers. x: with a gain a row of the pass, else of each entry.
bool Worker::gather(Stage stage, const float* x, size_t stride, const float* gain, int k, Input& input) {
  input.format = model_.formats[static_cast<int>(stage)];
  input.padded_k = padded_to(input.format, k);
  input.rows = shared_.panels.data();
  for (int e = 0; e < model_.experts; e++)
    for (int panel = panel_first_[e]; panel < panel_first_[e + 1]; panel++) {
      if (panel % model_.workers != index_) continue;
      const int first = group_first_[e] + (panel - panel_first_[e]) * kPanelRows;
      for (int r = 0; r < kPanelRows; r++) {
        const int entry = first + r;
        const float* row = nullptr;
        if (entry < group_first_[e + 1]) row = normalised(x + (gain ? entry_row_[entry] : entry) * stride, gain, k);
        kernels_.prepare_in_panel(input.format, row, k, input.padded_k, r,
                                  shared_.panels.data() + panel * shared_.panel_stride);
      }
    }
  return meet(stage);
}

void Worker::gate_tiles(int layer, int expert, int pair, int rows, float* out) {
  const size_t index = static_cast<size_t>(layer) * model_.experts + expert;
  const int column = pair * kTileRows, lanes = std::min(kTileRows, model_.ffn - column);
  const float *gate = row_of(model_.gate_bias, index, model_.ffn), *up = row_of(model_.up_bias, index, model_.ffn);
  for (int r = 0; gate && r < rows; r++)
    for (int lane = 0; lane < lanes; lane++) {
      product_[r * 2 * kTileRows + lane] += gate[column + lane];
      product_[r * 2 * kTileRows + kTileRows + lane] += up[column + lane];
    }
  if (model_.gate_limit > 0)
    return kernels_.gate_limited_rows(product_.data(), rows, model_.gate_alpha, model_.gate_limit, model_.gate_shift,
                                      out + column, shared_.ffn_stride);
  kernels_.gate_rows(product_.data(), rows, out + column, shared_.ffn_stride);
}

bool Worker::expert_gate_up(int layer, const Rows& rows) {
  Input input;
  const bool alone = rows.count == 1;
  const float *x = shared_.residual.data(), *gain = row_of(model_.ffn_norm, layer, model_.width);
  if (!(alone ? prepare(Stage::gate_up, x, shared_.width_stride, gain, model_.width, 1, input)
              : gather(Stage::gate_up, x, shared_.width_stride, gain, model_.width, input)))
    return false;
  const Span& owned = span(Stage::gate_up);
  const size_t pair_bytes = 2 * tile_bytes(input.format, input.padded_k);
  const int groups = alone ? model_.chosen : model_.experts;
  for (int g = 0; g < groups; g++) {
    const int expert = alone ? shared_.chosen[g] : g;
    const int first = alone ? g : group_first_[g], count = alone ? 1 : group_first_[g + 1] - first;
    if (count == 0) continue;
    Input own = input;
    if (!alone) own.rows += panel_first_[g] * shared_.panel_stride;
    const uint8_t* tile = expert_tiles(Stage::gate_up, layer, expert);
    for (int pair = owned.first / 2; pair < (owned.first + owned.count) / 2; pair++, tile += pair_bytes) {
      if (quits()) return false;
      expert_product(tile, 2, own, count, !alone);
      gate_tiles(layer, expert, pair, count, shared_.activation.data() + first * shared_.ffn_stride);
    }
  }
  return meet(Stage::gate_up);
}

// A group of a single row in prefill is a panel too.
void Worker::expert_product(const uint8_t* tiles, int count, const Input& input, int rows, bool panels) {
  if (!panels) return product(tiles, count, input, 1);
  kernels_.multiply_panels(input.format, tiles, count, input.padded_k, input.rows, shared_.panel_stride, rows,
                           product_.data(), count * kTileRows);
}

bool Worker::expert_down(int layer, const Rows& rows) {
  Input input;
  const bool alone = rows.count == 1;
  input.format = model_.formats[static_cast<int>(Stage::down)];
  input.padded_k = padded_to(input.format, model_.ffn);
  input.rows = prepared_.data();
  if (alone) {
    for (int slot = 0; slot < model_.chosen; slot++)
      kernels_.prepare(input.format, shared_.activation.data() + slot * shared_.ffn_stride, model_.ffn, input.padded_k,
                       prepared_.data() + slot * shared_.prepared_stride);
  } else if (!gather(Stage::down, shared_.activation.data(), shared_.ffn_stride, nullptr, model_.ffn, input)) {
    return false;
  }
  if (shared_.collective && stopped()) return false;
  const Span& owned = span(Stage::down);
  const size_t bytes = tile_bytes(input.format, input.padded_k);
  const int groups = alone ? model_.chosen : model_.experts;
  for (int t = 0; t < owned.count; t++) {
    if (quits()) return false;
    const int column = (owned.first + t) * kTileRows, lanes = std::min(kTileRows, model_.width - column);
    std::fill_n(sums_.begin(), static_cast<size_t>(rows.count) * kTileRows, 0.0f);
    for (int g = 0; g < groups; g++) {
      const int expert = alone ? shared_.chosen[g] : g;
      const int first = alone ? 0 : group_first_[g], count = alone ? 1 : group_first_[g + 1] - first;
      if (count == 0) continue;
      Input own = input;
      own.rows += alone ? g * shared_.prepared_stride : panel_first_[g] * shared_.panel_stride;
      expert_product(expert_tiles(Stage::down, layer, expert) + t * bytes, 1, own, count, !alone);
      const size_t index = static_cast<size_t>(layer) * model_.experts + expert;
      const float* bias = row_of(model_.down_bias, index, model_.width);
      for (int i = 0; i < count; i++)
        add_expert(product_.data() + i * kTileRows, bias ? bias + column : nullptr, lanes,
                   alone ? shared_.expert_weights[g] : entry_weight_[first + i],
                   sums_.data() + (alone ? 0 : entry_row_[first + i]) * kTileRows);
    }
    std::copy_n(sums_.begin(), static_cast<size_t>(rows.count) * kTileRows, product_.begin());
    finish_tile(Stage::down, layer, column, rows.count);
  }
  return (!shared_.collective || fold(Stage::down, module_of(Stage::down, layer), rows.count)) && meet(Stage::down);
}

}  // namespace monotape
