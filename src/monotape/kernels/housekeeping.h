// When published words are reset. A turn is a layer's pass; half of a buffer is used in even turns, half in odd ones.
//
// A word may be reset by a worker that has seen another word which could only be made after everybody had read the first.
// - At `down` it has a word of the activation. Its maker had all words of `output`; their makers had everything that was
//   attended to; that was made of all of q, k and v; and those of all of the residual stream. So everybody has read what
//   qkv and attention published in this turn, and what the turn started from: all that is reset. (Not what `output`
//   published: other workers may still be on their way to `gate_up`.) In a token's first layer also what the head of
//   the token before started from.
// - At the next turn's `output` everybody has read what `output` published in the turn before, because the turn started
//   from what came of it; at the next turn's `gate_up`, the activation.
// Workers of small models may own no tiles of `down`; they reset at their first stage of the next turn.
//
// A warp of its own, the janitor, does it: no token waits for the round trip. Before a worker publishes what a stage gave,
// the resets of earlier stages are done. Who polls a word again, two turns later at the earliest, has needed what its
// owner published at `output` or `down` since: nobody can take an old word for a new one. An owner without these stages
// has tiles of qkv and `gate_up`: what it reset at qkv is polled by who needed its part of the activation, or of what
// others made of it; what it reset at `gate_up`, by who needed what came of its part of q, k and v. So it is where every
// worker has tiles of the head, and of `down` or of both stages that read the residual stream. In all other plans
// (kScattered) a worker waits for a stage's own resets before it publishes what the stage gave.
#pragma once
#include "consumer.h"

namespace monotape {

__device__ __forceinline__ int part_word(int kv_head, int g, int split, int word) {
  return ((kv_head * kGroup + g) * kMaxSplits + split) * kPartialWords + word;
}

// Buffers of which a worker lists its words.
enum class Buffer : uint32_t { residual, qkv, partials, attended };
__device__ __forceinline__ uint4* place_of(Exchange& exchange, uint32_t entry, int turn) {
  const auto buffer = static_cast<Buffer>(entry >> 24);
  const int odd = turn & 1, word = entry & 0xffffff;
  uint4* start = buffer == Buffer::residual   ? exchange.residual[odd]
                 : buffer == Buffer::qkv      ? exchange.qkv[odd]
                 : buffer == Buffer::partials ? exchange.partials[odd]
                                              : exchange.attended[odd];
  return start + word;
}

// Lists what this worker publishes in qkv and attention, and its part of what the turn starts from. It changes only with
// the number of splits. There are two lists, because the janitor may still be at the token before.
__device__ inline void list_own_words(Consumer& c, int list, int splits) {
  uint32_t* words = c.shared.own_words[list];
  int count = 0;
  const auto add = [&](Buffer buffer, int first, int length) {
    for (int i = c.thread; i < length; i += kConsumers) words[count + i] = static_cast<uint32_t>(buffer) << 24 | (first + i);
    count += length;
  };
  add(Buffer::qkv, c.span(Stage::qkv).first, c.span(Stage::qkv).count);
  add(Buffer::residual, c.span(Stage::output).first, c.span(Stage::output).count);
  const int kv_head = blockIdx.x % kKvHeads, split = blockIdx.x / kKvHeads;
  if (splits == 1 && split == 0) add(Buffer::attended, kv_head * kGroup * kHeadWords, kGroup * kHeadWords);
  if (splits > 1) {
    for (int g = 0; g < kGroup && split < splits; g++) add(Buffer::partials, part_word(kv_head, g, split, 0), kPartialWords);
    for (int head = kWorkers - 1 - blockIdx.x; head < kHeads; head += kWorkers)
      add(Buffer::attended, head * kHeadWords, kHeadWords);
  }
  if (c.thread == 0) c.shared.own_count[list] = count;
}

// Matrices that a request has passed are counted: four a layer and the head, token after token.
constexpr int kTokenSteps = 4 * kLayers + 1;

// At the start of a token.
__device__ __forceinline__ void keep_lists(Consumer& c, int position) {
  const int parity = c.token_step / kTokenSteps & 1, before = c.shared.list_of[parity ^ 1];
  const int splits = split_count(c.params, position);
  const bool same = splits == c.shared.listed_splits;
  const int list = same ? before : before ^ 1;
  if (!same) list_own_words(c, list, splits);
  c.meet();  // everybody has looked
  if (c.thread == 0) c.shared.list_of[parity] = list, c.shared.listed_splits = splits;
}

class Janitor {
 public:
  __device__ Janitor(Shared& shared, const Params& params) : shared_(shared), params_(params) {}

  // A whole warp, of which one lane listens: `pace` says which matrix has its input.
  __device__ void work() {
    for (int next = -1;;) {
      int now = 0;
      bool ends = false;
      if (threadIdx.x % 32 == 0)
        while (((now = shared_.pace) % 4 != kWorking || now / 4 < next) && !ends) {
          rest(100);
          ends = shared_.done;
        }
      if (__shfl_sync(~0u, ends, 0)) return;
      const int step = __shfl_sync(~0u, now, 0) / 4;
      fence_block();  // lists were written before
      // Stages of which the worker has no tiles were passed unseen.
      for (next = next < 0 ? step : next; next <= step; next++) sweep(next);
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared_.swept = step;
    }
  }

 private:
  __device__ void sweep(int step) {
    Exchange& exchange = *params_.exchange;
    const int token = step / kTokenSteps, layer = step % kTokenSteps / 4, turn = (token * kLayers + layer) & 1;
    if (layer == kLayers) return;
    const auto span = [&](Stage stage) { return shared_.spans[static_cast<int>(stage)]; };
    const Stage stage = static_cast<Stage>(step % kTokenSteps % 4);
    if (stage == Stage::output)  // what it published in the turn before
      reset_run(exchange.after_attention[turn ^ 1] + span(Stage::output).first, span(Stage::output).count);
    if (stage == Stage::gate_up)  // the activation of the turn before
      reset_run(exchange.activation[turn ^ 1] + span(Stage::gate_up).first / 2, span(Stage::gate_up).count / 2);
    if (stage == Stage::down && layer == 0)
      reset_run(exchange.final_residual[(token & 1) ^ 1] + span(Stage::down).first, span(Stage::down).count);
    if (stage == Stage::down) reset_list(shared_.list_of[token & 1], turn);
  }
  __device__ void reset_run(uint4* first, int count) {
    reset_each(count, [&](int i) { return first + i; });
  }
  __device__ void reset_list(int list, int turn) {
    reset_each(shared_.own_count[list], [&](int i) { return place_of(*params_.exchange, shared_.own_words[list][i], turn); });
  }
  // A load that gives the reset back tells that it has arrived.
  template <class WordAt>
  __device__ __forceinline__ void reset_each(int count, WordAt word_at) {
    if (shared_.failed) return;  // leave everything as it is, for whoever looks for the cause
    for (int i = threadIdx.x % 32; i < count; i += 32) store_word(word_at(i), not_yet());
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const uint4* word = word_at(i);
      for (uint4 seen = load_word(word); (seen.x & seen.y & seen.z & seen.w) != ~0u && !shared_.failed;) seen = load_word(word);
    }
  }

  Shared& shared_;
  const Params& params_;
};

// Whether a worker's words of a turn are reset in the next turn's attention, because that is its first stage.
__device__ __forceinline__ bool resets_in_attention(const Consumer& c) {
  return c.span(Stage::qkv).count == 0 && c.span(Stage::down).count == 0;
}

// The number of a matrix in the request.
__device__ __forceinline__ int step_of(const Consumer& c, Stage stage, int layer) {
  return c.token_step + layer * 4 + static_cast<int>(stage) % 4;
}

// One thread waits until everything is reset that must be before the worker publishes what this step gave.
__device__ __forceinline__ void await_resets(Consumer& c, int step) {
  const int wanted = kScattered ? step : c.step_before;
  while (c.shared.swept < wanted && !c.lost) c.lost = c.shared.failed;
  c.step_before = step;
}

}  // namespace monotape
