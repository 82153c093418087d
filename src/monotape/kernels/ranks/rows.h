// A prompt in rows on several ranks. A module leaves every rank with partial sums of all rows of the chunk; they are
// stored straight into the inbox of every rank, its own too, then all ranks meet, and the part that comes next folds
// what the plan's step says, in rank order, as `settle` in ranks/words.h does for a token. A part of a prefill takes tens of
// microseconds and a meeting few, so no word of rows says by itself whether it is there.
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
#include "ranks/words.h"
#include "rows/state.h"

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

// Where eight neighbouring values of a send lie in an inbox: [slots][rows of a chunk][from][width].
__device__ __forceinline__ int64_t row_place(Consumer& c, int send, int row, int word) {
  const Params& p = c.params;
  const int slot = count_in_request(p, rows_state(c).chunk, kSends, send) % kRowSlots;
  return (static_cast<int64_t>(slot) * p.chunk + row) * kRanks * kLinkWidth + word * 8;
}
__device__ __forceinline__ void push_values(const Ranks& ranks, int64_t place, const float (&value)[8]) {
#pragma unroll
  for (int to = 0; to < kRanks; to++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      store_row_word(reinterpret_cast<uint4*>(ranks.inbox[to].rows + place) + i,
                     make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                                __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3])));
}

// What becomes of the partial sums of a module, eight neighbouring ones of a row at a time.
class RowSums {
 public:
  __device__ __forceinline__ RowSums(Consumer& c, Stage stage)
      : c_(c), step_(c.shared.steps[module_of(stage, rows_state(c).layer)]) {}

  __device__ __forceinline__ void keep(int row, int word, const float (&value)[8]) const {
    if (step_.own != 0) {
      float residual[8];
      float* place = residual_values(c_.params, row, word);
      load_row_values(place, residual);
#pragma unroll
      for (int i = 0; i < 8; i++) residual[i] += step_.own * value[i];
      store_row_values(place, residual);
    }
    if (step_.sends) push_values(c_.params.ranks, row_place(c_, step_.sends, row, word), value);
  }

 private:
  Consumer& c_;
  const RankStep& step_;
};

// Called by the first thread of each worker.
__device__ inline void come_to_meeting(Consumer& c, int module, uint32_t number) {
  const int barriers = ++c.shared.barriers;
  c.shared.progress = c.shared.progress + 1;
  fence_host();  // of all that this worker has stored in the memory of other ranks
  raise_counter(&c.params.exchange->counter);
  if (worker_number() != 0) return;
  Patience patience(c.shared, c.lost, Stage::rows, module / kLayerModules);
  while (static_cast<int>(read_counter(&c.params.exchange->counter)) < barriers * kWorkers - 1)
    if (!patience.more(barriers)) return;
  fence_host();
#pragma unroll
  for (int to = 0; to < kRanks; to++)
    push(c.params.ranks.inbox[to].meetings + number % 2 * kRanks, c.shared.cancel ? 1 : 0, number);
}

// All workers of all ranks have arrived after this module of a chunk, and see what the others wrote before. So many parts
// of the prefill are done. Whether everybody is to stop then is in shared.stopping, until the next meeting.
__device__ inline bool ranks_meet(Consumer& c, int module, int parts) {
  if (!c.meet()) return false;
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = ranks.first_meeting + count_in_request(c.params, rows_state(c).chunk, kModules, module);
  if (c.thread == 0) come_to_meeting(c, module, number), rows_state(c).go_on(parts);
  if (c.warp() == 0) {
    warp_meets();
    const LinkWord* word = ranks.own.meetings + number % 2 * kRanks + c.lane();
    // The own rank first: if one of its workers does not come it is not the peers' fault.
    if (c.lane() == ranks.rank) {
      Patience patience(c.shared, c.lost, Stage::rows, module / kLayerModules);
      while (!is_here(peek(word), number, ranks))
        if (!patience.more(c.shared.barriers)) break;
    }
    warp_meets();
    if (c.lane() < kRanks) {
      LinkPatience patience(c, Stage::rows, module / kLayerModules);
      const uint32_t stop = receive(word, number, ranks, c.lane(), module, patience);
      if (c.lane() == 0) c.shared.stopping = static_cast<int>(stop);
    }
    fence_host();
  }
  return c.meet();
}

// Adds to eight values of a row what the ranks have sent: the sum of all, or of all but this one.
__device__ __forceinline__ void add_send(Consumer& c, int send, bool whole, int row, int word, float (&value)[8]) {
  const Ranks& ranks = c.params.ranks;
  const float* sent = ranks.own.rows + row_place(c, send, row, word);
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (int from = 0; from < kRanks; from++) {
    float part[8];
    load_row_values(sent + from * kLinkWidth, part);
    const bool counts = whole || from != ranks.rank;
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += counts ? part[i] : 0;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] += sum[i];
}
// The same of all that is folded after a module; at the end that is also what is still on its way.
__device__ __forceinline__ void fold_values(Consumer& c, int module, int row, int word, float (&value)[8]) {
  const int late = module == kModules - 1 ? kLateFolds : 0;
#pragma unroll 1
  for (int i = 0; i <= late; i++) {
    const RankStep& step = c.shared.steps[module + i];
    if (step.folds) add_send(c, step.folds, step.whole, row, word, value);
  }
}
// Of the module before the part at hand. What the head reads has been folded already, if all lanes have a part in it.
__device__ __forceinline__ void add_ranks(Consumer& c, int row, int word, float (&value)[8]) {
  const RowsState& state = rows_state(c);
  const int module = module_before(state.part.stage, state.layer);
  if (module < 0 || (module == kModules - 1 && ends_together(c.params, state.chunk))) return;
  fold_values(c, module, row, word, value);
}

// Words of rows, from `first` on, are dealt out to all threads of all workers.
template <class Work>
__device__ __forceinline__ void for_each_word(Consumer& c, int first, Work work) {
  const int words = (rows_state(c).chunk.count - first) * kWidthWords;
#pragma unroll 1
  for (int i = worker_number() * kConsumers + c.thread; i < words; i += kWorkers * kConsumers)
    work(first + i / kWidthWords, i % kWidthWords);
}

// A row of a rank's final residual, as its part of what the head reads. A warp has the row.
__device__ __forceinline__ void share_row(Consumer& c, int row) {
  constexpr bool kMean = kHeadInput == HeadInput::mean;
  float scale = 1;
  if constexpr (kMean) {
    float squares = 0;
#pragma unroll 2
    for (int word = c.lane(); word < kWidthWords; word += kLanes) {
      float value[8];
      load_row_values(residual_values(c.params, row, word), value);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[i] * value[i];
    }
    scale = inverse_root(warp_sum(squares) / kWidth + kNormEps) / kRanks;  // the mean's division goes along with the norm
  }
#pragma unroll 1
  for (int word = c.lane(); word < kWidthWords; word += kLanes) {
    float value[8];
    load_row_values(residual_values(c.params, row, word), value);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (kMean && word * 8 + i < kWidth) value[i] *= c.params.vectors[static_cast<int>(row_of(Stage::head).gain)][word * 8 + i] * scale;
    push_values(c.params.ranks, row_place(c, kSends + 1, row, word), value);
  }
}

// Residuals that the lanes have each for themselves become what the head reads, in every rank: of the last row, or of
// all where all logits are asked for.
__device__ __forceinline__ bool combine_rows(Consumer& c) {
  const int rows = rows_state(c).chunk.count, first = c.params.logits_out ? 0 : rows - 1;
  for_each_word(c, first, [&](int row, int word) {
    float value[8];
    load_row_values(residual_values(c.params, row, word), value);
    fold_values(c, kModules - 1, row, word, value);
    store_row_values(residual_values(c.params, row, word), value);
  });
  if (!all_meet(c, 0)) return false;
  for_each_item(c, rows - first, [&](int item) { share_row(c, first + item); });
  if (!ranks_meet(c, kModules, 0)) return false;
  for_each_word(c, first, [&](int row, int word) {
    float value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    add_send(c, kSends + 1, true, row, word, value);
    store_row_values(residual_values(c.params, row, word), value);
  });
  return all_meet(c, 0);
}

// After `output` or `down`, which has left sums in several pieces of k, or in one that is sent already.
__device__ __forceinline__ bool end_module_rows(Consumer& c, Pieces pieces) {
  const RowsState& state = rows_state(c);
  const Stage stage = state.part.stage;
  const int module = module_of(stage, state.layer);
  if (pieces.count > 1) {
    if (!all_meet(c, 0)) return false;
    for_each_word(c, 0, [&](int row, int word) {
      const int place[1] = {row * pieces.words + word};
      float value[1][8] = {};
      add_pieces<8>(c.params, pieces, place, value);
      RowSums(c, stage).keep(row, word, value[0]);
    });
  }
  if (!ranks_meet(c, module, 1)) return false;
  return module < kModules - 1 || c.shared.stopping || !ends_together(c.params, state.chunk) || combine_rows(c);
}

// A mean is of normalised values, and goes into the head as it is.
__device__ __forceinline__ void pack_rows(Consumer& c) {
  for_each_word(c, 0, [&](int row, int word) {
    float value[8];
    load_row_values(residual_values(c.params, row, word), value);
    c.params.rows.normed[block_word(row, word, kWidthBlocks)] = pack8(value);
  });
}

}  // namespace monotape
