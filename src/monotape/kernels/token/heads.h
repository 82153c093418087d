// One head's vector in a warp: normalised where the model does, rotated, and packed as the tensor cores want it. Several
// heads (or rows of one head) go side by side: head_row(lane) says which, and the four lanes of each hold its words in turn,
// word 4 * b + head_column(lane) of block b.
#pragma once
#include "token/kv.h"

namespace monotape {

constexpr int kRopeHalf = kRopeDims / 2, kRopeHalfWords = kRopeHalf / 8;

struct Head {
  uint4 block[kHeadBlocks];
};

// The words that a lane needs: its own, and the partners with which rotation pairs them.
struct HeadWords {
  static constexpr int own = kHeadBlocks;
  // Partners in the same lane are not loaded twice.
  static constexpr bool partners_at_hand = kRopeHalfWords % 4 == 0;
  static constexpr int count = partners_at_hand ? own : 2 * own;

  static __device__ __forceinline__ int partner(int word) {
    return word < kRopeHalfWords ? word + kRopeHalfWords : word < 2 * kRopeHalfWords ? word - kRopeHalfWords : word;
  }
  // Where a lane has the partner of its word b.
  static __device__ constexpr int place_of_partner(int b) {
    if (!partners_at_hand) return own + b;
    return 4 * b < kRopeHalfWords ? (b + kRopeHalfWords / 4) % own : 4 * b < 2 * kRopeHalfWords ? b - kRopeHalfWords / 4 : b;
  }
  // Numbers of the words within the head; -1 past its end.
  static __device__ __forceinline__ void numbers(int column, int (&word)[count]) {
#pragma unroll
    for (int b = 0; b < own; b++) {
      word[b] = 4 * b + column < kHeadWords ? 4 * b + column : -1;
      if constexpr (!partners_at_hand) word[own + b] = word[b] < 0 ? -1 : partner(word[b]);
    }
  }
};

// The rotation of each pair of values at a position.
struct Angles {
  const float *cosines, *sines;
};
__device__ __forceinline__ Angles angles_of(const Params& params, int position) {
  const int64_t at = static_cast<int64_t>(position) * kRopeHalf;
  return {params.cosines + at, params.sines + at};
}

// The norm's gains of a lane's words. Loaded early, because they come from the L2.
struct HeadGains {
  float word[kQkNorm ? HeadWords::count : 1][8];
};
// The gain of the norm of keys, or of queries, of a layer.
__device__ __forceinline__ const float* head_gain(const Params& params, bool key, int layer) {
  if constexpr (kQkNorm) return params.vectors[kQNorm + key] + layer * kHeadDim;
  return nullptr;
}
__device__ __forceinline__ HeadGains read_head_gains(const float* gain, int column) {
  HeadGains gains = {};
  if constexpr (kQkNorm) {
    int number[HeadWords::count];
    HeadWords::numbers(column, number);
#pragma unroll
    for (int i = 0; i < HeadWords::count; i++)
      if (number[i] >= 0) load8(gain + number[i] * 8, gains.word[i]);
  }
  return gains;
}

// From raw words to the finished head.
__device__ __forceinline__ Head finish_head(const uint4 (&word)[HeadWords::count], int column, const HeadGains& gains,
                                            Angles angles, float scale) {
  constexpr int own = HeadWords::own;
  float inverse = 1;
  if constexpr (kQkNorm) {
    float squares = 0;
#pragma unroll
    for (int b = 0; b < own; b++) {
      float value[8];
      unpack8(word[b], value);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += value[i] * value[i];
    }
    inverse = inverse_root(sum_of_head(squares) / kHeadDim + kNormEps);
  }
  Head head;
#pragma unroll
  for (int b = 0; b < own; b++) {
    const int number = 4 * b + column;
    const int partner = HeadWords::place_of_partner(b);
    float value[8], other[8];
    unpack8(word[b], value);
    unpack8(word[partner], other);
    const bool rotates = number < 2 * kRopeHalfWords, first = number < kRopeHalfWords;
    float cosine[8], sine[8];
    load8(angles.cosines + (rotates ? (first ? number : number - kRopeHalfWords) * 8 : 0), cosine);
    load8(angles.sines + (rotates ? (first ? number : number - kRopeHalfWords) * 8 : 0), sine);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float mine = value[i], theirs = other[i];
      if constexpr (kQkNorm)
        mine *= inverse * gains.word[b][i], theirs *= inverse * gains.word[partner][i];
      if (rotates) mine = mine * cosine[i] + (first ? -theirs : theirs) * sine[i];
      value[i] = mine * scale;
    }
    head.block[b] = pack8(value);
  }
  return head;
}

}  // namespace monotape
