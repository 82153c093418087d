// Experts over rows. Each row chooses its experts; each expert gets a list of the rows that chose it; products of experts take
// the rows of a list. No row is dropped, however many choose the same expert.
//
// A pair is a row and one of its experts: number slot * rows + row, where slots are in the order of the experts. A pair's
// activation and its output have that number too, so the sum of a row's experts is a sum of pieces like any other.
#pragma once
#include "rows/state.h"

namespace monotape {

constexpr int kMostPairs = larger(1, kChunkRows * kChosen);

// Behind the sums of products, in the same memory.
struct ExpertRows {
  int* experts;    // [pairs]
  float* weights;  // [pairs]
  int* lists;      // [experts][rows]: pairs
  int* counts;     // [experts]
};
__device__ __forceinline__ ExpertRows expert_rows(const Params& params) {
  int* first = reinterpret_cast<int*>(params.rows.partials + kPartialValues);
  return {first, reinterpret_cast<float*>(first + kMostPairs), first + 2 * kMostPairs, first + 2 * kMostPairs + kExperts * kChunkRows};
}
// Other workers wrote it: from the L2.
__device__ __forceinline__ int load_row_number(const int* from) {
  return static_cast<int>(bits_of(load_row_value(reinterpret_cast<const float*>(from))));
}

// A warp a row. The router's product left logits as it leaves other sums.
__device__ inline void choose_rows(Consumer& c, Pieces pieces) {
  const ExpertRows out = expert_rows(c.params);
  const int first = rows_state(c).first_row();
  for_each_item(c, pieces.rows - first, [&](int item) {
    const int row = first + item;
    ExpertChoice choice(c);
    choice.load([&](int word, float (&logit)[4]) {
#pragma unroll 1
      for (int piece = 0; piece < pieces.count; piece++) {
        const float* from = piece_values(c.params, pieces, piece, row, word / 2) + word % 2 * 4;
        const uint4 bits = load_row_word(reinterpret_cast<const uint4*>(from));
        logit[0] += float_of(bits.x), logit[1] += float_of(bits.y), logit[2] += float_of(bits.z), logit[3] += float_of(bits.w);
      }
    });
    choice.choose([&](int slot, int expert, float weight) {
      out.experts[slot * pieces.rows + row] = expert, out.weights[slot * pieces.rows + row] = weight;
    });
  });
}

__device__ __forceinline__ int warp_total(int value) {
#pragma unroll
  for (int o = kLanes / 2; o; o >>= 1) value += lane_across(value, o);
  return value;
}
// The sum of the values of this lane and those before it.
__device__ __forceinline__ int warp_running(int value, int lane) {
#pragma unroll
  for (int o = 1; o < kLanes; o <<= 1) {
    const int before = lane_below(value, o);
    value += lane >= o ? before : 0;
  }
  return value;
}

// A worker makes the lists of some experts, one after the other. Each warp has its part of the pairs: it counts, and when all
// have counted, it writes.
__device__ inline void group_rows(Consumer& c) {
  const ExpertRows out = expert_rows(c.params);
  const int all_rows = rows_state(c).chunk.count, first_row = rows_state(c).first_row(), rows = all_rows - first_row;
  const int pairs = rows * kChosen, each = whole_warps(divide_up(pairs, kWarps)), first = c.warp() * each;
  const auto pair_at = [&](int place) { return place / rows * all_rows + first_row + place % rows; };
  int* found = reinterpret_cast<int*>(c.shared.sums[0]);
#pragma unroll 1
  for (int expert = worker_number(); expert < kExperts; expert += kWorkers) {
    const auto is_its = [&](int place) { return place < pairs && load_row_number(out.experts + pair_at(place)) == expert; };
    int count = 0;
    for (int at = 0; at < each; at += kLanes) count += is_its(first + at + c.lane());
    count = warp_total(count);
    if (c.lane() == 0) found[c.warp()] = count;
    consumers_meet(kConsumers);
    int before = 0, all = 0;
    for (int w = 0; w < kWarps; w++) before += w < c.warp() ? found[w] : 0, all += found[w];
    for (int at = 0; at < each; at += kLanes) {
      const int place = first + at + c.lane(), its = is_its(place), upto = warp_running(its, c.lane());
      if (its) out.lists[expert * kChunkRows + before + upto - 1] = pair_at(place);
      before += lane_at(upto, kLanes - 1);
    }
    if (c.thread == 0) out.counts[expert] = all;
    consumers_meet(kConsumers);  // all threads have read the counts
  }
}

// Before a product of experts: the blocks of rows of the experts before each, in shared memory.
__device__ __forceinline__ void count_expert_blocks(Consumer& c, int row_tiles) {
  constexpr int kEach = larger(1, divide_up(kExperts, kLanes));
  const ExpertRows rows = expert_rows(c.params);
  consumers_meet(kConsumers);  // no thread reads those of the product before any more
  if (c.warp() == 0) {
    int blocks[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int expert = c.lane() * kEach + i;
      blocks[i] = expert < kExperts ? divide_up(load_row_number(rows.counts + expert), row_tiles * kTileRows) : 0;
      own += blocks[i];
    }
    int before = warp_running(own, c.lane()) - own;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int expert = c.lane() * kEach + i;
      if (expert <= kExperts) rows_state(c).expert_blocks[expert] = before;
      before += blocks[i];
    }
    if (c.lane() == kLanes - 1) rows_state(c).expert_blocks[kExperts] = before;
  }
  consumers_meet(kConsumers);
}

// The expert of a block of rows.
__device__ __forceinline__ int expert_of_block(Consumer& c, int block) {
  const int* before = rows_state(c).expert_blocks;
  int low = 0, high = kExperts;  // before[low] <= block < before[high]
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (before[mid] <= block) low = mid;
    else high = mid;
  }
  return low;
}

}  // namespace monotape
