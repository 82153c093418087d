// Rows: the tokens of a prompt go through the model together, a chunk at a time. Stages are separated by a barrier of
// all workers (a stage takes far longer than a barrier), activations lie in global memory, and the ring's shared memory
// serves as the buffer of ordinary matrix products.
#pragma once
#include "heads.h"
#include "model.h"

namespace monotape {

struct Chunk {
  int start, count;  // position of its first row, and how many rows it has
};

// All workers have arrived, and see what the others wrote before.
__device__ inline bool all_meet(Consumer& c, int layer) {
  if (!c.meet()) return false;
  if (c.thread == 0) {
    const int barriers = ++c.shared.barriers;
    c.shared.progress = c.shared.progress + 1;
    raise_counter(&c.params.exchange->counter);
    Patience patience(c.shared, c.lost, Stage::rows, layer);
    while (static_cast<int>(read_counter(&c.params.exchange->counter)) < barriers * kWorkers - 1)
      if (!patience.more(barriers)) break;
  }
  return c.meet();
}

// Rows are dealt out to the warps of all workers.
template <class Work>
__device__ __forceinline__ void for_each_row(Consumer& c, int rows, Work work) {
#pragma unroll 1
  for (int row = c.warp() * kWorkers + blockIdx.x; row < rows; row += kWarps * kWorkers) work(row);
}

__device__ inline void embed_rows(Consumer& c, Chunk chunk) {
  for_each_row(c, chunk.count, [&](int row) {
    const int token = c.params.prompt[chunk.start + row];
    float* out = c.params.rows.residual + static_cast<int64_t>(row) * kWidth;
#pragma unroll 1
    for (int k = c.lane(); k < kWidth; k += 32) out[k] = widen(*embedding_value(c.params, token, k));
  });
}

// Where word `word` (eight values) of a row lies in an array of blocks.
__device__ __forceinline__ int64_t block_word(int row, int word, int blocks) {
  return (static_cast<int64_t>(row / kTileRows) * blocks + word / 4) * kBlockWords + row % kTileRows * 4 + word % 4;
}

__device__ inline void normalise_rows(Consumer& c, Chunk chunk, const float* gain) {
  for_each_row(c, chunk.count, [&](int row) {
    const float* in = c.params.rows.residual + static_cast<int64_t>(row) * kWidth;
    float squares = 0;
#pragma unroll 4
    for (int k = c.lane(); k < kWidth; k += 32) {
      const float value = load_row_value(in + k);
      squares += value * value;
    }
    squares = warp_sum(squares);
    const float scale = rsqrtf(squares / kWidth + kNormEps);
#pragma unroll 2
    for (int word = c.lane(); word < kWidthWords; word += 32) {
      float value[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int k = word * 8 + i;
        value[i] = k < kWidth ? load_row_value(in + k) * scale * gain[k] : 0;
      }
      c.params.rows.normed[block_word(row, word, k_blocks(Stage::qkv))] = pack8(value);
    }
  });
}

// A head's words of a row, as the qkv product left them.
__device__ __forceinline__ void row_words(const Params& params, int row, int first, int column, bool real,
                                          uint4 (&word)[HeadWords::count]) {
  int number[HeadWords::count];
  HeadWords::numbers(column, number);
  const uint4* words = reinterpret_cast<const uint4*>(params.rows.qkv + static_cast<int64_t>(row) * kQkvRows + first);
#pragma unroll
  for (int i = 0; i < HeadWords::count; i++)
    word[i] = real && number[i] >= 0 ? load_row_word(words + number[i]) : make_uint4(0, 0, 0, 0);
}

// Keys are normalised and rotated, and go into the KV with the values. A warp does eight rows of one head at a time.
__device__ inline void keep_keys_and_values(Consumer& c, Chunk chunk, int layer) {
  const float* gain = kQkNorm ? c.params.k_norm + layer * kHeadDim : nullptr;
  for_each_row(c, divide_up(chunk.count, 8) * kKvHeads, [&](int item) {
    const int kv_head = item % kKvHeads, row = item / kKvHeads * 8 + c.row(), position = chunk.start + row;
    const bool real = row < chunk.count;
    uint8_t* unit = kv_unit(c.params, layer, kv_head, position / kUnitPositions);
    uint4 word[HeadWords::count];
    row_words(c.params, row, kQueryRows + kv_head * kHeadDim, c.column(), real, word);
    const Head key = finish_head(word, c.column(), gain, angles_of(c.params, real ? position : chunk.start), 1.0f);
    if (!real) return;
#pragma unroll
    for (int b = 0; b < kHeadBlocks; b++) {
      store_key_word(unit, position, b, c.column(), key.block[b]);
      if (4 * b + c.column() >= kHeadWords) continue;
      const uint16_t* values = c.params.rows.qkv + static_cast<int64_t>(row) * kQkvRows + kQueryRows + kKvRows + kv_head * kHeadDim;
      const uint4 value = load_row_word(reinterpret_cast<const uint4*>(values) + 4 * b + c.column());
      const uint32_t pair[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        *value_place(unit, position, (4 * b + c.column()) * 8 + i) = static_cast<uint16_t>(pair[i / 2] >> (i % 2 * 16));
    }
  });
}

// The chunk's last row becomes what the head starts from.
__device__ inline void publish_last_row(Consumer& c, int row) {
  const Span& owned = c.span(Stage::output);
#pragma unroll 1
  for (int i = c.thread; i < divide_up(owned.count * kTileRows, 32) * 32; i += kConsumers) {
    const int tile = i / kTileRows, k = (owned.first + tile) * kTileRows + i % kTileRows;
    const bool mine = tile < owned.count;
    const float value = mine && k < kWidth ? load_row_value(c.params.rows.residual + static_cast<int64_t>(row) * kWidth + k) : 0;
    const uint4 word = gather_word(value);
    if (mine && i % kTileRows == 0) publish(c.params.exchange->final_residual, c.sample_turn(), owned.first + tile, word);
  }
}

}  // namespace monotape
