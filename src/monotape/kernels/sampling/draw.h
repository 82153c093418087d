// The kernel's part of sampling: draws a token that is not simply the best, and reports its log-probabilities.
#pragma once
#include "sampling/elect.h"
#include "sampling/steps.h"
#include "sampling/team.h"

namespace monotape {

// The host's mask says that there is nothing to draw. All workers have heard the same.
__device__ __forceinline__ bool end_text(Consumer& c, bool cancelled) {
  if (c.thread == 0) c.shared.next_token = kTextComplete, c.shared.stopping = cancelled;
  return c.meet();
}

// Chooses token number `produced` of the output, which will be at `position`.
__device__ __forceinline__ bool draw(Consumer& c, const Sampling& s, SelectScratch& scratch, SamplerState& state, uint4* words,
                                     int position, int produced) {
  c.begin(Stage::sample, kLayers);
  c.set_pace(kPolling);  // words are polled all the time
  Team team(c, scratch, state, words);
  const float* values = c.logits();
  if constexpr (kRanks > 1) {
    collect_logits(c);
    if (!c.meet()) return false;
  }
  if (adjusts(s, produced)) {
    if (!adjust(team, s, values, c.params.stop_ids, c.params.stop_count, produced)) return false;
    values = s.adjusted;
  }
  if (s.masks) {
    if (!obey(team, s, position)) return false;
    if (scratch.verdict != static_cast<int>(Verdict::go_on)) return end_text(c, scratch.verdict != static_cast<int>(Verdict::complete));
  }
  c.trace.arrived();
  const bool reports = s.top_logprobs >= 0;
  Filtered left;
  left.noisy = s.temperature > 0;
  const auto tell = [&](int rank, int id, float value, double log_sum) {  // the chosen one's follows when it is known
    if (worker_number() != 0) return;
    const int64_t at = static_cast<int64_t>(produced) * s.top_logprobs + rank;
    store_to_host(&s.top_ids[at], id);
    store_to_host(&s.top_values[at], static_cast<float>(value - log_sum));
  };
  if (!filter(team, s, c.logits(), values, position, left, tell)) return false;
  if (c.thread == 0) scratch.log_sum = left.log_sum;
  if (kRanks == 1 && left.winner && !reports) {  // every worker has drawn the winner itself: no election
    if (c.thread == 0) announce(c, id_of(left.winner), scratch.stopping);
    if (!c.meet()) return false;
  } else {
    const uint64_t mine = pick(team, s, values, left, position);
    if (!elect(c, {value_of(mine), id_of(mine)}, reports ? &scratch.chosen_logit : nullptr)) return false;
  }
  const int token = c.shared.next_token;
  if (c.thread == 0 && s.counts && token >= team.first && token < team.end) s.counts[token]++;
  if (c.thread == 0 && worker_number() == 0 && reports && token >= 0)
    store_to_host(&s.logprobs[produced], static_cast<float>(scratch.chosen_logit - scratch.log_sum));
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
