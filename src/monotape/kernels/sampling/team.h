// The workers of the kernel as a team that sampling/cut.h can work with: consumer threads, and words through the L2.
#pragma once
#include "worker/consumer.h"
#include "ranks/choice.h"
#include "sampling/cut.h"
#include "sampling/mask.h"
#ifdef MONOTAPE_DIE_COPIES
#include "exchange/dies.h"
#endif

namespace monotape {

// A reset in flight; `confirm` returns when a load has returned "not yet".
class Reset {
 public:
  __device__ __forceinline__ void begin(uint4* word) {
    at_ = word;
    store_word(at_, not_yet());
    seen_ = load_word(at_);
  }
  __device__ __forceinline__ void confirm(const Shared& shared, bool& lost) {
    while (at_ && (seen_.x & seen_.y & seen_.z & seen_.w) != ~0u && !lost) {
      lost = shared.failed;
      seen_ = load_word(at_);
    }
  }

 private:
  uint4* at_ = nullptr;
  uint4 seen_;
};

// In every exchange each worker publishes some words and reads those of all. Three slots are used in turn.
// 1. A worker that has polled all words of exchange s knows that all workers have published in s, and so have read s - 1.
// 2. It resets its own words of s - 1, whose slot is used again in s + 2.
// 3. The reset is confirmed by a load before it publishes in s + 1; between two tokens a fence before the head does that.
// 4. A worker polls s + 2 after it has polled s + 1, so after the reset.
class Team {
 public:
  int thread;
  const int first, end;

  __device__ __forceinline__ Team(Consumer& c, SelectScratch& scratch, SamplerState& state, uint4* words)
      : thread(c.thread),
        first(drawn_from(c)),
        end(drawn_until(c)),
        c_(c), scratch_(scratch), state_(state), words_(MONOTAPE_UNIFORM(words)), turn_(MONOTAPE_UNIFORM(state.turn)) {}

  __device__ __forceinline__ SelectScratch& scratch() { return scratch_; }
  __device__ __forceinline__ bool meet() {
    if constexpr (kFewRegisters) thread = opaque(thread);
    return c_.meet();
  }
  __device__ __forceinline__ bool wants_to_stop() const { return worker_number() == 0 && c_.shared.cancel; }
  __device__ __forceinline__ void add(uint32_t* counter, uint32_t n) { add_to_shared(counter, n); }

  template <class T>
  __device__ __forceinline__ T sum(T value) {
    const auto add = [](T a, T b) { return a + b; };
    T* parts = reinterpret_cast<T*>(scratch_.sums[flip()]);
    value = over_lanes(value, kLanes / 2, add);
    if (c_.lane() == 0) parts[c_.warp()] = value;
    meet();
    return over_lanes(parts[c_.lane() % kWarps], kWarps / 2, add);
  }
  template <int Count>
  __device__ __forceinline__ void largest(uint64_t (&value)[Count]) {
    const auto better = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    uint64_t* parts = scratch_.sums[flip()];
#pragma unroll
    for (int i = 0; i < Count; i++) {
      value[i] = over_lanes(value[i], kLanes / 2, better);
      if (c_.lane() == 0) parts[i * kWarps + c_.warp()] = value[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < Count; i++) value[i] = over_lanes(parts[i * kWarps + c_.lane() % kWarps], kWarps / 2, better);
  }
  __device__ __forceinline__ uint64_t largest(uint64_t value) {
    uint64_t all[1] = {value};
    largest(all);
    return all[0];
  }
  struct Scan {
    int before, total;
  };
  __device__ __forceinline__ Scan scan(int value) {
    int upto = value;
#pragma unroll 1
    for (int o = 1; o < kLanes; o <<= 1) {
      const int other = lane_below(upto, o);
      if (c_.lane() >= o) upto += other;
    }
    uint64_t* parts = scratch_.sums[flip()];
    if (c_.lane() == kLanes - 1) parts[c_.warp()] = upto;
    meet();
    const int warp = c_.lane() % kWarps;
    const uint64_t part = parts[warp], before = warp < c_.warp() ? part : 0;
    const uint64_t both = over_lanes(before << 32 | part, kWarps / 2, [](uint64_t a, uint64_t b) { return a + b; });
    return {upto - value + static_cast<int>(both >> 32), static_cast<int>(both)};
  }

  template <class WordAt>
  __device__ __forceinline__ void publish(int count, WordAt word_at) {
    if (c_.warp() != 0) return;
    taken_back_.confirm(c_.shared, c_.lost);
    warp_meets();
    uint4* mine = slot(turn_) + worker_number() * kSamplerWords;
#pragma unroll 1
    for (int i = c_.lane(); i < count; i += kLanes) store_word(mine + i, word_at(i));
    if (c_.lane() == 0) state_.written[turn_ % 3] = count;
    warp_meets();
  }
  template <int Count>
  __device__ __forceinline__ void collect(const int (&index)[Count], uint4 (&word)[Count]) {
    Patience patience(c_.shared, c_.lost, Stage::sample, kLayers);
#ifdef MONOTAPE_DIE_COPIES
    constexpr int kPiece = smaller(Count, 4);  // words that are polled together: for more, registers do not suffice
#pragma unroll
    for (int first = 0; first < Count; first += kPiece) {
      int some[kPiece];
      uint4 found[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; i++) some[i] = first + i < Count ? index[first + i] : -1;
      poll_on_die(slot(turn_), copy_of_sampler(c_, words_, turn_), some, found, patience, [&](int i) {
        return !SamplerCopy::has(some[i]) || brings_over(c_, kMatrixStages, SamplerCopy::place(some[i]));
      });
#pragma unroll
      for (int i = 0; i < kPiece; i++)
        if (first + i < Count) word[first + i] = found[i];
    }
#else
    poll(slot(turn_), index, word, patience);
#endif
  }
  // As sampling/mask.h has it; 0 if the request has failed. The host has a longer deadline than workers: see worker/clerk.h.
  __device__ __forceinline__ uint32_t hear(const uint64_t* mask, int index, uint32_t number) {
    for (;;) {
      const uint64_t word = load_from_host(mask + index);
      if (static_cast<uint32_t>(word) == number) return static_cast<uint32_t>(word >> 32);
      Shared& shared = c_.shared;
      shared.awaited_stage = static_cast<int>(Stage::sample), shared.awaited_layer = kLayers;
      shared.awaited_word = kHostWait | index;
      shared.awaited_progress = shared.progress;
      c_.lost = shared.failed;
      if (c_.lost) return 0;
      rest(kHostRestNs);
    }
  }
  __device__ __forceinline__ void heard() {
    if (thread == 0) c_.shared.progress = c_.shared.progress + 1;
  }
  __device__ __forceinline__ void end_turn() {
    if (c_.warp() == 0) {
      uint4* mine = slot(turn_ + 2) + worker_number() * kSamplerWords;  // the turn before this one
#pragma unroll 1
      for (int i = c_.lane(); i < state_.written[(turn_ + 2) % 3]; i += kLanes) {
        if (i >= kLanes) taken_back_.confirm(c_.shared, c_.lost);
        taken_back_.begin(mine + i);
      }
    }
    turn_++;
    if (thread == 0) state_.turn = turn_;  // for the next token's team; a barrier lies in between
  }

 private:
  // Reduces the values of 2 * `apart` lanes. A loop, although it is short: this code runs once per token, and shortening it
  // saved more time than its instructions take, most likely because they leave the instruction cache in between.
  template <class T, class Join>
  static __device__ __forceinline__ T over_lanes(T value, int apart, Join join) {
#pragma unroll 1
    for (; apart; apart >>= 1) value = join(value, lane_across(value, apart));
    return value;
  }
  // Two buffers in turn: a thread that is one barrier ahead does not overwrite values that others still read.
  __device__ __forceinline__ int flip() { return flip_ ^= 1; }
  __device__ __forceinline__ uint4* slot(int turn) { return words_ + turn % 3 * kWorkers * kSamplerWords; }

  Consumer& c_;
  SelectScratch& scratch_;
  SamplerState& state_;
  uint4* words_;
  int turn_, flip_ = 0;
  Reset taken_back_;
};

}  // namespace monotape
