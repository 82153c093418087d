// Attention: every query head looks at all positions its layer may see, block by block.
//
// Blocks start at multiples of kv_block, whichever worker computes them, and a head's partial results are combined in
// block order. So decode (workers share the blocks of a few rows) and prefill (workers share the rows) give the same bits.
#include <algorithm>

#include "worker.h"

namespace monotape {

bool Worker::attention(int layer, const Rows& rows) {
  if (rows.count <= kPassRows) {
    if (!share_decode_attention(layer, rows) || !meet(Stage::qkv)) return false;
    combine_blocks(layer, rows);
  } else {
    // (KV head, row) pairs are dealt out to all workers; a worker takes its rows of a head some at a time.
    for (int kv_head = 0; kv_head < model_.kv_heads; kv_head++) {
      int chosen[kRowsAttended], count = 0;
      for (int row = 0; row < rows.count; row++) {
        if ((kv_head * rows.count + row) % model_.workers == index_) chosen[count++] = row;
        if (count == kRowsAttended || (count && row + 1 == rows.count)) {
          if (!attend_rows(layer, rows, kv_head, chosen, count)) return false;
          count = 0;
        }
      }
    }
  }
  return meet(Stage::output);
}

const float* Worker::sink(int layer, int head) const {
  return model_.sinks ? model_.sinks + static_cast<size_t>(layer) * model_.heads + head : nullptr;
}

int Worker::first_position(int layer, int position) const {
  const int window = model_.windows[layer];
  return window ? std::max(0, position - window + 1) : 0;
}

// A pass of decode: (block, KV head) pairs are dealt out to all workers, whatever the length of the context.
bool Worker::share_decode_attention(int layer, const Rows& rows) {
  const int first = first_position(layer, rows.position) / model_.kv_block;
  const int last = (rows.position + rows.count - 1) / model_.kv_block;
  const int items = (last - first + 1) * model_.kv_heads;
  for (int item = index_; item < items; item += model_.workers) {
    const int block = first + item / model_.kv_heads, kv_head = item % model_.kv_heads;
    if (rows.count > 1 && quits()) return false;
    attend_block(layer, rows, kv_head, block);
  }
  return true;
}

// Several rows widen the keys and values of a block once for all of them; a row alone reads them as they are.
void Worker::attend_block(int layer, const Rows& rows, int kv_head, int block) {
  const int dim = model_.head_dim, begin = block * model_.kv_block;
  const size_t head = static_cast<size_t>(kv_head) * shared_.group;
  const bool widens = rows.count > 1;
  const Format format = widens ? Format::f32 : model_.kv_format;
  const uint8_t *keys = kv_at(shared_.keys, layer, kv_head, begin), *values = kv_at(shared_.values, layer, kv_head, begin);
  if (widens) {
    const int count = (std::min(begin + model_.kv_block, rows.position + rows.count) - begin) * dim;
    kernels_.widen_kv(model_.kv_format, keys, count, wide_keys_.data());
    kernels_.widen_kv(model_.kv_format, values, count, wide_values_.data());
    keys = reinterpret_cast<const uint8_t*>(wide_keys_.data());
    values = reinterpret_cast<const uint8_t*>(wide_values_.data());
  }
  for (int r = 0; r < rows.count; r++) {
    const int position = rows.position + r, seen = first_position(layer, position);
    const int start = std::max(begin, seen), end = std::min(begin + model_.kv_block, position + 1);
    if (start >= end) continue;
    const size_t skipped = static_cast<size_t>(start - begin) * dim * value_bytes(format);
    kernels_.attend(format, shared_.query.data() + r * shared_.query_stride + head * dim, shared_.group, dim, keys + skipped,
                    values + skipped, end - start, scores_.data(),
                    partials_of(r, head) + (block - seen / model_.kv_block) * shared_.partial_stride,
                    shared_.blocks * shared_.partial_stride);
  }
}

void Worker::combine_blocks(int layer, const Rows& rows) {
  for (int i = index_; i < rows.count * model_.heads; i += model_.workers) {
    const int r = i / model_.heads, head = i % model_.heads, position = rows.position + r;
    const int blocks = position / model_.kv_block - first_position(layer, position) / model_.kv_block + 1;
    kernels_.combine(partials_of(r, head), blocks, shared_.partial_stride, model_.head_dim, sink(layer, head),
                     shared_.attended.data() + r * shared_.query_stride + head * model_.head_dim);
  }
}

float* Worker::partials_of(int row, size_t head) {
  return shared_.partials.data() + (row * model_.heads + head) * shared_.blocks * shared_.partial_stride;
}

// Many rows: keys and values of a block are widened once for all of them.
bool Worker::attend_rows(int layer, const Rows& rows, int kv_head, const int* chosen, int count) {
  const int dim = model_.head_dim, kv_block = model_.kv_block, group = shared_.group;
  const size_t head = static_cast<size_t>(kv_head) * group, row_partials = group * shared_.blocks * shared_.partial_stride;
  const int newest = rows.position + chosen[count - 1];
  const int first = first_position(layer, rows.position + chosen[0]) / kv_block;
  for (int block = first; block <= newest / kv_block; block++) {
    const int begin = block * kv_block, values = (std::min(begin + kv_block, newest + 1) - begin) * dim;
    kernels_.widen_kv(model_.kv_format, kv_at(shared_.keys, layer, kv_head, begin), values, wide_keys_.data());
    kernels_.widen_kv(model_.kv_format, kv_at(shared_.values, layer, kv_head, begin), values, wide_values_.data());
    for (int i = 0; i < count; i++) {
      const int position = rows.position + chosen[i], seen = first_position(layer, position);
      const int start = std::max(begin, seen), end = std::min(begin + kv_block, position + 1);
      if (start >= end) continue;
      if (quits()) return false;
      kernels_.attend(Format::f32, shared_.query.data() + chosen[i] * shared_.query_stride + head * dim, group, dim,
                      wide_keys_.data() + (start - begin) * dim, wide_values_.data() + (start - begin) * dim, end - start,
                      scores_.data(), partials_.data() + i * row_partials + (block - seen / kv_block) * shared_.partial_stride,
                      shared_.blocks * shared_.partial_stride);
    }
  }
  for (int i = 0; i < count; i++) {
    const int position = rows.position + chosen[i];
    const int blocks = position / kv_block - first_position(layer, position) / kv_block + 1;
    float* out = shared_.attended.data() + chosen[i] * shared_.query_stride + head * dim;
    for (int g = 0; g < group; g++)
      kernels_.combine(partials_.data() + i * row_partials + g * shared_.blocks * shared_.partial_stride, blocks,
                       shared_.partial_stride, dim, sink(layer, static_cast<int>(head) + g), out + g * dim);
  }
  return true;
}

uint8_t* Worker::kv_at(void* cache, int layer, int kv_head, int position) const {
  const size_t head = static_cast<size_t>(layer) * model_.kv_heads + kv_head;
  const size_t at = (head * shared_.job.kv_capacity + position) * model_.head_dim;
  return static_cast<uint8_t*>(cache) + at * value_bytes(model_.kv_format);
}

}  // namespace monotape
