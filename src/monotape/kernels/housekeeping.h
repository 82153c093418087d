// When published words are reset. A turn is a layer's pass; half of a buffer is used in even turns, half in odd ones.
//
// A thread may reset a word when it has seen another word that could only be made after everybody had read the first.
// - At `down` a thread has a word of the activation. Its maker had all words of `output`; their makers had everything
//   that was attended to; that was made of all of q, k and v; and those of all of the residual stream. So everybody has
//   read what qkv and attention published in this turn, and what the turn started from: all that is reset. (Not what
//   `output` published: other workers may still be on their way to `gate_up`.) In a token's first layer also what the
//   head of the token before started from.
// - At the next turn's `output` everybody has read what `output` published in the turn before, because the turn started
//   from what came of it; at the next turn's `gate_up`, the activation.
// Workers of small models may own no tiles of `down`; they reset at their first stage of the next turn.
// A word is polled again two turns later at the earliest, after its publisher has confirmed the reset and published
// other words since: nobody can take an old word for a new one.
#pragma once
#include "consumer.h"

namespace monotape {

__device__ __forceinline__ int part_word(int kv_head, int g, int split, int word) {
  return ((kv_head * kGroup + g) * kMaxSplits + split) * kPartialWords + word;
}

// A word of the exchange in even turns, and how far away the same word of odd turns is.
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

// Lists what this worker publishes in qkv and attention, and its part of what the turn starts from. It changes only with the number of splits. There
// are two lists, because the turn before may have been another token's.
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

// At the start of a token.
__device__ __forceinline__ void keep_lists(Consumer& c, int position) {
  const int splits = split_count(c.params, position), before = c.shared.list;
  const bool same = splits == c.shared.listed_splits;
  const int list = same ? before : before ^ 1;
  if (!same) list_own_words(c, list, splits);
  c.meet();  // everybody has looked
  if (c.thread == 0) c.shared.list_before = before, c.shared.list = list, c.shared.listed_splits = splits;
}

// Threads reset a word each: `extra` words from `first_extra` on, then those of a list. More words than threads are
// rare (few workers, or many heads): those are confirmed at once.
__device__ __forceinline__ Reset reset_words(Consumer& c, uint4* first_extra, int extra, int list, int listed, int turn,
                                             int threads) {
  Reset reset;
  if (c.shared.failed) return reset;  // leave everything as it is, for whoever looks for the cause
#pragma unroll 1
  for (int i = c.thread % threads; i < extra + listed; i += threads) {
    if (i >= threads) reset.confirm(c.shared, c.lost);
    reset.begin(i < extra ? first_extra + i : place_of(*c.params.exchange, c.shared.own_words[list][i - extra], turn));
  }
  return reset;
}

// At the first stage in a turn of a worker without tiles of `down`: its words of the turn before.
__device__ __forceinline__ Reset reset_turn_before(Consumer& c, int layer, int threads) {
  if (c.span(Stage::down).count) return Reset();
  const int list = layer == 0 ? c.shared.list_before : c.shared.list;
  return reset_words(c, nullptr, 0, list, c.shared.own_count[list], c.turn - 1, threads);
}

// What a matrix stage resets once it has its input.
__device__ __forceinline__ Reset resets_at(Consumer& c, Stage stage, int layer) {
  Exchange& exchange = *c.params.exchange;
  const bool late = stage == Stage::qkv && c.span(Stage::down).count == 0;
  const int list = late && layer == 0 ? c.shared.list_before : c.shared.list;
  uint4* extra = nullptr;
  int extras = 0, listed = 0;
  if (stage == Stage::down) {  // this turn's words
    extra = exchange.final_residual[(c.sample_turn() & 1) ^ 1] + c.span(Stage::down).first;
    extras = layer == 0 ? c.span(Stage::down).count : 0;
    listed = c.shared.own_count[list];
  } else if (stage == Stage::output) {  // what it published in the turn before
    extra = exchange.after_attention[(c.turn & 1) ^ 1] + c.span(Stage::output).first;
    extras = c.span(Stage::output).count;
  } else if (stage == Stage::gate_up) {  // the activation of the turn before
    extra = exchange.activation[(c.turn & 1) ^ 1] + c.span(Stage::gate_up).first / 2;
    extras = c.span(Stage::gate_up).count / 2;
  } else if (late) {
    listed = c.shared.own_count[list];
  }
  return reset_words(c, extra, extras, list, listed, late ? c.turn - 1 : c.turn, kConsumers);
}

}  // namespace monotape
