// A prompt in rows on several ranks. A module leaves every rank with partial sums of all rows of the chunk. They are stored
// straight into the inbox of every rank, the own one too; then all ranks meet, and the next part folds what the plan's step
// says, in rank order, as `settle` in ranks/words.h does for a token. A part of a prefill takes tens of microseconds and a
// meeting few, so rows carry no numbers of their own.
//
// A meeting follows every module, whether it sends or not. As happens-before steps:
// 1. All threads of a worker store their rows, then meet at the thread block's barrier.
// 2. Its first thread executes a fence at system scope and raises its rank's counter (release).
// 3. Worker 0 polls the counter (acquire) until all workers of the rank have come, executes a fence at system scope, and
//    pushes a numbered word to every rank (relaxed).
// 4. Warp 0 of every worker polls the words of all ranks (relaxed), executes a fence at system scope, and meets the rest of
//    its thread block.
// 5. So every row stored before a meeting is seen by every load after it, and every load of a slot before a meeting happens
//    before the stores that fill the slot again.
// Numbers go up by one from meeting to meeting, and on from request to request. The words use two slots: no rank sends the
// word after next before all workers of all ranks have come to the next meeting, and so have read this word.
//
// Slots of rows. Before a rank makes send j, all ranks have met after the module before it. So they have folded whatever the
// modules before that one fold: every send up to j - 2 - lag. Hence lag + 2 slots suffice. (One send is made after the last
// module: see combine_rows.)
//
// Cancelling. Rank 0's word says whether the host wants to stop. All ranks read it in the same meeting, so all end at the
// same place.
#pragma once
#include "ranks/words.h"
#include "rows/state.h"

namespace monotape {

// Where lanes differ, the head reads a combination of all. That takes one more send and meeting at the end of the last
// chunk, or of every chunk where the logits of all rows are requested.
__device__ __forceinline__ bool ends_together(const Params& p, Chunk chunk) {
  return kHeadInput != HeadInput::own && (p.logits_out || chunk.start + chunk.count == p.prompt_length);
}
// Meetings and sends are counted through all chunks of a request: entry `at` of this chunk; each chunk has `in_chunk`.
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

// Keeps and sends the partial sums of a module, eight neighbouring values of a row at a time.
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
  fence_host();  // step 2: this worker's stores into other ranks' memory
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

// The meeting after a module of a chunk; `parts` more parts of the prefill are done then. shared.stopping says whether all
// ranks are to stop, until the next meeting.
__device__ inline bool ranks_meet(Consumer& c, int module, int parts) {
  if (!c.meet()) return false;
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = ranks.first_meeting + count_in_request(c.params, rows_state(c).chunk, kModules, module);
  if (c.thread == 0) come_to_meeting(c, module, number), rows_state(c).go_on(parts);
  if (c.warp() == 0) {
    warp_meets();
    const LinkWord* word = ranks.own.meetings + number % 2 * kRanks + c.lane();
    // The own rank first: a missing worker of this rank must not be blamed on a peer.
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

// Adds to eight values of a row the sum of all ranks' partials, or of all but this rank's.
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
// All folds after a module; after the last module also the sums that are still in flight.
__device__ __forceinline__ void fold_values(Consumer& c, int module, int row, int word, float (&value)[8]) {
  const int late = module == kModules - 1 ? kLateFolds : 0;
#pragma unroll 1
  for (int i = 0; i <= late; i++) {
    const RankStep& step = c.shared.steps[module + i];
    if (step.folds) add_send(c, step.folds, step.whole, row, word, value);
  }
}
// The folds of the module before the current part. `combine_rows` has already folded the head's input where lanes differ.
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

// Sends a row of the rank's final residual, its share of the head's input. A warp has the row.
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
    scale = inverse_root(warp_sum(squares) / kWidth + kNormEps) / kRanks;  // includes the division of the mean
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

// Combines the lanes' residuals into the head's input, in every rank: for the last row, or for all rows where all logits
// are requested.
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

// After `output` or `down`, which left several pieces of k, or one piece that has been sent already.
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

// A mean is of normalised values and needs no norm before the head.
__device__ __forceinline__ void pack_rows(Consumer& c) {
  for_each_word(c, 0, [&](int row, int word) {
    float value[8];
    load_row_values(residual_values(c.params, row, word), value);
    c.params.rows.normed[block_word(row, word, kWidthBlocks)] = pack8(value);
  });
}

}  // namespace monotape
