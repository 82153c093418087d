// Attention: every query head looks at all positions its layer may see, block by block.
//
// Blocks start at multiples of kv_block, whoever computes them, and a head's partial results are combined in block
// order. So decode (workers share the blocks of one row) and prefill (workers share the rows) give the same bits.
#include <algorithm>

#include "worker.h"

namespace monotape {

bool Worker::attention(int layer, const Rows& rows) {
  if (rows.count == 1) {
    share_decode_attention(layer, rows.position);
    if (!meet(Stage::qkv)) return false;
    const int first = first_position(layer, rows.position) / model_.kv_block;
    const int blocks = rows.position / model_.kv_block - first + 1;
    for (int head = index_; head < model_.heads; head += model_.workers)
      kernels_.combine(shared_.partials.data() + head * shared_.blocks * shared_.partial_stride, blocks,
                       shared_.partial_stride, model_.head_dim, shared_.attended.data() + head * model_.head_dim);
  } else {
    for (int item = index_; item < rows.count * model_.kv_heads; item += model_.workers) {
      if (quits()) return false;
      attend_row(layer, item / model_.kv_heads, rows.position + item / model_.kv_heads, item % model_.kv_heads);
    }
  }
  return meet(Stage::output);
}

int Worker::first_position(int layer, int position) const {
  const int window = model_.windows[layer];
  return window ? std::max(0, position - window + 1) : 0;
}

// One row: (block, KV head) pairs are dealt out to all workers, whatever the length of the context.
void Worker::share_decode_attention(int layer, int position) {
  const int first = first_position(layer, position) / model_.kv_block, last = position / model_.kv_block;
  const int items = (last - first + 1) * model_.kv_heads;
  for (int item = index_; item < items; item += model_.workers) {
    const int block = first + item / model_.kv_heads, kv_head = item % model_.kv_heads;
    const size_t head = static_cast<size_t>(kv_head) * shared_.group;
    attend_block(layer, shared_.query.data() + head * model_.head_dim, kv_head, position, block,
                 shared_.partials.data() + (head * shared_.blocks + block - first) * shared_.partial_stride);
  }
}

// Many rows: one worker takes a row's KV head from the first block to the last.
void Worker::attend_row(int layer, int row, int position, int kv_head) {
  const int first = first_position(layer, position) / model_.kv_block, last = position / model_.kv_block;
  const size_t head = static_cast<size_t>(kv_head) * shared_.group;
  const float* q = shared_.query.data() + row * shared_.query_stride + head * model_.head_dim;
  for (int block = first; block <= last; block++)
    attend_block(layer, q, kv_head, position, block, partials_.data() + (block - first) * shared_.partial_stride);
  float* out = shared_.attended.data() + row * shared_.query_stride + head * model_.head_dim;
  for (int g = 0; g < shared_.group; g++)
    kernels_.combine(partials_.data() + g * shared_.blocks * shared_.partial_stride, last - first + 1,
                     shared_.partial_stride, model_.head_dim, out + g * model_.head_dim);
}

void Worker::attend_block(int layer, const float* q, int kv_head, int position, int block, float* partials) {
  const int start = std::max(block * model_.kv_block, first_position(layer, position));
  const int end = std::min((block + 1) * model_.kv_block, position + 1);
  const size_t head = static_cast<size_t>(layer) * model_.kv_heads + kv_head;
  const size_t at = (head * shared_.job.kv_capacity + start) * model_.head_dim * value_bytes(model_.kv_format);
  kernels_.attend(model_.kv_format, q, shared_.group, model_.head_dim, static_cast<uint8_t*>(shared_.keys) + at,
                  static_cast<uint8_t*>(shared_.values) + at, end - start, scores_.data(), partials,
                  shared_.blocks * shared_.partial_stride);
}

}  // namespace monotape
