// The sampler's steps, in the order of the reference: bias, penalties, banned ids, temperature, filters, draw.
//
// For any team, as select.h is. Every operation is rounded on its own, as the reference has it.
#pragma once
#include "philox.h"
#include "sampling.h"
#include "select.h"

namespace monotape {

// At the start of a request with penalties: ids of the prompt have been seen, none has been chosen.
template <class Team>
__device__ __forceinline__ bool begin_counts(Team& t, const Sampling& s, const int* prompt, int length) {
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) s.counts[id] = 0;
  if (!t.meet()) return false;
#pragma unroll 1
  for (int i = t.thread; i < length; i += kConsumers)
    if (prompt[i] >= t.first && prompt[i] < t.end) s.counts[prompt[i]] = kInPrompt;
  return t.meet();
}

__device__ __forceinline__ bool adjusts(const Sampling& s, int produced) {
  return s.bias_count || s.counts || s.temperature > 0 || produced < s.min_tokens;
}

__device__ __forceinline__ float penalised(const Sampling& s, float value, uint32_t count) {
  if (count && s.repetition_penalty != 1)
    value = value > 0 ? __fdiv_rn(value, s.repetition_penalty) : __fmul_rn(value, s.repetition_penalty);
  const uint32_t said = count & ~kInPrompt;
  if (said) {
    value = __fsub_rn(value, s.presence_penalty);
    value = __fsub_rn(value, __fmul_rn(s.frequency_penalty, static_cast<float>(said)));
  }
  return value;
}

// Fills s.adjusted where this worker's ids are. Not called when there is nothing to adjust.
template <class Team>
__device__ __forceinline__ bool adjust(Team& t, const Sampling& s, const float* logits, const int* stop_ids,
                                       int stop_count, int produced) {
  if (s.bias_count) {
#pragma unroll 1
    for (int id = t.first + t.thread; id < t.end; id += kConsumers) s.adjusted[id] = logits[id];
    if (!t.meet()) return false;
#pragma unroll 1
    for (int i = t.thread; i < s.bias_count; i += kConsumers) {
      const int id = s.bias_ids[i];
      if (id < t.first || id >= t.end || (i > 0 && s.bias_ids[i - 1] == id)) continue;
      float value = s.adjusted[id];  // the first of a run of equal ids adds all of them, in order
      for (int j = i; j < s.bias_count && s.bias_ids[j] == id; j++) value += s.bias_values[j];
      s.adjusted[id] = value;
    }
    if (!t.meet()) return false;
  }
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    float value = s.bias_count ? s.adjusted[id] : logits[id];
    if (s.counts) value = penalised(s, value, s.counts[id]);
    s.adjusted[id] = s.temperature > 0 ? __fdiv_rn(value, s.temperature) : value;
  }
  if (produced < s.min_tokens) {
    if (!t.meet()) return false;
#pragma unroll 1
    for (int i = t.thread; i < stop_count; i += kConsumers)
      if (stop_ids[i] >= t.first && stop_ids[i] < t.end) s.adjusted[stop_ids[i]] = -infinity();
  }
  return t.meet();
}

// Finds the cut of the filters. `noisy` becomes false when the best is not finite: then it is all there is.
template <class Team>
__device__ __forceinline__ bool filter(Team& t, const Sampling& s, const float* values, uint64_t& cut, bool& noisy) {
  Peak peak;
  if (!find_peak(t, values, peak)) return false;
  const float best = value_of(peak.best);
  noisy = best > -infinity() && best < infinity();
  if (!noisy) return true;
  const uint64_t floor = s.has_min_p ? ordered(__fadd_rn(best, s.log_min_p)) : kAlive;
  return find_cut(t, values, peak, floor, s.top_k, s.top_p, cut);
}

// This thread's best token, as a key: the winner is the best of everybody's. `values` are adjusted.
template <class Team>
__device__ __forceinline__ bool pick(Team& t, const Sampling& s, const float* values, int position, uint64_t& mine) {
  uint64_t cut = 0;
  bool noisy = s.temperature > 0;
  if (noisy && (s.top_k || s.top_p < 1 || s.has_min_p) && !filter(t, s, values, cut, noisy)) return false;
  mine = key_of(-infinity(), 0x7fffffff);
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    uint64_t key = key_of(values[id], id);
    if (key < cut) continue;
    if (noisy) key = key_of(__fadd_rn(values[id], gumbel(token_word(s.seed, id, position))), id);
    if (key > mine) mine = key;
  }
  return true;
}

}  // namespace monotape
