// Tokens off the rows of a pass. A row counts only if the drafts before it were chosen, so penalties, log-probabilities,
// stop ids and lengths see the same tokens in the same order as with one row a pass.
#include "chooser.h"

#include "rendezvous.h"

namespace monotape {

void Chooser::begin(const Job& job) {
  job_ = &job;
  sampler_.begin(job);
  drafter_.begin(job);
  masks_.begin(job.masked);
  produced_ = drafted_ = accepted_ = kept_ = 0;
}

Finish Chooser::choose(const float* logits, size_t stride, int position, Decision& decision,
                       const std::atomic<bool>& cancelled) {
  const int drafts = decision.rows - decision.known;
  Finish finish = Finish::running;
  int row = 0;
  int32_t token = -1;
  decision.told = 0;
  masks_.begin_choice();
  for (;; row++) {
    finish = choose_one(logits + row * stride, position + row, cancelled, token);
    decision.told += token >= 0;
    if (finish != Finish::running || row == drafts || token != decision.tokens[decision.known + row]) break;
  }
  kept_ = position + row;
  drafted_ += drafts;
  accepted_ += row;
  drafter_.pass_ended(decision.known, drafts, row, now_ns() - masks_.waited_ns());
  decision.tokens[0] = token;
  decision.rows = decision.known = 1;
  if (finish == Finish::running) finish = tell_forced(decision, cancelled);
  if (finish != Finish::running) return finish;
  const int most = std::min(most_rows_, job_->max_tokens - produced_) - 1;  // the last token needs no row
  if (decision.known == 1) decision.rows += drafter_.draft(most, decision.tokens + 1);
  return finish;
}

Finish Chooser::choose_one(const float* logits, int position, const std::atomic<bool>& cancelled, int32_t& token) {
  token = -1;
  const Mask* mask = nullptr;
  if (masks_.wanted()) {
    switch (masks_.take(cancelled, mask)) {
      case Masks::Answer::mask: break;
      case Masks::Answer::complete: return Finish::stop;
      case Masks::Answer::cancelled: return Finish::cancelled;
      case Masks::Answer::late: return Finish::mask_fault;
    }
  }
  token = sampler_.choose(logits, position, produced_, mask);
  return token < 0 ? Finish::numerical_fault : tell(token, cancelled);
}

// Forced tokens need no logits, so the next pass computes their KV together with that of the token before them. Where
// log-probabilities are requested, each token has a pass of its own.
Finish Chooser::tell_forced(Decision& decision, const std::atomic<bool>& cancelled) {
  Finish finish = Finish::running;
  if (!masks_.wanted() || job_->top_logprobs >= 0) return finish;
  while (finish == Finish::running && decision.known < most_known_) {
    const int32_t token = masks_.take_forced();
    if (token < 0) break;
    sampler_.note(token);
    finish = tell(token, cancelled);
    decision.tokens[decision.known++] = token;
    decision.told++;
    drafted_++, accepted_++;  // a draft that cannot be wrong
  }
  decision.rows = decision.known;
  return finish;
}

Finish Chooser::tell(int32_t token, bool cancelled) {
  drafter_.tell(token);
  job_->ids[produced_] = token;
  job_->times_ns[produced_] = now_ns();
  produced_++;
  if (masks_.wanted()) masks_.tell();
  if (std::find(job_->stop_ids, job_->stop_ids + job_->stop_count, token) != job_->stop_ids + job_->stop_count)
    return Finish::stop;
  if (produced_ == job_->max_tokens) return Finish::length;
  return cancelled ? Finish::cancelled : Finish::running;
}

}  // namespace monotape
