// The exchange: small buffers through which stages pass activations. A word is either "not yet" (all ones) or the
// value; who needs it polls it. No counters, no barriers.
//
// Each buffer exists twice and is used in turn. Whoever will publish a word in one half resets the same word in the
// other half first, as soon as it has read its own input. That is safe: the input of a stage at layer l was written by
// workers that had read all words of the stage before, whose writers had read the stage before that, and so on round
// the layer; so everybody has long read the other half, which is from layer l - 1. A fence stands between the reset and
// the new word, so that who sees the new word cannot find the old one in the other half later; by then the reset has
// long arrived, and the fence costs little. A real NaN never looks like "not yet": conversions make 0x7fff (bf16) or
// 0x7fffffff (float) of it.
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
  if constexpr (kFenceResets) fence_device();
  store_word(&buffer[turn & 1][word], value);
}
template <int Words>
__device__ __forceinline__ void reset(uint4 (&buffer)[2][Words], int turn, int word) {
  store_word(&buffer[(turn & 1) ^ 1][word], not_yet());
}

// A wait that ends: by the word, by a fault somewhere else, or by the deadline.
class Patience {
 public:
  __device__ Patience(const Params& params, Shared& shared, Stage stage, int layer)
      : params_(params), shared_(shared), stage_(stage), layer_(layer) {}

  // Called in each round of polling; false when it is time to give up. `word` is what is still missing.
  __device__ bool more(int word) {
    if ((++rounds_ & 1023) != 0) return true;
    if (load_host_flag(reinterpret_cast<const uint32_t*>(&params_.status->finish)) >= static_cast<uint32_t>(Finish::numerical_fault))
      return fail();
    const int64_t now = clock_ns();
    if (start_ == 0) start_ = now;
    if (now - start_ < params_.deadline_ns) return true;
    if (atomicCAS_system(&params_.status->finish, 0, static_cast<int>(Finish::deadline_fault)) == 0) {
      params_.status->worker = blockIdx.x;
      params_.status->stage = static_cast<int>(stage_);
      params_.status->word = word;
      params_.status->layer = layer_;
      fence_host();
    }
    return fail();
  }

 private:
  __device__ bool fail() {
    shared_.failed = 1;
    return false;
  }

  const Params& params_;
  Shared& shared_;
  Stage stage_;
  int layer_;
  int rounds_ = 0;
  int64_t start_ = 0;
};

// Polls one word.
__device__ __forceinline__ uint4 wait_word(const uint4* word, int index, Patience& patience) {
  uint4 v = load_word(word + index);
  while (!arrived(v) && patience.more(index)) v = load_word(word + index);
  return v;
}

__device__ __forceinline__ uint4 pack_words(float a, float b, float c, float d, float e, float f, float g, float h) {
  return make_uint4(pack_pair(a, b), pack_pair(c, d), pack_pair(e, f), pack_pair(g, h));
}

// Eight neighbouring lanes' values as one word, in the first of them.
__device__ __forceinline__ uint4 gather_word(float value) {
  const uint32_t pair = pack_pair(value, __shfl_down_sync(~0u, value, 1));
  return make_uint4(pair, __shfl_down_sync(~0u, pair, 2), __shfl_down_sync(~0u, pair, 4), __shfl_down_sync(~0u, pair, 6));
}

}  // namespace monotape
