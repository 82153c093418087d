// Attention over rows. A block of work is 128 rows of one KV head, a row being (position, query head of the group), so
// that every key and value serves all query heads that share it. A warp has 16 rows; units of KV come to all of them
// through shared memory.
#pragma once
#include "rows.h"

namespace monotape {

constexpr int kBlockRows = kWarps * 16;

class RowAttention {
 public:
  static constexpr int kSteps = smaller(6, kRingPages * kPageBytes / kUnitBytes);

  __device__ RowAttention(Consumer& c, Chunk chunk, int layer) : c_(c), chunk_(chunk), layer_(layer) {}

  __device__ __forceinline__ void run(int kv_head, int block) {
    kv_head_ = kv_head;
    const int window = c_.params.windows[layer_], first = block * kBlockRows;
    Head query[2];
#pragma unroll
    for (int half = 0; half < 2; half++) prepare(first + c_.warp() * 16 + half * 8 + c_.row(), half, window, query[half]);
    clear();
    // Units that any row of the block can see.
    const int low = chunk_.start + first / kGroup, high = chunk_.start + smaller(chunk_.count, divide_up(first + kBlockRows, kGroup)) - 1;
    const int begin = (window && low + 1 > window ? low + 1 - window : 0) / kUnitPositions, end = high / kUnitPositions + 1;
    consumers_meet(kConsumers);  // everybody is done with the block before
#pragma unroll 1
    for (int step = 0; step < kSteps - 1; step++) copy_unit(begin + step, end, step);
    int slot = 0;
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
      wait_copy_groups<kSteps - 2>();
      consumers_meet(kConsumers);
      copy_unit(unit + kSteps - 1, end, slot ? slot - 1 : kSteps - 1);
      look_at_unit(unit, slot, query);
      if (++slot == kSteps) slot = 0;
    }
    wait_copy_groups<0>();
    finish();
  }

 private:
  // Row `index` of the KV head's rows in this chunk.
  __device__ __forceinline__ void prepare(int index, int half, int window, Head& query) {
    const int row = index / kGroup, head = kv_head_ * kGroup + index % kGroup;
    const bool real = row < chunk_.count;
    row_[half] = real ? row : -1, head_[half] = head;
    last_[half] = real ? chunk_.start + row : -1;
    first_[half] = window ? last_[half] + 1 - window : 0;
    uint4 word[HeadWords::count];
    row_words(c_.params, row, head * kHeadDim, c_.column(), real, word);
    const float* gain = kQkNorm ? c_.params.q_norm + layer_ * kHeadDim : nullptr;
    query = finish_head(word, c_.column(), gain, angles_of(c_.params, real ? chunk_.start + row : chunk_.start), kAttentionScale);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; half++) peak_[half] = -infinity(), sum_[half] = 0;
#pragma unroll
    for (int j = 0; j < kHeadTiles; j++) values_[j][0] = values_[j][1] = values_[j][2] = values_[j][3] = 0;
  }

  __device__ __forceinline__ void copy_unit(int unit, int end, int slot) {
    if (unit < end) {
      const uint8_t* from = kv_unit(c_.params, layer_, kv_head_, unit);
      uint8_t* to = c_.shared.ring[0] + slot * kUnitBytes;
#pragma unroll 4
      for (int i = c_.thread; i < kUnitBytes / 16; i += kConsumers) copy_word(to + i * 16, from + i * 16, 16);
    }
    end_copy_group();
  }

  __device__ __forceinline__ void look_at_unit(int unit, int slot, const Head (&query)[2]) {
    const uint4* keys = reinterpret_cast<const uint4*>(c_.shared.ring[0] + slot * kUnitBytes) + c_.lane();
    float score[4][4];
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      score[tile][0] = score[tile][1] = score[tile][2] = score[tile][3] = 0;
#pragma unroll
      for (int b = 0; b < kHeadBlocks; b++) {
        const uint4 key = load_block(keys + (tile * kHeadBlocks + b) * kBlockWords);
        multiply_accumulate(score[tile], query[0].block[b].x, query[1].block[b].x, query[0].block[b].y, query[1].block[b].y, key.x, key.y);
        multiply_accumulate(score[tile], query[0].block[b].z, query[1].block[b].z, query[0].block[b].w, query[1].block[b].w, key.z, key.w);
      }
    }
    uint32_t weight[4][2];
    float fade[2];
#pragma unroll
    for (int half = 0; half < 2; half++) fade[half] = weigh(unit, half, score, weight);
    const uint4* values = keys + kKeyBlocks * kBlockWords;
#pragma unroll
    for (int j = 0; j < kHeadTiles; j++) {
      const uint4 value = load_block(values + j * kBlockWords);
      values_[j][0] *= fade[0], values_[j][1] *= fade[0], values_[j][2] *= fade[1], values_[j][3] *= fade[1];
      multiply_accumulate(values_[j], weight[0][0], weight[0][1], weight[1][0], weight[1][1], value.x, value.y);
      multiply_accumulate(values_[j], weight[2][0], weight[2][1], weight[3][0], weight[3][1], value.z, value.w);
    }
  }

  // Scores of one of the lane's two rows become weights; returns what earlier results shrink by.
  __device__ __forceinline__ float weigh(int unit, int half, float (&score)[4][4], uint32_t (&weight)[4][2]) {
    float top = peak_[half];
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int position = unit * kUnitPositions + tile * 8 + 2 * c_.column() + i;
        float& s = score[tile][2 * half + i];
        if (position > last_[half] || position < first_[half]) s = -infinity();
        top = fmaxf(top, s);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float base = top == -infinity() ? 0 : top;  // nothing seen yet: all weights are zero
    float total = 0;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const float a = __expf(score[tile][2 * half] - base), b = __expf(score[tile][2 * half + 1] - base);
      total += a + b;
      weight[tile][half] = pack_pair(a, b);
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float fade = __expf(peak_[half] - base);
    peak_[half] = top;
    sum_[half] = sum_[half] * fade + total;
    return fade;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row_[half] < 0) continue;
      const float scale = 1 / sum_[half];
#pragma unroll
      for (int j = 0; j < kHeadTiles; j++) {
        const int k = head_[half] * kHeadDim + 8 * j;
        uint32_t* word = reinterpret_cast<uint32_t*>(c_.params.rows.attended + block_word(row_[half], k / 8, k_blocks(Stage::output)));
        word[c_.column()] = pack_pair(values_[j][2 * half] * scale, values_[j][2 * half + 1] * scale);
      }
    }
  }

  Consumer& c_;
  Chunk chunk_;
  int layer_, kv_head_ = 0;
  int row_[2], head_[2], first_[2], last_[2];
  float peak_[2], sum_[2], values_[kHeadTiles][4];
};

// The longest blocks first, and back and forth over the workers, so that all have about the same to do.
__device__ __forceinline__ void attend_rows(Consumer& c, Chunk chunk, int layer) {
  c.refresh();
  const int blocks = divide_up(chunk.count * kGroup, kBlockRows), items = blocks * kKvHeads;
  RowAttention attention(c, chunk, layer);
#pragma unroll 1
  for (int round = 0; round * kWorkers < items; round++) {
    const int item = round * kWorkers + (round % 2 ? kWorkers - 1 - blockIdx.x : blockIdx.x);
    if (item < items) attention.run(item % kKvHeads, blocks - 1 - item / kKvHeads);
  }
}

}  // namespace monotape
