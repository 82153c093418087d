// The stages of a layer, in the order in which a token passes them.
#include "worker.h"

#include <algorithm>

namespace monotape {

// Checked before every tile and every rendezvous. Workers need not agree on where they stop: a worker that waits for one
// that has left sees the fault.
bool Worker::quits() {
  Fault& fault = shared_.fault;
  if (++looks_ == fault.cancel_at && decides()) fault.cancelled.store(true, std::memory_order_relaxed);
  if (!fault.cancelled.load(std::memory_order_relaxed)) return false;
  int none = 0;
  fault.kind.compare_exchange_strong(none, static_cast<int>(Finish::cancelled));
  return true;
}

bool Worker::meet(Stage stage) {
  if (quits()) return false;
  return shared_.rendezvous.meet({model_.rank, index_, static_cast<int>(stage)}, shared_.fault,
                                 static_cast<int>(Finish::deadline_fault));
}

const uint8_t* Worker::tiles(Stage stage, int layer) const {
  return model_.tapes[index_] + layer * model_.layer_bytes[index_] + span(stage).offset;
}

bool Worker::forward(const Rows& rows, Wanted wanted) {
  if (!embed(rows)) return false;
  // Ranks count each other's sums, so they always compute all of them.
  const bool cuts = wanted != Wanted::every_row && rows.count > 1 && !shared_.collective;
  for (int i = 0; i < model_.layers - cuts; i++)
    if (!layer(i, rows)) return false;
  if (cuts) return last_layer(rows, wanted);
  if (!shared_.collective) return true;
  if (shared_.collective->steps() > 2 * model_.layers && !drain(rows.count)) return false;
  sends_ += shared_.collective->sends();
  return true;
}

bool Worker::layer(int index, const Rows& rows) {
  return qkv(index, rows) && attention(index, rows) && output(index, rows) && feed_forward(index, rows);
}

bool Worker::feed_forward(int layer, const Rows& rows) {
  if (model_.experts) return router(layer, rows) && expert_gate_up(layer, rows) && expert_down(layer, rows);
  return gate_up(layer, rows) && down(layer, rows);
}

// Later tokens read only keys and values of the last layer, and the head reads one row. That row moves to the front and goes
// on like a single token.
bool Worker::last_layer(const Rows& rows, Wanted wanted) {
  const int layer = model_.layers - 1, last = rows.count - 1;
  if (wanted == Wanted::no_row) return qkv(layer, rows, model_.heads);
  if (!qkv(layer, rows)) return false;
  if (index_ == 0) {
    std::copy_n(shared_.query.data() + last * shared_.query_stride, shared_.query_stride, shared_.query.data());
    std::copy_n(shared_.residual.data() + last * shared_.width_stride, shared_.width_stride, shared_.residual.data());
  }
  const Rows row{rows.tokens + last, 1, rows.position + last};
  return meet(Stage::qkv) && attention(layer, row) && output(layer, row) && feed_forward(layer, row);
}

// A tied embedding is read off the tiles of the head, wherever their owner keeps them.
bool Worker::embed(const Rows& rows) {
  for (int r = index_; r < rows.count; r += model_.workers) {
    float* out = shared_.residual.data() + r * shared_.width_stride;
    const int32_t token = rows.tokens[r], width = model_.width, tile = token / kTileRows;
    const Format format = model_.embedding_format;
    const size_t bytes = tile_bytes(format, padded_to(format, width));
    const uint8_t* found = nullptr;
    if (model_.embedding) {
      found = model_.embedding + tile * bytes;
    } else {
      int owner = 0;
      const auto head_of = [&](int worker) -> const Span& {
        return model_.spans[worker * kStages + static_cast<int>(Stage::head)];
      };
      while (tile >= head_of(owner).first + head_of(owner).count) owner++;
      found = model_.tapes[owner] + head_of(owner).offset + (tile - head_of(owner).first) * bytes;
    }
    kernels_.unpack_row(format, found, token % kTileRows, width, out);
  }
  return meet(Stage::qkv);
}

const float* Worker::normalised(const float* x, const float* gain, int k) {
  if (!gain) return x;
  kernels_.normalise(x, gain, k, model_.norm_eps, normalised_.data());
  return normalised_.data();
}

bool Worker::prepare(Stage stage, const float* x, size_t stride, const float* gain, int k, int rows, Input& input) {
  input.format = model_.formats[static_cast<int>(stage)];
  input.padded_k = padded_to(input.format, k);
  if (rows == 1) {
    input.rows = prepared_.data();
    kernels_.prepare(input.format, normalised(x, gain, k), k, input.padded_k, prepared_.data());
    return true;
  }
  if (rows <= kPanelRows) {
    input.rows = prepared_.data();
    for (int r = 0; r < kPanelRows; r++)
      kernels_.prepare_in_panel(input.format, r < rows ? normalised(x + r * stride, gain, k) : nullptr, k, input.padded_k, r,
                                prepared_.data());
    return true;
  }
  input.rows = shared_.panels.data();
  for (int first = index_ * kPanelRows; first < rows; first += model_.workers * kPanelRows)
    for (int r = 0; r < kPanelRows; r++) {
      const float* row = first + r < rows ? normalised(x + (first + r) * stride, gain, k) : nullptr;
      kernels_.prepare_in_panel(input.format, row, k, input.padded_k, r,
                                shared_.panels.data() + first / kPanelRows * shared_.panel_stride);
    }
  return meet(stage);
}

void Worker::product(const uint8_t* tiles, int count, const Input& input, int rows) {
  if (rows == 1) return kernels_.multiply(input.format, tiles, count, input.padded_k, input.rows, product_.data());
  kernels_.multiply_panels(input.format, tiles, count, input.padded_k, input.rows, shared_.panel_stride, rows,
                           product_.data(), count * kTileRows);
}

// RMSNorm, then q, k and v. The owner of a head also normalises and rotates it; k and v go straight into the KV.
bool Worker::qkv(int layer, const Rows& rows, int first_unit) {
  Input input;
  if (!prepare(Stage::qkv, shared_.residual.data(), shared_.width_stride,
               model_.attention_norm + static_cast<size_t>(layer) * model_.width, model_.width, rows.count, input))
    return false;
  const int head_tiles = (model_.head_dim + kTileRows - 1) / kTileRows;
  const Span& owned = span(Stage::qkv);
  const uint8_t* tape = tiles(Stage::qkv, layer);
  const size_t unit_bytes = head_tiles * tile_bytes(input.format, input.padded_k);
  for (int unit = owned.first / head_tiles; unit < (owned.first + owned.count) / head_tiles; unit++, tape += unit_bytes) {
    if (unit < first_unit) continue;
    if (quits()) return false;
    product(tape, head_tiles, input, rows.count);
    finish_head(layer, unit, rows);
  }
  return meet(Stage::qkv);
}

void Worker::finish_head(int layer, int unit, const Rows& rows) {
  const int dim = model_.head_dim, heads = model_.heads, kv_heads = model_.kv_heads;
  const size_t stride = round_up(dim, kTileRows);
  const bool is_query = unit < heads, is_value = unit >= heads + kv_heads;
  const float* bias = model_.qkv_bias;
  if (bias) bias += static_cast<size_t>(layer) * (heads + 2 * kv_heads) * dim + static_cast<size_t>(unit) * dim;
  const float* gain = is_query ? model_.q_norm : is_value ? nullptr : model_.k_norm;
  if (gain) gain += static_cast<size_t>(layer) * dim;
  for (int r = 0; r < rows.count; r++) {
    float* head = product_.data() + r * stride;
    for (int d = 0; bias && d < dim; d++) head[d] += bias[d];
    if (gain) kernels_.normalise(head, gain, dim, model_.norm_eps, head);
    if (!is_value) rotate(head, rows.position + r);
    if (is_query) {
      float* out = shared_.query.data() + r * shared_.query_stride + unit * dim;
      for (int d = 0; d < dim; d++) out[d] = head[d] * model_.attention_scale;
      continue;
    }
    const int kv_head = is_value ? unit - heads - kv_heads : unit - heads;
    const size_t at = ((static_cast<size_t>(layer) * kv_heads + kv_head) * shared_.job.kv_capacity + rows.position + r) * dim;
    auto* cache = static_cast<uint8_t*>(is_value ? shared_.values : shared_.keys);
    kernels_.store_kv(model_.kv_format, head, dim, cache + at * value_bytes(model_.kv_format));
  }
}

void Worker::rotate(float* head, int position) const {
  const int half = model_.rope_dims / 2;
  const float* cosines = model_.cosines + static_cast<size_t>(position) * half;
  const float* sines = model_.sines + static_cast<size_t>(position) * half;
  for (int d = 0; d < half; d++) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cosines[d] - b * sines[d];
    head[d + half] = b * cosines[d] + a * sines[d];
  }
}

bool Worker::add_to_residual(Stage stage, int layer, const Input& input, int rows) {
  const Span& owned = span(stage);
  const uint8_t* tape = tiles(stage, layer);
  const float* bias = stage == Stage::output ? model_.output_bias : nullptr;
  if (bias) bias += static_cast<size_t>(layer) * model_.width;
  if (shared_.collective && stopped()) return false;
  for (int t = 0; t < owned.count; t++, tape += tile_bytes(input.format, input.padded_k)) {
    if (quits()) return false;
    product(tape, 1, input, rows);
    const int column = (owned.first + t) * kTileRows, lanes = std::min(kTileRows, model_.width - column);
    for (int r = 0; bias && r < rows; r++)
      for (int lane = 0; lane < lanes; lane++) product_[r * kTileRows + lane] += bias[column + lane];
    finish_tile(stage, layer, column, rows);
  }
  return !shared_.collective || fold(stage, module_of(stage, layer), rows);
}

// A tile of a module's output is in product_: its owner adds it to the residual, or shares it with the other ranks.
void Worker::finish_tile(Stage stage, int layer, int column, int rows) {
  if (shared_.collective) return share_tile(module_of(stage, layer), column, rows);
  for (int r = 0; r < rows; r++) {
    float* out = shared_.residual.data() + r * shared_.width_stride + column;
    for (int lane = 0; lane < kTileRows; lane++) out[lane] += product_[r * kTileRows + lane];
  }
}

bool Worker::output(int layer, const Rows& rows) {
  Input input;
  if (!prepare(Stage::output, shared_.attended.data(), shared_.query_stride, nullptr, shared_.q_rows, rows.count, input))
    return false;
  return add_to_residual(Stage::output, layer, input, rows.count) && meet(Stage::output);
}

// RMSNorm, then gate and up; tiles of the two alternate, so their owner can multiply them on the spot.
bool Worker::gate_up(int layer, const Rows& rows) {
  Input input;
  if (!prepare(Stage::gate_up, shared_.residual.data(), shared_.width_stride,
               model_.ffn_norm + static_cast<size_t>(layer) * model_.width, model_.width, rows.count, input))
    return false;
  const Span& owned = span(Stage::gate_up);
  const uint8_t* tape = tiles(Stage::gate_up, layer);
  const size_t pair_bytes = 2 * tile_bytes(input.format, input.padded_k);
  for (int pair = owned.first / 2; pair < (owned.first + owned.count) / 2; pair++, tape += pair_bytes) {
    if (quits()) return false;
    product(tape, 2, input, rows.count);
    kernels_.gate_rows(product_.data(), rows.count, shared_.activation.data() + pair * kTileRows, shared_.ffn_stride);
  }
  return meet(Stage::gate_up);
}

bool Worker::down(int layer, const Rows& rows) {
  Input input;
  if (!prepare(Stage::down, shared_.activation.data(), shared_.ffn_stride, nullptr, model_.ffn, rows.count, input))
    return false;
  return add_to_residual(Stage::down, layer, input, rows.count) && meet(Stage::down);
}

bool Worker::head(int first_row, int rows, float* out) {
  Input input;
  const float *x = shared_.residual.data() + first_row * shared_.width_stride, *gain = model_.final_norm;
  size_t stride = shared_.width_stride;
  int k = model_.width;
  if (shared_.collective && shared_.collective->head_input() != HeadInput::own) {
    if (!combine_lanes(x, rows)) return false;
    x = combined_.data();
    if (shared_.collective->head_input() != HeadInput::sum) gain = nullptr;
    if (shared_.collective->head_input() == HeadInput::concatenate) k *= shared_.collective->ranks();
    stride = k;
  }
  if (!prepare(Stage::head, x, stride, gain, k, rows, input)) return false;
  const Span& owned = span(Stage::head);
  const uint8_t* tape = model_.tapes[index_] + owned.offset;
  float* own = out + owned.first * kTileRows;
  if (rows == 1) kernels_.multiply(input.format, tape, owned.count, input.padded_k, input.rows, own);
  else
    kernels_.multiply_panels(input.format, tape, owned.count, input.padded_k, input.rows, shared_.panel_stride, rows, own,
                             shared_.logits_stride);
  return (!shared_.collective || gather_logits(out, rows)) && meet(Stage::head);
}

}  // namespace monotape
