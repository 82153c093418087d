// The lookup of drafts and the gate before them.
#include "drafter.h"

#include <algorithm>

namespace monotape {

void DraftGate::begin(bool predicted) {
  credit_ = predicted ? kPredictedCredit : 0;
  held_back_ = wait_ = 0;
  ended_ns_ = 0;
}

void DraftGate::pass_ended(int drafts, int accepted, int64_t now_ns) {
  if (ended_ns_) time(drafts, now_ns - ended_ns_);
  ended_ns_ = now_ns;
  if (!drafts) {
    if (credit_ < 0) credit_ += kAllowance;
    return;
  }
  const int gain = kPass * accepted - cost();
  credit_ = std::clamp(credit_ + gain, kLeastCredit, kMostCredit);
  wait_ = gain > 0 ? 0 : std::min(2 * wait_ + 1, kLongestWait);
}

// A running mean. A worker that lost its core for a while counts as one slow pass, not as ten.
void DraftGate::time(int drafts, int64_t took_ns) {
  int64_t& mean = drafts ? ns_with_drafts_ : ns_alone_;
  mean = mean == 0 ? took_ns : mean + (std::min(took_ns, 2 * mean) - mean) / 8;
}

int DraftGate::cost() const {
  if (ns_alone_ == 0 || ns_with_drafts_ == 0) return kPass;
  return static_cast<int>(std::clamp<int64_t>((ns_with_drafts_ - ns_alone_) * kPass / ns_alone_, 0, 8 * kPass));
}

// Overdrawn, only drafts with all the evidence are tried, and less and less often while they fail.
bool DraftGate::opens(int evidence) {
  if (stays_open_ || credit_ >= 0) return true;
  if (evidence < kEvidence || held_back_++ < wait_) return false;
  held_back_ = 0;
  return true;
}

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

int Drafter::draft(int drafted, int accepted, int most, int64_t now_ns, int32_t* drafts) {
  if (!history_) return 0;
  gate_.pass_ended(drafted, accepted, now_ns);
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
