// Tokens off the rows of a pass. A row counts only if the drafts before it were chosen, so penalties, log-probabilities,
// stop ids and lengths see the same tokens in the same order as with one row a pass.
#include "chooser.h"

#include <algorithm>

#include "rendezvous.h"

namespace monotape {

void Chooser::begin(const Job& job) {
  job_ = &job;
  sampler_.begin(job);
  drafter_.begin(job);
  produced_ = drafted_ = accepted_ = 0;
}

Finish Chooser::choose(const float* logits, size_t stride, int position, Decision& decision,
                       const std::atomic<bool>& cancelled) {
  const int drafts = std::max(0, decision.rows - 1);
  Finish finish = Finish::running;
  int row = 0;
  int32_t token = 0;
  for (bool right = true; right && finish == Finish::running; row++) {
    token = sampler_.choose(logits + row * stride, position + row, produced_);
    if (token < 0) finish = Finish::numerical_fault;
    else finish = tell(token, cancelled);
    right = row < drafts && token == decision.tokens[row + 1];
  }
  const int used = finish == Finish::numerical_fault ? row - 1 : row;
  drafted_ += drafts;
  accepted_ += std::max(0, used - 1);
  decision.told = used;
  decision.tokens[0] = token;
  const int most = std::min(most_rows_, job_->max_tokens - produced_) - 1;  // the last token needs no row
  decision.rows = 1;
  if (finish == Finish::running)
    decision.rows += drafter_.draft(drafts, used - 1, most, now_ns(), decision.tokens + 1);
  return finish;
}

Finish Chooser::tell(int32_t token, bool cancelled) {
  drafter_.tell(token);
  job_->ids[produced_] = token;
  job_->times_ns[produced_] = now_ns();
  produced_++;
  if (std::find(job_->stop_ids, job_->stop_ids + job_->stop_count, token) != job_->stop_ids + job_->stop_count)
    return Finish::stop;
  if (produced_ == job_->max_tokens) return Finish::length;
  return cancelled ? Finish::cancelled : Finish::running;
}

}  // namespace monotape
