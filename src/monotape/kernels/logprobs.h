// Log-probabilities of the model itself: of raw logits, before penalties and temperature. For any team, as select.h is.
#pragma once
#include "select.h"

namespace monotape {

// The logarithm of the sum of all tokens' weights, and every worker's largest logit in the thread of its number.
template <class Team>
__device__ __forceinline__ bool find_log_sum(Team& t, const float* logits, double& log_sum, Peak& peak) {
  uint64_t best = key_of(-infinity(), 0x7fffffff);
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers) {
    const uint64_t key = key_of(logits[id], id);
    if (key > best) best = key;
  }
  best = t.largest(best);
  double sum = 0;
#pragma unroll 1
  for (int id = t.first + t.thread; id < t.end; id += kConsumers)
    sum += exp(static_cast<double>(logits[id]) - value_of(best));
  sum = t.sum(sum);
  t.publish(1, [&](int) {  // an even mantissa: no part is all ones
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(sum));
    return make_uint4(__float_as_uint(value_of(best)), id_of(best), static_cast<uint32_t>(bits) & ~1u,
                      static_cast<uint32_t>(bits >> 32) & 0x7fffffffu);
  });
  int index[1] = {t.thread < kWorkers ? t.thread * kSamplerWords : -1};
  uint4 word[1];
  t.collect(index, word);
  if (!t.meet()) return false;
  t.end_turn();
  const bool real = t.thread < kWorkers;
  const float largest = __uint_as_float(word[0].x);
  peak.largest_of_worker = real ? key_of(largest, word[0].y) : 0;
  peak.best = t.largest(peak.largest_of_worker);
  sum = __longlong_as_double(static_cast<int64_t>(static_cast<uint64_t>(word[0].w) << 32 | word[0].z));
  sum = t.sum(real && sum > 0 ? sum * exp(static_cast<double>(largest) - value_of(peak.best)) : 0.0);
  log_sum = value_of(peak.best) + log(sum);
  return true;
}

// This thread's place among the `count` most likely tokens, and the token; -1: none.
struct Ranked {
  int rank, id;
  float value;
};
template <class Team>
__device__ __forceinline__ bool find_most_likely(Team& t, const float* logits, const Peak& peak, int count, Ranked& mine) {
  mine.rank = -1;
  const float best = value_of(peak.best);
  if (!(best < infinity())) return true;
  const uint64_t bound = best_worker(t, peak.largest_of_worker, count);
  Range range = {bound > kAlive ? bound : kAlive, peak.best + 1, 0, 0, 0};
  Goal goal = {static_cast<uint32_t>(count), 1.0, 0};
  const Search result = search(t, logits, best, range, goal, true, bound >= kAlive);
  if (result == Search::failed) return false;
  const Standing place = standing(t.scratch(), range, t.thread);
  if (t.thread < static_cast<int>(range.inside) && place.rank < goal.count)
    mine = {static_cast<int>(place.rank), id_of(place.key), value_of(place.key)};
  return t.meet();
}

}  // namespace monotape
