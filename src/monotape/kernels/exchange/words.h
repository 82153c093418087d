// The exchange: small buffers through which stages pass activations. A word is either "not yet" (all ones) or the value,
// and readers poll it. No counters, no barriers.
//
// Each buffer has two copies, for even and odd turns, and every word of a copy is published in its turn. The owner of a
// word publishes it and resets it: after its last reader, and before the copy is polled again two turns later.
// exchange/janitor.h has the argument.
// A genuine NaN never looks like "not yet": conversions give 0x7fff or 0x7fffffff.
#pragma once
#include "worker/ring.h"

namespace monotape {

__device__ __forceinline__ uint4 not_yet() { return make_uint4(~0u, ~0u, ~0u, ~0u); }
// All four parts: the memory model does not promise that a 16-byte store becomes visible at once.
__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u;
}

// The copy of a buffer that a turn uses.
template <Buffer B>
__device__ __forceinline__ uint4* words_of(Exchange& exchange, int turn) {
  constexpr BufferRow kRow = buffer_row(static_cast<int>(B));
  return MONOTAPE_UNIFORM(exchange.words + kRow.start + turn % kRow.copies * kRow.stride);
}
template <Buffer B>
__device__ __forceinline__ void publish(Exchange& exchange, int turn, int word, uint4 value) {
  store_word(words_of<B>(exchange, turn) + word, value);
}

// A poll that ends: with the word, or when the watchdog (worker/clerk.h) has failed the request. A long wait records the
// word that it waits for; nothing else of the watchdog is on the path of a token.
class Patience {
 public:
  __device__ Patience(Shared& shared, bool& lost, Stage stage, int layer)
      : shared_(shared), lost_(lost), stage_(stage), layer_(layer) {}

  // Whether the words were not there at once.
  __device__ __forceinline__ bool was_early() const { return rounds_ > 0; }

  // Called in each round of polling; false when the request has failed. `word` is still missing.
  __device__ __forceinline__ bool more(int word) {
    if ((++rounds_ & 1023) != 0) return true;
    shared_.awaited_stage = static_cast<int>(stage_), shared_.awaited_layer = layer_, shared_.awaited_word = word;
    shared_.awaited_progress = shared_.progress;
    lost_ = shared_.failed;
    return !lost_;
  }

 private:
  Shared& shared_;
  bool& lost_;  // of the thread that waits
  Stage stage_;
  int layer_;
  int rounds_ = 0;
};

// Polls several words, every missing one in each round, until all have arrived. A negative index is a zero word.
template <int Count>
__device__ __forceinline__ void poll(const uint4* buffer, const int (&index)[Count], uint4 (&word)[Count],
                                     Patience& patience) {
#pragma unroll
  for (int i = 0; i < Count; i++) word[i] = index[i] >= 0 ? load_word(buffer + index[i]) : make_uint4(0, 0, 0, 0);
  if constexpr (Count == 1) {  // short, because all that follows waits for the round that finds the word
    while (!arrived(word[0]) && patience.more(index[0])) word[0] = load_word(buffer + index[0]);
    return;
  }
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < Count; i++)
      if (!arrived(word[i])) {
        missing = index[i];
        word[i] = load_word(buffer + index[i]);
      }
    if (missing < 0 || !patience.more(missing)) return;
  }
}

// When a warp first looks for the words of a stage. A look that comes too early takes the way to the L2 and back once more. In every
// layer the words of a stage come about as long after those of the stage before, so each warp learns how long to wait: longer
// after a look that came too early, a little less after one that did not. No value depends on it. Warps do not learn where registers
// are short.
struct FirstLook {
  static constexpr int kFirst = 100, kMost = 600, kLater = 32, kSooner = 8;  // ticks
  static constexpr bool kLearns = !kShortOfRegisters;

  static __device__ __forceinline__ void wait(const Shared& shared, Stage stage, int warp) {
    if (kLearns && stage != Stage::head) wait_ticks(shared.first_look[static_cast<int>(stage)][warp]);
  }
  // All lanes, when the stage's words are out.
  static __device__ __forceinline__ void learn(Shared& shared, Stage stage, int warp, int lane, bool early) {
    if (!kLearns || stage == Stage::head) return;
    uint16_t& ticks = shared.first_look[static_cast<int>(stage)][warp];
    const int before = ticks, after = most_of_lanes(early) ? smaller(before + kLater, kMost) : larger(before - kSooner, 0);
    if (lane == 0) ticks = static_cast<uint16_t>(after);
  }
};

// A NaN is about to be published: the first place in this worker is kept for the watchdog.
__device__ __forceinline__ void report_nan(Shared& shared, Stage stage, int layer) {
  if (shared.nan_place < 0) shared.nan_place = layer * kTracedStages + static_cast<int>(stage);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int o = kLanes / 2; o; o >>= 1) value += lane_across(value, o);
  return value;
}

// Eight neighbouring lanes' values as one word, in the first of them.
__device__ __forceinline__ uint4 gather_word(float value) {
  const uint32_t pair = pack_pair(value, lane_above(value, 1));
  return make_uint4(pair, lane_above(pair, 2), lane_above(pair, 4), lane_above(pair, 6));
}

// In the 16-bit format of the stage's products; a compile-time constant where all stages share one.
__device__ __forceinline__ uint4 pack8_for(Stage stage, const float* v) {
  if constexpr (kOneHalf) return pack8(v);
  return takes_float16(stage) ? pack8<true>(v) : pack8<false>(v);
}

// silu(gate) * up, or as plan/gpu.py has it: Gate. A NaN stays one.
__device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (kPlainGate) return quotient(gate, 1 + exponential(-gate)) * up;
  gate = gate > kGateLimit ? kGateLimit : gate;
  up = up > kGateLimit ? kGateLimit : up < -kGateLimit ? -kGateLimit : up;
  return quotient(gate, 1 + exponential(-kGateAlpha * gate)) * (up + kGateShift);
}

}  // namespace monotape
