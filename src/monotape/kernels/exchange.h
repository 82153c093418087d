// The exchange: small buffers through which stages pass activations. A word is either "not yet" (all ones) or the
// value; who needs it polls it. No counters, no barriers.
//
// Each buffer exists twice, for even and odd turns, and every word of it is written in every turn. Whoever publishes a
// word resets it too: later, when everybody must have read it, and long before anybody polls it again two turns on.
// housekeeping.h says when that is.
// A real NaN never looks like "not yet": conversions make 0x7fff or 0x7fffffff of it.
#pragma once
#include "ring.h"

namespace monotape {

__device__ __forceinline__ uint4 not_yet() { return make_uint4(~0u, ~0u, ~0u, ~0u); }
// All four parts: nobody promises that 16 bytes arrive at once.
__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u;
}

template <int Words>
__device__ __forceinline__ void publish(uint4 (&buffer)[2][Words], int turn, int word, uint4 value) {
  store_word(&buffer[turn & 1][word], value);
}

// A wait that ends: by the word, or because the watchdog (see clerk.h) has called everything off. Who waits for long
// says what for; nothing else of the safety net is on the path of a token.
class Patience {
 public:
  __device__ Patience(Shared& shared, bool& lost, Stage stage, int layer)
      : shared_(shared), lost_(lost), stage_(stage), layer_(layer) {}

  // Called in each round of polling; false when it is time to give up. `word` is what is still missing.
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

// Polls several words at once, every missing one in each round, until all are there. A negative index is a zero word.
template <int Count>
__device__ __forceinline__ void poll(const uint4* buffer, const int (&index)[Count], uint4 (&word)[Count],
                                     Patience& patience) {
#pragma unroll
  for (int i = 0; i < Count; i++) word[i] = index[i] >= 0 ? load_word(buffer + index[i]) : make_uint4(0, 0, 0, 0);
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

// A NaN that is about to be published: the first place of this worker that saw one is kept, for the watchdog.
__device__ __forceinline__ void report_nan(Shared& shared, Stage stage, int layer) {
  if (shared.nan_place < 0) shared.nan_place = layer * kTracedStages + static_cast<int>(stage);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
  return value;
}

// Eight neighbouring lanes' values as one word, in the first of them.
__device__ __forceinline__ uint4 gather_word(float value) {
  const uint32_t pair = pack_pair(value, __shfl_down_sync(~0u, value, 1));
  return make_uint4(pair, __shfl_down_sync(~0u, pair, 2), __shfl_down_sync(~0u, pair, 4), __shfl_down_sync(~0u, pair, 6));
}

__device__ __forceinline__ void load8(const float* from, float (&out)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
__device__ __forceinline__ void unpack8(uint4 v, float* out) {
  const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = low_half(pair[i]), out[2 * i + 1] = high_half(pair[i]);
}
__device__ __forceinline__ uint4 pack8(const float* v) {
  return make_uint4(pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]), pack_pair(v[6], v[7]));
}

}  // namespace monotape
