// The janitor: one warp that resets published words, so that no token waits for the round trip of a reset.
//
// Words and turns. A turn is one pass of one layer. Every buffer has two copies, used in even and in odd turns; every word
// of a copy is published once in its turn. A word must be reset to "not yet" after its last reader and before the next
// poll of the same copy, two turns later. plan.h says at which stage each buffer is reset (ResetRow); plan/gpu_rules.py
// checks (1) for every plan.
//
// (1) No word is reset while a worker may still read it. Let S be the stage at which a worker resets, once it has at least
//     one word of its input, and let M be a matrix stage before S.
//     a. That word was made, stage by stage, from a word that some worker published at M after it had polled *all* input
//        words of M: a matrix multiplies its whole input. (Attention reads one head's words, so it is never M.)
//     b. Those words were published at the stage before M by all workers that take part in it, each after it had polled
//        its own input.
//     c. Only workers that take part in a stage read its input. So all readers of that stage's input, and of every earlier
//        stage's, are done.
//     A buffer may be reset at S if a matrix lies between its reader and S. In a dense layer the layer's input, qkv,
//     partials and attended are reset at `down` (M is `gate_up`), the output of `output` at the next turn's `output`, and
//     the activation at the next turn's `gate_up`. The head's input is reset at `down` of the next token's first layer.
//
// (2) No worker takes an old word for a new one. Let W own a word that it resets at stage S of turn t.
//     a. The janitor stores "not yet" and loads the word until the load returns "not yet". From then on no load of any
//        worker returns the old value, because all accesses go to the L2 and those to one address are coherent.
//     b. Before W publishes the output of a stage, its janitor has finished the resets of W's earlier stages
//        (`await_resets`, before a meeting; a lone unit's warp publishes without one, after its own lane 0 has awaited them).
//     c. The same copy is polled again two turns after the word was published. Between the reset and that poll the reader
//        has needed, directly or through other workers, a word that W published after (b): an element of the residual
//        stream, or an output of qkv and `gate_up` if W has no tiles of `output` and `down`. ARCHITECTURE.md has the chain for
//        every buffer. It uses that a worker with tiles of `down` has tiles of `output`: the residual has one owner.
//     (c) holds where every worker has tiles of the head, and of `down` or of both stages that read the residual stream. In
//     layers of other matrices it holds where every worker has tiles of the head and of the last stage.
//     In all other plans (kScattered) W also awaits the resets of the current stage before it publishes, which makes (c)
//     true for every word that W publishes. A worker without tiles of `down` resets at its first stage of the next turn.
#pragma once
#include "worker/consumer.h"

namespace monotape {

// The words of a stage's output that a worker owns: one a tile, one of a gate tile and its up tile, two of float32 values.
__device__ __forceinline__ int words_of_tiles(int tiles, Stage stage) {
  if constexpr (kExperts > 0)
    if (row_of(stage).epilogue == Epilogue::choice) return 2 * tiles;
  return row_of(stage).epilogue == Epilogue::gated ? tiles / 2 : tiles;
}
__device__ __forceinline__ int own_first(const Span& span, Stage stage) { return words_of_tiles(span.first, stage); }
__device__ __forceinline__ int own_count(const Span& span, Stage stage) { return words_of_tiles(span.count, stage); }

__device__ __forceinline__ int part_word(int kv_head, int g, int split, int word) {
  return ((kv_head * kGroup + g) * kMaxSplits + split) * kPartialWords + word;
}

// Words that are reset together are listed by their index in the first half of the exchange, the copies of even turns.
__device__ __forceinline__ uint4* place_of(Exchange& exchange, uint32_t word, int turn) {
  return MONOTAPE_UNIFORM(exchange.words) + word + (turn & 1) * kTurnWords;
}

// The list of words that this worker publishes and resets together. It changes only with the number of splits. There are
// two lists, because the janitor may still work on the token before.
//
// A pass of several rows has words for each of them. A worker owns the same words of every row, except what it combines
// (token/combine.h): the list has the former of the first row, then the latter, row by row.
class OwnWords {
 public:
  __device__ OwnWords(Consumer& c, int list, int splits) : c_(c), words_(c.shared.own_words[list]), splits_(splits) {}

  // counts[0]: words that each row has; counts[r]: with those that are combined of the first r rows.
  __device__ void add_all(int (&counts)[kRows == 1 ? 1 : kRows + 1]) {
    add_listed();
    if (c_.thread == 0) counts[0] = count_;
    if constexpr (kRows > 1)
      for (int row = 0; row < kRows; row++) {
        add_combined(buffer_row(static_cast<int>(Buffer::attended)), row);
        if (c_.thread == 0) counts[row + 1] = count_;
      }
  }

 private:
  template <int I = 0>
  __device__ void add_listed() {
    if constexpr (I < kResets) {
      constexpr ResetRow kReset = reset_row(I);
      constexpr BufferRow kBuffer = buffer_row(static_cast<int>(kReset.buffer));
      if constexpr (kReset.listed && kReset.buffer == Buffer::partials) add_parts(kBuffer);
      else if constexpr (kReset.listed && kReset.buffer == Buffer::attended) add_attended(kBuffer);
      else if constexpr (kReset.listed) add(kBuffer, own_first(c_.span(kBuffer.owner), kBuffer.owner), own_count(c_.span(kBuffer.owner), kBuffer.owner));
      add_listed<I + 1>();
    }
  }
  __device__ void add(BufferRow buffer, int first, int length) {
    for (int i = c_.thread; i < length; i += kConsumers)
      words_[count_ + i] = static_cast<uint32_t>(buffer.start + first + i);
    count_ += length;
  }
  __device__ void add_parts(BufferRow buffer) {
    const int kv_head = worker_number() % kKvHeads, split = worker_number() / kKvHeads;
    for (int g = 0; g < kGroup && splits_ > 1 && split < splits_; g++) add(buffer, part_word(kv_head, g, split, 0), kPartialWords);
  }
  __device__ void add_attended(BufferRow buffer) {
    const int kv_head = worker_number() % kKvHeads;
    if (splits_ == 1 && worker_number() / kKvHeads == 0) add(buffer, kv_head * kGroup * kHeadWords, kGroup * kHeadWords);
    if constexpr (kRows == 1) add_combined(buffer, 0);
  }
  __device__ void add_combined(BufferRow buffer, int row) {
    for (int task = kWorkers - 1 - worker_number(); splits_ > 1 && task < kRows * kHeads; task += kWorkers)
      if (task / kHeads == row) add(buffer, row * kRowWords + task % kHeads * kHeadWords, kHeadWords);
  }

  Consumer& c_;
  uint32_t* words_;
  int splits_, count_ = 0;
};

// At the start of a token.
__device__ __forceinline__ void keep_lists(Consumer& c, int position, int rows) {
  const int parity = c.token_step / kTokenSteps & 1, before = c.shared.list_of[parity ^ 1];
  const int splits = split_count(position);
  const bool same = splits == c.shared.listed_splits;
  const int list = same ? before : before ^ 1;
  if (!same) OwnWords(c, list, splits).add_all(c.shared.own_count[list]);
  c.meet();  // all threads have read list_of
  if (c.thread == 0) c.shared.list_of[parity] = list, c.shared.listed_splits = splits;
  if (kRows > 1 && c.thread == 0) c.shared.drafts.rows_of[c.token_step / kTokenSteps % 4] = rows;
}

__host__ __device__ constexpr Stage list_stage() {
  for (int i = 0; i < kResets; i++)
    if (reset_row(i).listed) return reset_row(i).at;
  return kLastStage;
}
constexpr Stage kListStage = list_stage();

class Janitor {
 public:
  __device__ Janitor(Shared& shared, const Params& params) : shared_(shared), params_(params) {}

  // A whole warp; one lane polls `pace`, which says which matrix has its input.
  __device__ void work() {
    for (int next = -1;;) {
      int now = 0;
      int ends = 0;
      if (lane_number() == 0)
        while (((now = shared_.pace) % 4 != kWorking || now / 4 < next) && !ends) {
          rest(100);
          ends = shared_.done;
        }
      if (lane_at(ends, 0)) return;
      const int step = lane_at(now, 0) / 4;
      fence_block();  // orders the lists before `pace`
      // Stages without tiles of this worker did not set `pace`: catch up with them.
      for (next = next < 0 ? step : next; next <= step; next++) sweep(next);
      warp_meets();
      if (lane_number() == 0) shared_.swept = step;
    }
  }

 private:
  // Resets the words that the table lists for this step's stage.
  __device__ void sweep(int step) {
    const int token = step / kTokenSteps, in_token = step % kTokenSteps;
    if (in_token == kTokenSteps - 1) return;
    sweep_each(stage_of(in_token), layer_of(in_token), token);
  }
  template <int I = 0>
  __device__ __forceinline__ void sweep_each(Stage stage, int layer, int token) {
    if constexpr (I < kResets) {
      constexpr ResetRow kReset = reset_row(I);
      constexpr BufferRow kBuffer = buffer_row(static_cast<int>(kReset.buffer));
      const int turn = kReset.first_layer ? token + kReset.turns : token * kLayers + layer + kReset.turns;
      if (!kReset.listed && stage == kReset.at && (!kReset.first_layer || layer == 0)) {
        const Span& span = shared_.spans[static_cast<int>(kBuffer.owner)];
        uint4* first = words_of<kReset.buffer>(*params_.exchange, turn) + own_first(span, kBuffer.owner);
        // Words of the turn before may be those of the pass before.
        reset_run(first, own_count(span, kBuffer.owner), larger(rows_of(token), rows_of(token - 1)));
      }
      if constexpr (I + 1 == kResets)
        if (stage == kListStage) reset_list(shared_.list_of[token & 1], token * kLayers + layer, rows_of(token));
      sweep_each<I + 1>(stage, layer, token);
    }
  }
  __device__ void reset_run(uint4* first, int count, int rows) {
    reset_rows(rows, count, [&](int i) { return first + i; });
  }
  __device__ void reset_list(int list, int turn, int rows) {
    const int each = shared_.own_count[list][0];
    const auto listed = [&](int i) { return place_of(*params_.exchange, shared_.own_words[list][i], turn); };
    reset_rows(rows, each, listed);
    if constexpr (kRows > 1) reset_each(shared_.own_count[list][rows] - each, [&](int i) { return listed(each + i); });
  }
  __device__ __forceinline__ int rows_of(int token) const {
    if constexpr (kRows == 1) return 1;
    return shared_.drafts.rows_of[token & 3];
  }
  // A load that returns "not yet" proves that the reset has reached the L2.
  template <class WordAt>
  __device__ __forceinline__ void reset_each(int count, WordAt word_at) {
    if (shared_.failed) return;  // leave all words as they are, for the report of the fault
    for (int i = lane_number(); i < count; i += kLanes) store_word(word_at(i), not_yet());
    for (int i = lane_number(); i < count; i += kLanes) {
      const uint4* word = word_at(i);
      for (uint4 seen = load_word(word); (seen.x & seen.y & seen.z & seen.w) != ~0u && !shared_.failed;) seen = load_word(word);
    }
  }

  // Words of every row of a pass. Loads of all rows are in flight together: not behind branches, where they would wait for each other.
  template <class WordAt>
  __device__ __forceinline__ void reset_rows(int rows, int count, WordAt word_at) {
    if (kRows == 1 || rows == 1) return reset_each(count, word_at);
    if (shared_.failed) return;
    for (int i = lane_number(); i < count; i += kLanes)
      for (int row = 0; row < rows; row++) store_word(word_at(i) + row * kRowWords, not_yet());
    for (int i = lane_number(); i < count; i += kLanes) {
      uint4 seen[kRows];
#pragma unroll
      for (int row = 0; row < kRows; row++) seen[row] = load_word(word_at(i) + smaller(row, rows - 1) * kRowWords);
#pragma unroll
      for (int row = 0; row < kRows; row++)
        while ((seen[row].x & seen[row].y & seen[row].z & seen[row].w) != ~0u && !shared_.failed) seen[row] = load_word(word_at(i) + smaller(row, rows - 1) * kRowWords);
    }
  }

  Shared& shared_;
  const Params& params_;
};

// Whether this worker resets a turn's words in the next turn's attention, because that is its first stage.
__device__ __forceinline__ bool resets_in_attention(const Consumer& c) {
  return c.span(kFirstStage).count == 0 && c.span(kLastStage).count == 0;
}

// The number of a matrix in the request.
__device__ __forceinline__ int step_of(const Consumer& c, Stage stage, int layer) {
  return c.token_step + layer * kLayerSteps + (stage == Stage::head ? 0 : static_cast<int>(stage));
}

// One thread waits for the resets that must be done before the worker publishes the output of this step. `swept` is an earlier
// look at how far the janitor is.
__device__ __forceinline__ void await_resets(Consumer& c, int step, int swept) {
  const int wanted = kScattered ? step : c.step_before;
  c.step_before = step;
  if (swept >= wanted) return;
  while (c.shared.swept < wanted && !c.lost) c.lost = c.shared.failed;
}

}  // namespace monotape
