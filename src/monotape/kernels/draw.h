// The kernel's own part of sampling: a token that is not simply the best is drawn, and its log-probabilities told.
#pragma once
#include "logprobs.h"
#include "sample.h"
#include "sampler.h"
#include "team.h"

namespace monotape {

// Log-probabilities of the most likely tokens; worker 0 tells the host. The chosen one's follows when it is known.
__device__ __forceinline__ bool tell_most_likely(Team& t, const Sampling& s, const float* logits, int produced) {
  double log_sum;
  Peak peak;
  if (!find_log_sum(t, logits, log_sum, peak)) return false;
  Ranked mine = {-1, 0, 0};
  if (s.top_logprobs > 0 && !find_most_likely(t, logits, peak, s.top_logprobs, mine)) return false;
  if (blockIdx.x == 0 && mine.rank >= 0) {
    const int64_t at = static_cast<int64_t>(produced) * s.top_logprobs + mine.rank;
    store_to_host(&s.top_ids[at], mine.id);
    store_to_host(&s.top_values[at], static_cast<float>(mine.value - log_sum));
  }
  if (t.thread == 0) t.scratch().log_sum = log_sum;
  return true;
}

// Chooses token number `produced` of the output, which will be at `position`.
__device__ __forceinline__ bool draw(Consumer& c, const Sampling& s, SelectScratch& scratch, SamplerState& state, uint4* words,
                                     int position, int produced) {
  c.begin(Stage::sample, kLayers);
  Team team(c, scratch, state, words);
  const float* values = c.params.logits;
  if (adjusts(s, produced)) {
    if (!adjust(team, s, values, c.params.stop_ids, c.params.stop_count, produced)) return false;
    values = s.adjusted;
  }
  c.trace.arrived();
  const bool reports = s.top_logprobs >= 0;
  if (reports && !tell_most_likely(team, s, c.params.logits, produced)) return false;
  uint64_t mine;
  if (!pick(team, s, values, position, mine)) return false;
  float* chosen_logit = reinterpret_cast<float*>(&scratch.found);
  if (!elect(c, {value_of(mine), id_of(mine)}, reports ? chosen_logit : nullptr)) return false;
  const int token = c.shared.next_token;
  if (c.thread == 0 && s.counts && token >= team.first && token < team.end) s.counts[token]++;
  if (c.thread == 0 && blockIdx.x == 0 && reports && token >= 0)
    store_to_host(&s.logprobs[produced], static_cast<float>(*chosen_logit - scratch.log_sum));
  c.trace.end();
  return true;
}

// Once a request, before its first token is chosen.
__device__ __forceinline__ bool begin_drawing(Consumer& c, const Sampling& s, SelectScratch& scratch, SamplerState& state,
                                              uint4* words) {
  Team team(c, scratch, state, words);
  return !s.counts || begin_counts(team, s, c.params.prompt, c.params.prompt_length);
}

}  // namespace monotape
