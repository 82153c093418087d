// The sampler's steps, in the order of the reference: bias, penalties, banned ids, temperature, filters, draw.
//
// For any team, as sampling/cut.h is. Every operation is rounded on its own, as the reference has it.
#pragma once
#include "sampling/philox.h"
#include "sampling/settings.h"
#include "sampling/cut.h"

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
  return s.masks || s.bias_count || s.counts || s.temperature > 0 || produced < s.min_tokens;
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
  each_own(t, s.bias_count ? s.adjusted : logits, [&](int id, float value) {
    if (s.counts) value = penalised(s, value, s.counts[id]);
    s.adjusted[id] = s.temperature > 0 ? __fdiv_rn(value, s.temperature) : value;
  });
  if (produced < s.min_tokens) {
    if (!t.meet()) return false;
#pragma unroll 1
    for (int i = t.thread; i < stop_count; i += kConsumers)
      if (stop_ids[i] >= t.first && stop_ids[i] < t.end) s.adjusted[stop_ids[i]] = -infinity();
  }
  return t.meet();
}

// A token's value plus noise: the largest is drawn.
__device__ __forceinline__ uint64_t lot(const Sampling& s, float value, int id, int position) {
  return key_of(__fadd_rn(value, gumbel(token_word(s.seed, id, position))), id);
}

// The best of all candidates, computed by threads without a candidate of their own, unless there are too many.
template <class Team>
__device__ __forceinline__ void cast_lots(Team& t, const Sampling& s, int candidates, int position) {
  const int mine = (t.thread + kCandidates / 2) % kCandidates;
  if (mine >= candidates) return;
  const uint64_t key = t.scratch().candidate[mine].key;
  t.scratch().lot[mine] = lot(s, value_of(key), id_of(key), position);
}

struct Filtered {
  uint64_t cut = 0;      // tokens whose key is at least that can be drawn
  bool noisy = false;    // false: the best is taken, because greedy was requested or its value is not finite
  double log_sum = 0;    // log of the sum of all weights
  uint64_t winner = 0;   // the drawn token's noisy value, if every worker has gathered all survivors
};

// Selects tokens up to three times, by the same code: the most likely ones of the raw logits, then those that top-k
// keeps, then those that top-p keeps. tell(rank, id, value, log_sum) is called for each of the most likely tokens, in some
// thread of every worker.
template <class Team, class Tell>
__device__ __forceinline__ bool filter(Team& t, const Sampling& s, const float* logits, const float* values, int position,
                                       Filtered& left, Tell tell) {
  bool filtered = left.noisy && (s.top_k || s.top_p < 1 || s.has_min_p);
  Peak peak = {0, 0, 0, 0};
#pragma unroll 1
  for (int phase = 0; phase < 3; phase++) {
    const bool ranking = phase == 0, by_mass = phase == 2;
    if (ranking ? s.top_logprobs < 0 : !filtered) continue;
    const float* from = ranking ? logits : values;
    if (!by_mass && !survey(t, from, ranking, peak)) return false;
    const float best = value_of(peak.best);
    const bool finite = best > -infinity() && best < infinity();
    if (ranking) left.log_sum = best + log(peak.sum);
    if (phase == 1) {
      left.noisy = filtered = finite;
      const uint64_t floor = s.has_min_p ? ordered(__fadd_rn(best, s.log_min_p)) : kAlive, bottom = ordered(peak.least);
      left.cut = finite ? floor > bottom ? floor : bottom : 0;
    }
    const int count = ranking ? s.top_logprobs : by_mass ? 0 : s.top_k;
    if (!finite || (by_mass ? s.top_p >= 1 : !count)) continue;
    const uint64_t bound = count ? best_worker(t, peak.largest_of_worker, count) : 0, bottom = ranking ? kAlive : left.cut;
    Range range = {bound > bottom ? bound : bottom, peak.best + 1, 0, 0, 0};
    Goal goal = {static_cast<uint32_t>(count), s.top_p, 0};
    const Search result = search(t, from, best, range, goal, ranking, bound >= bottom);
    if (result == Search::failed) return false;
    if (result == Search::no_cut) {
      left.cut = range.low;
      continue;
    }
    const bool real = t.thread < static_cast<int>(range.inside), whole = range.above == 0;
    if (whole && !ranking) cast_lots(t, s, static_cast<int>(range.inside), position);
    const Standing mine = standing(t.scratch(), range, t.thread);
    bool kept = real && (by_mass ? mine.mass_before < goal.target : mine.rank < goal.count);
    if (ranking) {
      if (kept) tell(static_cast<int>(mine.rank), id_of(mine.key), value_of(mine.key), left.log_sum);
      if (!t.meet()) return false;
      continue;
    }
    if (!by_mass && whole) {  // all survivors of top-k are here, for top-p
      const uint64_t total = t.sum(kept ? t.scratch().candidate[t.thread].mass : 0);
      kept = kept && (s.top_p >= 1 || mine.mass_before < share_of_mass(s.top_p, total));
      filtered = false;
    }
    uint64_t end[2] = {kept ? ~mine.key : 0, 0};
    if (by_mass && whole && !t.meet()) return false;  // all noise is drawn; the sum was a barrier too
    if (whole && kept) end[1] = t.scratch().lot[t.thread];
    t.largest(end);
    left.cut = ~end[0], left.winner = end[1];
  }
  return t.meet();
}

// This thread's best token, as a key: the winner is the best over all threads of all workers.
template <class Team>
__device__ __forceinline__ uint64_t pick(const Team& t, const Sampling& s, const float* values, const Filtered& left,
                                         int position) {
  uint64_t mine = key_of(-infinity(), 0x7fffffff);
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    uint64_t key = key_of(values[id], id);
    if (key < left.cut) continue;
    if (left.noisy) key = lot(s, values[id], id, position);
    if (key > mine) mine = key;
  }
  return mine;
}

}  // namespace monotape
