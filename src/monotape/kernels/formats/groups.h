// Weights in groups along k that have scales: any codes (codes.h) with any scales (scales.h). The machine's header has a
// token's products of them.
#pragma once
#include "formats/codes.h"
#include "formats/integers.h"
#include "formats/scales.h"
#include MONOTAPE_GROUPS  // GroupProducts

namespace monotape {

template <class Codes, class Scales>
struct StoredGroups : GroupProducts<Codes, Scales> {
  static constexpr bool kFloat16 = false, kAsMultiplied = false, kGrouped = true, kShifts = Scales::kShifts;
  static constexpr int kSub = 4, kBlockBytes = Codes::kBytes + Scales::kBytes, kVectors = Codes::kVectors, kExtra = Codes::kExtra + Scales::kWords;
  static constexpr int kHalves = Scales::kHalves;
  static constexpr float kUp = two_to(64), kUpAgain = two_to(Codes::kExponent - 64);  // to the value, in two steps
  static_assert(!kShifts || Codes::kExponent == 133, "what is added to a group's values needs the sum of its inputs");

  // A lane's operand of a group, from memory.
  static __device__ __forceinline__ uint4 operand(const uint8_t* block, int lane, int group) {
    uint4 words[kVectors];
    uint32_t extra[larger(1, Codes::kExtra)];
    if constexpr (StoredGroups::kSides && kVectors == 2) {  // `group` may be no constant: a chosen one of two words would not be a register
      words[0] = words[1] = reinterpret_cast<const uint4*>(block)[group / 2 * kBlockLanes + lane];
      return Codes::operand(words, extra, group % 2);
    }
#pragma unroll
    for (int v = 0; v < kVectors; v++) words[v] = reinterpret_cast<const uint4*>(block)[v * kBlockLanes + lane];
    Codes::read_extra(block, lane, extra);
    return Codes::operand(words, extra, group);
  }
  static __device__ __forceinline__ float number(float operand, Factors factors) {
    return operand * kUp * kUpAgain * factors.scale + factors.shift;
  }
  static __device__ __forceinline__ Factors factors_of(const uint8_t* block, int lane, int group) {
    uint32_t words[larger(1, Scales::kWords)];
    const int slot = kHalves == 1 ? group : group % 2 * 2 + fragment_column(lane) / 2;
    Scales::read(block + Codes::kBytes, fragment_row(lane), slot, words);
    return Scales::factors(words, kHalves == 1 ? 0 : group / 2);
  }
  // Eight values of the lane's row in a group of 32, as numbers.
  static __device__ __forceinline__ void eight_values(const uint8_t* block, int lane, int group, float (&out)[8]) {
    unpack8<false>(operand(block, lane, group), out);
    const Factors factors = factors_of(block, lane, group);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = number(out[i], factors);
  }
  static __device__ __forceinline__ uint4 row_operand(const uint8_t* block, int lane, int group) {
    if constexpr (Scales::kBytes == 0 && !kShifts) {  // the value itself, which is a bf16
      const uint4 w = operand(block, lane, group);
      constexpr float kAll = two_to(Codes::kExponent);
      return make_uint4(scaled_pair(w.x, kAll), scaled_pair(w.y, kAll), scaled_pair(w.z, kAll), scaled_pair(w.w, kAll));
    } else {
      float value[8];
      eight_values(block, lane, group, value);
      return pack8<false>(value);
    }
  }
  static __device__ __forceinline__ void values(const uint8_t* block, int row, int k, float (&out)[8]) {
    eight_values(block, row * 4 + k % kBlockK / 8, k / kBlockK, out);
  }
  static __device__ __forceinline__ float value(const uint8_t* block, int row, int k) {
    const int lane = row * 4 + k % kBlockK / 8, pair = k / 2 % 4;
    const uint4 w = operand(block, lane, k / kBlockK);
    const uint32_t two = pair == 0 ? w.x : pair == 1 ? w.y : pair == 2 ? w.z : w.w;
    const Factors factors = factors_of(block, lane, k / kBlockK);
    return number(k % 2 ? high_half<false>(two) : low_half<false>(two), factors);
  }
};

}  // namespace monotape
