// A prompt in rows on several ranks. A module leaves every rank with partial sums of all rows of the chunk; they are
// stored straight into the inbox of every rank, its own too, then all ranks meet, and then each folds what the plan's
// step says, in rank order, as `settle` in ranks.h does for a token. A part of a prefill takes tens of microseconds and
// a meeting few, so no word of rows says by itself whether it is there.
//
// Meetings. There is one after every module, whether it sends or not. A worker that has come makes its stores visible to
// all GPUs and raises its rank's counter; worker 0, who has seen all workers of the rank come, pushes a numbered word to
// every rank; and every worker waits for the words of all ranks. Numbers go up by one from meeting to meeting, and on
// from request to request. Words take turns in two places: nobody makes the one after next before all workers of all
// ranks have come to the next, that is, have read this one.
//
// Memory order. Stores of rows, the meeting of a block's threads, a fence of its first thread at system scope, the
// counter (release, acquire), worker 0's fence, its word (relaxed), another rank's poll of it (relaxed), a fence there,
// the meeting of that block's threads, loads of rows: each is ordered before the next, so whoever has met sees all rows
// that were sent before. The same chain orders loads of a slot before the stores that fill it again.
//
// Slots. Who makes send j has met everybody after the module before it, so that all ranks have folded whatever
// modules before that one fold. With a lag of at most so many sends between a send and its last folding, everything up
// to send j - 2 - lag is folded, and lag + 2 slots suffice. (One send is made after the last module: see combine_rows.)
//
// Cancelling. Rank 0's word says whether the host wants to stop; everybody reads it in the same meeting, so all ranks
// end at the same place.
#pragma once
#include "ranks.h"
#include "rows.h"

namespace monotape {

// Of lanes that differ the head reads what all have made together. That takes one more send and meeting at the end of a
// chunk: of the last one, or of every one where the logits of all rows are asked for.
__device__ __forceinline__ bool ends_together(const Params& p, Chunk chunk) {
  return kHeadInput != HeadInput::own && (p.logits_out || chunk.start + chunk.count == p.prompt_length);
}
// Meetings and sends are counted through all chunks of a request: number `at` of this chunk, each of which has `in_chunk`.
__device__ __forceinline__ int count_in_request(const Params& p, Chunk chunk, int in_chunk, int at) {
  const int more = kHeadInput != HeadInput::own && p.logits_out ? 1 : 0;
  return (chunk.start - p.cached) / p.chunk * (in_chunk + more) + at;
}
constexpr int kModules = 2 * kLayers;

// Where the rows of a send lie in an inbox: [slots][rows of a chunk][from][width].
__device__ __forceinline__ int64_t row_slot(const Params& p, Chunk chunk, int send) {
  return static_cast<int64_t>(count_in_request(p, chunk, kSends, send) % kRowSlots) * p.chunk * kRanks * kLinkWidth;
}
__device__ __forceinline__ int64_t place_in_slot(int row, int column) {
  return static_cast<int64_t>(row) * kRanks * kLinkWidth + column;
}
// Two neighbouring values, to all ranks.
__device__ __forceinline__ void push_pair(const Ranks& ranks, int64_t place, float a, float b) {
#pragma unroll
  for (int to = 0; to < kRanks; to++) store_row_pair(ranks.inbox[to].rows + place, a, b);
}

// What becomes of the partial sums of a module, two neighbouring columns of a row at a time.
class RowSums {
 public:
  __device__ __forceinline__ RowSums(Consumer& c, Chunk chunk, Stage stage, int layer) : params_(c.params) {
    const RankStep& step = c.shared.steps[2 * layer + (stage == Stage::down)];
    own_ = step.own;
    slot_ = step.sends ? row_slot(params_, chunk, step.sends) : -1;
  }
  __device__ __forceinline__ void keep(int row, int column, const float* y) const {
    if (own_ != 0) {
      float* out = params_.rows.residual + static_cast<int64_t>(row) * kWidth + column;
      if (column < kWidth) out[0] = load_row_value(out) + own_ * y[0];
      if (column + 1 < kWidth) out[1] = load_row_value(out + 1) + own_ * y[1];
    }
    if (slot_ >= 0) push_pair(params_.ranks, slot_ + place_in_slot(row, column), y[0], y[1]);
  }

 private:
  const Params& params_;
  float own_;
  int64_t slot_;
};

// Called by the first thread of each worker.
__device__ inline void come_to_meeting(Consumer& c, int module, uint32_t number) {
  const int barriers = ++c.shared.barriers;
  c.shared.progress = c.shared.progress + 1;
  fence_host();  // of all that this worker has stored in the memory of other ranks
  raise_counter(&c.params.exchange->counter);
  if (blockIdx.x != 0) return;
  Patience patience(c.shared, c.lost, Stage::rows, module / 2);
  while (static_cast<int>(read_counter(&c.params.exchange->counter)) < barriers * kWorkers - 1)
    if (!patience.more(barriers)) return;
  fence_host();
#pragma unroll
  for (int to = 0; to < kRanks; to++)
    push(c.params.ranks.inbox[to].meetings + number % 2 * kRanks, c.shared.cancel ? 1 : 0, number);
}

// All workers of all ranks have arrived after this module of a chunk, and see what the others wrote before. Whether
// everybody is to stop then is in shared.stopping, until the next meeting.
__device__ inline bool ranks_meet(Consumer& c, Chunk chunk, int module) {
  if (!c.meet()) return false;
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = ranks.first_meeting + count_in_request(c.params, chunk, kModules, module);
  if (c.thread == 0) come_to_meeting(c, module, number);
  if (c.warp() == 0) {
    __syncwarp();
    const LinkWord* word = ranks.own.meetings + number % 2 * kRanks + c.lane();
    // The own rank first: if one of its workers does not come it is not the peers' fault.
    if (c.lane() == ranks.rank) {
      Patience patience(c.shared, c.lost, Stage::rows, module / 2);
      while (!is_here(peek(word), number, ranks))
        if (!patience.more(c.shared.barriers)) break;
    }
    __syncwarp();
    if (c.lane() < kRanks) {
      LinkPatience patience(c, Stage::rows, module / 2);
      const uint32_t stop = receive(word, number, ranks, c.lane(), module, patience);
      if (c.lane() == 0) c.shared.stopping = static_cast<int>(stop);
    }
    fence_host();
  }
  return c.meet();
}

__device__ __forceinline__ void add_quad(float* out, const float* sum, bool replaces) {
  uint4* word = reinterpret_cast<uint4*>(out);
  const uint4 old = replaces ? make_uint4(0, 0, 0, 0) : load_row_word(word);
  *word = make_uint4(__float_as_uint(__uint_as_float(old.x) + sum[0]), __float_as_uint(__uint_as_float(old.y) + sum[1]),
                     __float_as_uint(__uint_as_float(old.z) + sum[2]), __float_as_uint(__uint_as_float(old.w) + sum[3]));
}

// Adds up what all ranks have sent of the rows from `first_row` on, or all but this one, and adds that to the residual
// or puts it in its place. Elements are dealt out to all threads, always alike: one thread makes all foldings of its own.
__device__ __forceinline__ void fold_rows(Consumer& c, Chunk chunk, int first_row, int send, bool whole, bool replaces) {
  constexpr int kQuads = kLinkWidth / 4;
  const Ranks& ranks = c.params.ranks;
  const uint4* slot = reinterpret_cast<const uint4*>(ranks.own.rows + row_slot(c.params, chunk, send));
#pragma unroll 1
  for (int i = blockIdx.x * kConsumers + c.thread; i < (chunk.count - first_row) * kQuads; i += kWorkers * kConsumers) {
    const int row = first_row + i / kQuads, column = i % kQuads * 4;
    uint4 word[kRanks];
#pragma unroll
    for (int from = 0; from < kRanks; from++) word[from] = load_row_word(slot + place_in_slot(row, from * kLinkWidth + column) / 4);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int from = 0; from < kRanks; from++) {
      if (!whole && from == ranks.rank) continue;
      sum[0] += __uint_as_float(word[from].x), sum[1] += __uint_as_float(word[from].y);
      sum[2] += __uint_as_float(word[from].z), sum[3] += __uint_as_float(word[from].w);
    }
    float* out = c.params.rows.residual + static_cast<int64_t>(row) * kWidth + column;
    if constexpr (kWidth % 4 == 0) {
      if (column < kWidth) add_quad(out, sum, replaces);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + j < kWidth) out[j] = replaces ? sum[j] : load_row_value(out + j) + sum[j];
    }
  }
}

// After `output` or `down`: all ranks meet, and fold what the step says; at the end also what is still on its way.
__device__ __forceinline__ bool settle_rows(Consumer& c, Chunk chunk, int module) {
  if (!ranks_meet(c, chunk, module)) return false;
  if (c.shared.stopping) return true;
  const int late = module == kModules - 1 ? kLateFolds : 0;
#pragma unroll 1
  for (int i = 0; i <= late; i++) {
    const RankStep& step = c.shared.steps[module + i];
    if (step.folds) fold_rows(c, chunk, 0, step.folds, step.whole, false);
  }
  return true;
}

// A row of a rank's final residual, as its part of what the head reads.
__device__ __forceinline__ void share_row(Consumer& c, int64_t slot, int row) {
  constexpr bool kMean = kHeadInput == HeadInput::mean;
  const float* in = c.params.rows.residual + static_cast<int64_t>(row) * kWidth;
  float scale = 1;
  if constexpr (kMean) {
    float squares = 0;
#pragma unroll 4
    for (int k = c.lane(); k < kWidth; k += 32) {
      const float value = load_row_value(in + k);
      squares += value * value;
    }
    scale = rsqrtf(warp_sum(squares) / kWidth + kNormEps) / kRanks;  // the mean's division goes along with the norm
  }
#pragma unroll 2
  for (int column = 2 * c.lane(); column < kLinkWidth; column += 64) {
    float value[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int k = column + j;
      value[j] = k < kWidth ? load_row_value(in + k) * (kMean ? c.params.final_norm[k] : 1) * scale : 0;
    }
    push_pair(c.params.ranks, slot + place_in_slot(row, column), value[0], value[1]);
  }
}

// Residuals that the lanes have each for themselves become what the head reads, in every rank: of the last row, or of
// all where all logits are asked for.
__device__ __forceinline__ bool combine_rows(Consumer& c, Chunk chunk) {
  const int first = c.params.logits_out ? 0 : chunk.count - 1, send = kSends + 1;
  const int64_t slot = row_slot(c.params, chunk, send);
  for_each_row(c, chunk.count - first, [&](int row) { share_row(c, slot, first + row); });
  if (!ranks_meet(c, chunk, kModules)) return false;
  if (!c.shared.stopping) fold_rows(c, chunk, first, send, true, true);
  return true;
}

// A mean is of normalised values, and goes into the head as it is.
__device__ __forceinline__ void pack_rows(Consumer& c, Chunk chunk) {
  for_each_row(c, chunk.count, [&](int row) {
    const float* in = c.params.rows.residual + static_cast<int64_t>(row) * kWidth;
#pragma unroll 1
    for (int word = c.lane(); word < kWidthWords; word += 32) {
      float value[8];
#pragma unroll
      for (int i = 0; i < 8; i++) value[i] = word * 8 + i < kWidth ? load_row_value(in + word * 8 + i) : 0;
      c.params.rows.normed[block_word(row, word, k_blocks(Stage::head))] = pack8(value);
    }
  });
}

}  // namespace monotape
