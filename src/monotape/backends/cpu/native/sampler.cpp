// The sampler's steps, in the order of the reference: bias, penalties, temperature, min-p, top-k, top-p, draw.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "half.h"
#include "philox.h"

namespace monotape {
namespace {

constexpr size_t kFirstNucleus = 256;  // candidates sorted at first for top-p; four times as many if that is too few

// A uniform number in (0, 1) from 32 random bits, fine-grained near 0 where the winners of the draw are.
float uniform(uint32_t bits) {
  return std::min(static_cast<float>((bits + 0.5) * 0x1p-32), 1.0f - 0x1p-24f);
}
// Logarithms in double, each rounded once: the same on every machine for all practical purposes.
float gumbel(float u) {
  const auto exponential = static_cast<float>(-std::log1p(-static_cast<double>(u)));
  return static_cast<float>(-std::log(static_cast<double>(exponential)));
}

bool all_finite(const float* values, int count) {
  bool good = true;
  for (int i = 0; i < count; i++) good &= (f32_to_bits(values[i]) & 0x7f800000u) != 0x7f800000u;
  return good;
}

float log_sum(const Kernels& kernels, const float* logits, int count, float peak, std::vector<float>& scratch) {
  scratch.resize(count);
  kernels.exponentials(logits, count, peak, scratch.data());
  double total = 0;
  for (float weight : scratch) total += weight;
  return static_cast<float>(peak + std::log(total));
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocab)
    : kernels_(kernels), vocab_(vocab), counts_(vocab), seen_(vocab) {}

void Sampler::begin(const Job& job) {
  for (int32_t id : touched_) counts_[id] = seen_[id] = 0;
  touched_.assign(job.prompt, job.prompt + job.prompt_length);
  for (int32_t id : touched_) seen_[id] = 1;
  job_ = &job;
}

bool Sampler::needs_adjusting(int produced) const {
  const Sampling& s = job_->sampling;
  return s.bias_count || s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0 ||
         produced < job_->min_tokens;
}

void Sampler::adjust(const float* logits, int produced, const Mask* mask) {
  const Sampling& s = job_->sampling;
  adjusted_.assign(logits, logits + vocab_);
  for (int i = 0; i < s.bias_count; i++) adjusted_[s.bias_ids[i]] += s.bias_values[i];
  if (produced < job_->min_tokens)
    for (int i = 0; i < job_->stop_count; i++)
      adjusted_[job_->stop_ids[i]] = -std::numeric_limits<float>::infinity();
  for (int id = 0; id < vocab_; id++) {
    if (!seen_[id]) continue;
    float& logit = adjusted_[id];
    logit = logit > 0 ? logit / s.repetition_penalty : logit * s.repetition_penalty;
    if (counts_[id]) logit = (logit - s.presence_penalty) - s.frequency_penalty * static_cast<float>(counts_[id]);
  }
  for (int id = 0; mask && id < vocab_; id++)
    if (!mask->allows(id)) adjusted_[id] = -std::numeric_limits<float>::infinity();
}

int32_t Sampler::choose(const float* logits, int position, int produced, const Mask* mask) {
  if (!all_finite(logits, vocab_)) return -1;
  const bool forced = mask && mask->only >= 0;
  const int32_t chosen = forced ? mask->only : choose_among(logits, position, produced, mask);
  note(chosen);
  if (job_->top_logprobs >= 0) report(logits, chosen, produced);
  return chosen;
}

void Sampler::note(int32_t token) {
  counts_[token]++;
  seen_[token] = 1;
  touched_.push_back(token);
}

int32_t Sampler::choose_among(const float* logits, int position, int produced, const Mask* mask) {
  const Sampling& s = job_->sampling;
  const float* scores = logits;
  if (mask || needs_adjusting(produced)) {
    adjust(logits, produced, mask);
    scores = adjusted_.data();
  }
  int32_t best = 0;
  for (int id = 1; id < vocab_; id++)
    if (scores[id] > scores[best]) best = id;
  if (s.temperature <= 0 || scores[best] == -std::numeric_limits<float>::infinity()) return best;
  if (scores == logits) adjusted_.assign(logits, logits + vocab_);
  for (float& score : adjusted_) score /= s.temperature;
  const float peak = adjusted_[best];
  if (s.min_p <= 0 && s.top_k <= 0 && s.top_p >= 1) return draw_from_all(adjusted_.data(), peak, position);
  const float floor = s.min_p > 0 ? peak + std::log(s.min_p) : -std::numeric_limits<float>::infinity();
  candidates_.clear();
  for (int id = 0; id < vocab_; id++)
    if (adjusted_[id] >= floor && adjusted_[id] > -std::numeric_limits<float>::infinity())
      candidates_.push_back({adjusted_[id], id});
  if (s.top_k > 0) keep_best(s.top_k);
  if (s.top_p < 1) keep_nucleus();
  return draw_from_candidates(position);
}

void Sampler::keep_best(size_t count) {
  if (candidates_.size() <= count) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end(), better);
  candidates_.resize(count);
}

// The shortest run of the best candidates that holds top_p of the probability. Sorting everything would cost more
// than the head itself, so the best few are sorted first, and more only if they are not enough.
void Sampler::keep_nucleus() {
  const float peak = std::max_element(candidates_.begin(), candidates_.end(), [](auto& a, auto& b) {
                       return better(b, a);
                     })->score;
  double total = 0;
  for (const Candidate& c : candidates_) total += std::exp(static_cast<double>(c.score - peak));
  const double wanted = total * job_->sampling.top_p;
  size_t sorted = 0;
  double held = 0;
  for (size_t some = kFirstNucleus;; some *= 4) {
    const size_t end = std::min(some, candidates_.size());
    if (end < candidates_.size())
      std::nth_element(candidates_.begin() + sorted, candidates_.begin() + end, candidates_.end(), better);
    std::sort(candidates_.begin() + sorted, candidates_.begin() + end, better);
    for (; sorted < end; sorted++) {
      held += std::exp(static_cast<double>(candidates_[sorted].score - peak));
      if (held >= wanted) return candidates_.resize(sorted + 1);
    }
    if (end == candidates_.size()) return;
  }
}

int32_t Sampler::draw_from_candidates(int position) const {
  Candidate winner{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
  for (const Candidate& c : candidates_) {
    const Philox bits = philox(job_->sampling.seed, c.id / 4, position);
    const Candidate noisy{c.score + gumbel(uniform(bits.word[c.id % 4])), c.id};
    if (better(noisy, winner)) winner = noisy;
  }
  return winner.id;
}

// The same draw over the whole vocabulary. A token can only win if u < exp(score - winner's), since -log1p(-u) >= u,
// so nearly all of them need no logarithm. The bound is widened a little because it is computed in floats.
int32_t Sampler::draw_from_all(const float* scores, float peak, int position) {
  weights_.resize(vocab_);
  kernels_.exponentials(scores, vocab_, peak, weights_.data());
  Candidate winner{-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};
  float scale = 0;  // exp(winner - peak)
  for (int first = 0; first < vocab_; first += 4) {
    const Philox bits = philox(job_->sampling.seed, first / 4, position);
    for (int id = first; id < std::min(first + 4, vocab_); id++) {
      const float u = uniform(bits.word[id - first]);
      if (u * scale > weights_[id] * 1.0001f) continue;
      const Candidate noisy{scores[id] + gumbel(u), id};
      if (!better(noisy, winner)) continue;
      winner = noisy;
      scale = std::exp(winner.score - peak);
    }
  }
  return winner.id;
}

void Sampler::report(const float* logits, int32_t chosen, int index) {
  const int count = job_->top_logprobs;
  const float peak = *std::max_element(logits, logits + vocab_);
  const float normaliser = log_sum(kernels_, logits, vocab_, peak, weights_);
  job_->logprobs[index] = logits[chosen] - normaliser;
  if (count == 0) return;
  candidates_.clear();
  for (int id = 0; id < vocab_; id++) candidates_.push_back({logits[id], id});
  std::partial_sort(candidates_.begin(), candidates_.begin() + count, candidates_.end(), better);
  for (int i = 0; i < count; i++) {
    job_->top_ids[index * count + i] = candidates_[i].id;
    job_->top_values[index * count + i] = candidates_[i].score - normaliser;
  }
}

}  // namespace monotape
