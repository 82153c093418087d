// The workers of the kernel as a team that select.h can work with: consumer threads, and words through the L2.
#pragma once
#include "consumer.h"
#include "ranks_sample.h"
#include "select.h"

namespace monotape {

// A word on its way back to "not yet"; `confirm` returns when it is there, because a load gives it back.
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

// Everybody publishes some words in every turn and reads those of all. Three slots are used in turn. When a worker has
// seen all words of a turn, everybody has read those of the turn before; so it takes back its own of those. That has
// arrived before it publishes again (between two tokens a fence of the head's sees to it), and nobody polls that slot
// until then.
class Team {
 public:
  const int thread, first, end;

  __device__ __forceinline__ Team(Consumer& c, SelectScratch& scratch, SamplerState& state, uint4* words)
      : thread(c.thread),
        first(drawn_from(c)),
        end(drawn_until(c)),
        c_(c), scratch_(scratch), state_(state), words_(words), turn_(state.turn) {}

  __device__ __forceinline__ SelectScratch& scratch() { return scratch_; }
  __device__ __forceinline__ bool meet() { return c_.meet(); }
  __device__ __forceinline__ void add(uint32_t* counter, uint32_t n) { add_to_shared(counter, n); }

  template <class T>
  __device__ __forceinline__ T sum(T value) {
#pragma unroll
    for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
    T* parts = reinterpret_cast<T*>(scratch_.sums[flip()]);
    if (c_.lane() == 0) parts[c_.warp()] = value;
    meet();
    value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) value += parts[w];
    return value;
  }
  __device__ __forceinline__ uint64_t largest(uint64_t value) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const uint64_t other = __shfl_xor_sync(~0u, value, o);
      if (other > value) value = other;
    }
    uint64_t* parts = scratch_.sums[flip()];
    if (c_.lane() == 0) parts[c_.warp()] = value;
    meet();
#pragma unroll
    for (int w = 0; w < kWarps; w++)
      if (parts[w] > value) value = parts[w];
    return value;
  }
  struct Scan {
    int before, total;
  };
  __device__ __forceinline__ Scan scan(int value) {
    int upto = value;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(~0u, upto, o);
      if (c_.lane() >= o) upto += other;
    }
    uint64_t* parts = scratch_.sums[flip()];
    if (c_.lane() == 31) parts[c_.warp()] = upto;
    meet();
    Scan result = {upto - value, 0};
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      if (w < c_.warp()) result.before += static_cast<int>(parts[w]);
      result.total += static_cast<int>(parts[w]);
    }
    return result;
  }

  template <class WordAt>
  __device__ __forceinline__ void publish(int count, WordAt word_at) {
    if (c_.warp() != 0) return;
    taken_back_.confirm(c_.shared, c_.lost);
    __syncwarp();
    uint4* mine = slot(turn_) + blockIdx.x * kSamplerWords;
#pragma unroll 1
    for (int i = c_.lane(); i < count; i += 32) store_word(mine + i, word_at(i));
    if (c_.lane() == 0) state_.written[turn_ % 3] = count;
    __syncwarp();
  }
  template <int Count>
  __device__ __forceinline__ void collect(const int (&index)[Count], uint4 (&word)[Count]) {
    Patience patience(c_.shared, c_.lost, Stage::sample, kLayers);
    poll(slot(turn_), index, word, patience);
  }
  __device__ __forceinline__ void end_turn() {
    if (c_.warp() == 0) {
      uint4* mine = slot(turn_ + 2) + blockIdx.x * kSamplerWords;  // the turn before this one
#pragma unroll 1
      for (int i = c_.lane(); i < state_.written[(turn_ + 2) % 3]; i += 32) {
        if (i >= 32) taken_back_.confirm(c_.shared, c_.lost);
        taken_back_.begin(mine + i);
      }
    }
    turn_++;
    if (thread == 0) state_.turn = turn_;  // for the next token's team; there is a meeting in between
  }

 private:
  // Two buffers in turn: who is a meeting ahead does not overwrite what others still read.
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
