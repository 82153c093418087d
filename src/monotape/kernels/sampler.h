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

// Selects tokens up to three times, by the same code: the most likely ones of the raw logits, then those that top-k
// keeps, then those that top-p keeps. The cut is a key: tokens at and above it can be drawn. tell(rank, id, value, log of
// the sum of all weights) is called for each of the most likely tokens, in some thread of every worker; `log_sum` is
// that of all threads. `noisy` becomes false when the best value is not finite: then it is all there is.
template <class Team, class Tell>
__device__ __forceinline__ bool filter(Team& t, const Sampling& s, const float* logits, const float* values, uint64_t& cut,
                                       bool& noisy, double& log_sum, Tell tell) {
  bool filtered = noisy && (s.top_k || s.top_p < 1 || s.has_min_p);
  Peak peak = {0, 0, 0, 0};
#pragma unroll 1
  for (int phase = 0; phase < 3; phase++) {
    const bool ranking = phase == 0, by_mass = phase == 2;
    if (ranking ? s.top_logprobs < 0 : !filtered) continue;
    const float* from = ranking ? logits : values;
    if (!by_mass && !survey(t, from, ranking, peak)) return false;
    const float best = value_of(peak.best);
    const bool finite = best > -infinity() && best < infinity();
    if (ranking) log_sum = best + log(peak.sum);
    if (phase == 1) {
      noisy = filtered = finite;
      const uint64_t floor = s.has_min_p ? ordered(__fadd_rn(best, s.log_min_p)) : kAlive, bottom = ordered(peak.least);
      cut = finite ? floor > bottom ? floor : bottom : 0;
    }
    const int count = ranking ? s.top_logprobs : by_mass ? 0 : s.top_k;
    if (!finite || (by_mass ? s.top_p >= 1 : !count)) continue;
    const uint64_t bound = count ? best_worker(t, peak.largest_of_worker, count) : 0, bottom = ranking ? kAlive : cut;
    Range range = {bound > bottom ? bound : bottom, peak.best + 1, 0, 0, 0};
    Goal goal = {static_cast<uint32_t>(count), s.top_p, 0};
    const Search result = search(t, from, best, range, goal, ranking, bound >= bottom);
    if (result == Search::failed) return false;
    if (result == Search::no_cut) {
      cut = range.low;
      continue;
    }
    const Standing mine = standing(t.scratch(), range, t.thread);
    const bool real = t.thread < static_cast<int>(range.inside), whole = range.above == 0;
    bool kept = real && (by_mass ? mine.mass_before < goal.target : mine.rank < goal.count);
    if (ranking) {
      if (kept) tell(static_cast<int>(mine.rank), id_of(mine.key), value_of(mine.key), log_sum);
      if (!t.meet()) return false;
      continue;
    }
    if (!by_mass && whole) {  // all that is left for top-p is here
      const uint64_t total = t.sum(kept ? t.scratch().mass[t.thread] : 0);
      kept = kept && (s.top_p >= 1 || mine.mass_before < share_of_mass(s.top_p, total));
      filtered = false;
    }
    cut = ~t.largest(kept ? ~mine.key : 0);
  }
  return t.meet();
}

// This thread's best token, as a key: the winner is the best of everybody's.
template <class Team>
__device__ __forceinline__ uint64_t pick(const Team& t, const Sampling& s, const float* values, uint64_t cut, bool noisy,
                                         int position) {
  uint64_t mine = key_of(-infinity(), 0x7fffffff);
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    uint64_t key = key_of(values[id], id);
    if (key < cut) continue;
    if (noisy) key = key_of(__fadd_rn(values[id], gumbel(token_word(s.seed, id, position))), id);
    if (key > mine) mine = key;
  }
  return mine;
}

}  // namespace monotape
