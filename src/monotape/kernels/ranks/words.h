// Communication between ranks, and their only way to communicate: each rank pushes words into the inbox of every peer.
//
// A word is 64 bits, stored and loaded at once: a value and the number of its send. A reader polls for that number. Numbers
// only grow, from one request to the next, so no word is ever reset and a NaN is a value. Every rank adds up partial sums
// for itself, in rank order: all get the same bits, however late a word comes.
//
// Memory order. All accesses are relaxed, at system scope.
// 1. The value shares its word with the number, so a reader that sees the number has the value.
// 2. Sends take turns in kSlots = 2 lag + 2 slots. Before a rank stores send k it has folded send k - 1 - lag of every peer,
//    and before a peer stored that one, it had folded all sends up to k - 2 - 2 lag. So the slot that send k overwrites,
//    that of send k - 2 - 2 lag, has been read.
// 3. 2 needs each store to come after the loads before it. An element of the residual has the same owner in every rank and
//    stage, and in that worker the same thread, so for each element this is the order within one thread.
// 4. In that thread the store is reached only by a branch on the values that the loads returned, and stores are not
//    speculated. (A release would instead wait for every access that the thread has in flight, a microsecond and more at
//    system scope.)
// 5. If a word were overwritten too early all the same, its number would not be the one that is polled for: the request
//    would end at the deadline, never with a wrong sum.
// Words of the head and of the choice use two slots, for even and odd tokens. A rank is never two tokens ahead of another:
// a token ends with a word from every rank, which its worker 0 sends when all workers of the rank have come so far.
#pragma once
#include "worker/consumer.h"

namespace monotape {

constexpr int kPeerWait = 1 << 30;  // flag of a wait for a peer; the peer is in bits 24 to 29, the word below

// Patience for a wait for another rank. It records its word in separate fields, because other warps of the worker wait
// at the same time for the result of this wait.
class LinkPatience {
 public:
  __device__ LinkPatience(Consumer& c, Stage stage, int layer) : c_(c), stage_(stage), layer_(layer) {}

  // Whether to record the wait now; called in each round of polling.
  __device__ __forceinline__ bool due() { return (++rounds_ & 1023) == 0; }
  // False: the request has failed.
  __device__ __forceinline__ bool say(int peer, int word) {
    Shared& shared = c_.shared;
    shared.owed_stage = static_cast<int>(stage_), shared.owed_layer = layer_;
    shared.owed_word = kPeerWait | peer << 24 | word;
    shared.owed_progress = shared.progress;
    c_.lost = shared.failed;
    return !c_.lost;
  }

 private:
  Consumer& c_;
  Stage stage_;
  int layer_;
  int rounds_ = 0;
};

__device__ __forceinline__ int first_id(const Params& params) {
  if constexpr (kRanks == 1) return 0;
  return params.ranks.first_id;
}

// Numbers of this token's words.
__device__ __forceinline__ uint32_t token_number(const Consumer& c) { return c.params.ranks.first_token + c.sample_turn(); }
__device__ __forceinline__ uint32_t send_number(const Consumer& c, int send) { return c.shared.first_send + send; }
// At the start of a token, before its threads meet.
__device__ __forceinline__ void count_sends(Consumer& c) {
  if (c.thread == 0) c.shared.first_send = c.params.ranks.first_send + c.sample_turn() * kSends;
}

__device__ __forceinline__ void push(LinkWord* at, uint32_t value, uint32_t number) {
  const uint64_t tag = static_cast<uint64_t>(number) << 32;
  if constexpr (kLinkDelay) store_links(at->part, tag | value, tag | static_cast<uint32_t>(clock_ns()));
  else store_link(at->part, tag | value);
}
__device__ __forceinline__ LinkWord peek(const LinkWord* at) {
  LinkWord word;
  if constexpr (kLinkDelay) load_links(at->part, word.part[0], word.part[kLinkParts - 1]);
  else word.part[0] = load_link(at->part);
  return word;
}
// With a link delay a word counts only that long after it was sent, by the GPU's global clock.
__device__ __forceinline__ bool is_here(const LinkWord& word, uint32_t number, const Ranks& ranks) {
  if (word.part[0] >> 32 != number) return false;
  if constexpr (!kLinkDelay) return true;
  const uint64_t sent = word.part[kLinkParts - 1];
  return sent >> 32 == number && static_cast<uint32_t>(clock_ns()) - static_cast<uint32_t>(sent) >= ranks.link_delay_ns;
}

// The words of all ranks that belong to one send, `stride` apart. Each round loads all of them, until those of the ranks in
// the bit mask `needed` have arrived: that takes fewer registers than remembering which have.
struct Arrivals {
  LinkWord word[kRanks];

  __device__ __forceinline__ bool look(const LinkWord* words, int stride, uint32_t number, const Ranks& ranks, uint32_t needed) {
#pragma unroll
    for (int from = 0; from < kRanks; from++) word[from] = peek(words + from * stride);
    return !missing(number, ranks, needed);
  }
  __device__ __forceinline__ void wait(const LinkWord* words, int stride, uint32_t number, const Ranks& ranks, uint32_t needed,
                                       int name, LinkPatience& patience) {
    while (!look(words, stride, number, ranks, needed))
      if (patience.due() && !patience.say(31 - leading_zeros(missing(number, ranks, needed) | 1), name)) return;
  }
  __device__ __forceinline__ float value(int from) const { return __uint_as_float(static_cast<uint32_t>(word[from].part[0])); }

 private:
  __device__ __forceinline__ uint32_t missing(uint32_t number, const Ranks& ranks, uint32_t needed) const {
    uint32_t found = 0;
#pragma unroll
    for (int from = 0; from < kRanks; from++) found |= static_cast<uint32_t>(is_here(word[from], number, ranks)) << from;
    return needed & ~found;
  }
};
constexpr uint32_t kAllRanks = (1u << kRanks) - 1;

// Polls one word of `peer`.
__device__ __forceinline__ uint32_t receive(const LinkWord* at, uint32_t number, const Ranks& ranks, int peer, int word,
                                            LinkPatience& patience) {
  LinkWord seen = peek(at);
  while (!is_here(seen, number, ranks)) {
    if (patience.due() && !patience.say(peer, word)) break;
    seen = peek(at);
  }
  return static_cast<uint32_t>(seen.part[0]);
}

__device__ __forceinline__ const LinkWord* sums_of(const Ranks& ranks, uint32_t number, int element) {
  return ranks.own.sums + number % kSlots * kRanks * kLinkWidth + element;
}
// The ranks whose words a fold needs. The own partial is in a register when it is folded at once, and is not part of a sum
// of the others.
__device__ __forceinline__ uint32_t needed(const RankStep& step, const Ranks& ranks) {
  return kKeepsOwn && step.whole && step.folds != step.sends ? kAllRanks : ranks.peers;
}
__device__ __forceinline__ float added_up(const Arrivals& found, const RankStep& step, const Ranks& ranks, float own) {
  float sum = 0;
#pragma unroll
  for (int from = 0; from < kRanks; from++) {
    float value = found.value(from);
    if (!(needed(step, ranks) >> from & 1)) value = step.whole ? own : 0;
    sum += value;
  }
  return sum;
}

// A sum of an earlier module has usually arrived when a stage begins: it is then taken while the stage waits for its input,
// and added at the stage's end all the same, so that no bits depend on when it came. The first element that a thread
// finishes is number `thread` of the worker's own (`own_tile` in token/matrix.h). The thread keeps the sum in shared memory,
// because no register is free meanwhile. All ones: not arrived. No sum has those bits.
__device__ __forceinline__ float not_there() { return __uint_as_float(~0u); }
__device__ __forceinline__ bool is_there(float sum) { return __float_as_uint(sum) != ~0u; }

__device__ __forceinline__ void look_early(Consumer& c, const RankStep& step) {
  const Span& owned = c.span(kResidualStage);
  if (!step.folds || step.folds == step.sends || c.thread >= smaller(owned.count, kBatchTiles) * kTileRows) return;
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = send_number(c, step.folds);
  Arrivals found;
  const LinkWord* words = sums_of(ranks, number, owned.first * kTileRows + c.thread);
  const bool there = found.look(words, kLinkWidth, number, ranks, needed(step, ranks));
  c.shared.early[c.thread] = there ? added_up(found, step, ranks, 0) : not_there();
}

__device__ __forceinline__ float fold(Consumer& c, Stage stage, int layer, const RankStep& step, int element, float own) {
  const Ranks& ranks = c.params.ranks;
  const uint32_t number = send_number(c, step.folds);
  Arrivals found;
  if (step.folds == step.sends) c.set_pace(kPolling);  // on the critical path: the poll must not queue behind pages
  LinkPatience patience(c, stage, layer);
  found.wait(sums_of(ranks, number, element), kLinkWidth, number, ranks, needed(step, ranks), element, patience);
  return added_up(found, step, ranks, own);
}

// The residual after a module, for element `own` of the worker: adds the rank's own share, sends the partial, and folds
// what the plan's step says.
__device__ __forceinline__ float settle(Consumer& c, Stage stage, int layer, int own, float residual, float partial) {
  const Ranks& ranks = c.params.ranks;
  const RankStep step = c.shared.steps[module_of(stage, layer)];  // all of it at once
  const int element = c.span(stage).first * kTileRows + own;
  if (step.sends) {
    const uint32_t number = send_number(c, step.sends);
    const int place = number % kSlots * kRanks * kLinkWidth + element;
#pragma unroll
    for (int to = 0; to < kRanks; to++)
      if (kKeepsOwn || (ranks.peers >> to & 1)) push(ranks.inbox[to].sums + place, __float_as_uint(partial), number);
  }
  if (step.own != 0) residual += step.own * partial;
  if (step.folds) {
    const bool looked = step.folds != step.sends && own < kBatchTiles * kTileRows;
    const float early = looked ? c.shared.early[own] : not_there();
    residual += is_there(early) ? early : fold(c, stage, layer, step, element, partial);
  }
  if (layer == kLayers - 1 && stage == kLastStage) {
#pragma unroll 1
    for (int late = 0; late < kLateFolds; late++)  // sums that are still in flight
      residual += fold(c, stage, layer, c.shared.steps[kModules + late], element, 0);
  }
  return residual;
}

}  // namespace monotape
