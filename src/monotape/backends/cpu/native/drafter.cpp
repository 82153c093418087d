// The lookup of drafts.
#include "drafter.h"

#include <algorithm>

namespace monotape {

void Drafter::begin(const Job& job) {
  history_ = job.history;
  length_ = job.history_length;
  match_ = -1;
  gate_.begin(job.history_length > job.prompt_length);
}

void Drafter::tell(int32_t token) {
  if (!history_) return;
  history_[length_] = token;
  if (match_ >= 0) {
    const bool same = history_[match_] == token;
    match_ = same ? match_ + 1 : -1;
    evidence_ += same;
  }
  length_++;
}

void Drafter::pass_ended(int known, int drafted, int accepted, int64_t now_ns) {
  if (!history_) return;
  if (known > 1) gate_.restart_clock(now_ns);  // as long as neither a pass alone nor one with drafts
  else gate_.pass_ended(drafted, accepted, now_ns);
}

int Drafter::draft(int most, int32_t* drafts) {
  if (!history_) return 0;
  if (match_ < 0) find();
  if (most <= 0 || match_ < 0 || !gate_.opens(evidence_)) return 0;
  // Where the match reaches the end of the history, the text has a period: the distance between the two.
  const int period = length_ - match_;
  for (int i = 0; i < most; i++) drafts[i] = history_[match_ + i % period];
  return most;
}

// The longest place where the last tokens stood before, and of several the newest.
void Drafter::find() {
  const int32_t last = history_[length_ - 1];
  const int oldest = std::max(0, length_ - kFarthest);
  evidence_ = 0;
  for (int at = length_ - 2; at >= oldest && evidence_ < DraftGate::kEvidence; at--) {
    if (history_[at] != last) continue;
    const int run = run_before(at);
    if (run > evidence_) evidence_ = run, match_ = at + 1;
  }
  if (evidence_ < kLeastEvidence) match_ = -1;
}

// Equal tokens up to `at` and up to the end of the history, whose last ones are equal.
int Drafter::run_before(int at) const {
  int run = 1;
  while (run < DraftGate::kEvidence && at - run >= 0 && history_[at - run] == history_[length_ - 1 - run]) run++;
  return run;
}

}  // namespace monotape
