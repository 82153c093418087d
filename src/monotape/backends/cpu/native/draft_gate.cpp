// The account of the gate, and the gate by itself for tests.
#include "draft_gate.h"

#include <algorithm>

namespace monotape {

void DraftGate::begin(bool predicted) {
  credit_ = predicted ? kPredictedCredit : -cost();
  held_back_ = wait_ = 0;
  ended_ns_ = 0;
}

void DraftGate::pass_ended(int drafts, int accepted, int64_t now_ns) {
  if (ended_ns_) time(drafts, now_ns - ended_ns_);
  ended_ns_ = now_ns;
  in_a_row_ = drafts ? in_a_row_ + 1 : 0;
  if (!drafts) {
    if (credit_ < 0) credit_ += kAllowance;
    return;
  }
  const int gain = kPass * accepted - cost();
  credit_ = std::clamp(credit_ + gain, kLeastCredit, kMostCredit);
  if (gain > 0) wait_ = 0;
  else if (sure_) wait_ = std::min(2 * wait_ + 1, kLongestWait);
}

// A running mean. A worker that lost its core for a while counts as one slow pass, not as ten.
void DraftGate::time(int drafts, int64_t took_ns) {
  int64_t& mean = drafts ? ns_with_drafts_ : ns_alone_;
  mean = mean == 0 ? took_ns : mean + (std::min(took_ns, 2 * mean) - mean) / 8;
}

int DraftGate::cost() const {
  if (ns_alone_ == 0 || ns_with_drafts_ == 0) return kFirstCost;
  return static_cast<int>(std::clamp<int64_t>((ns_with_drafts_ - ns_alone_) * kPass / ns_alone_, 0, kHighestCost));
}

// Overdrawn, only drafts with all the evidence are tried, and less and less often while they fail.
bool DraftGate::opens(int evidence) {
  sure_ = evidence >= kEvidence;
  if (stays_open_) return true;
  if (ns_alone_ == 0 || in_a_row_ == kMostInARow) return false;
  if (credit_ >= 0) return true;
  if (!sure_ || held_back_++ < wait_) return false;
  held_back_ = 0;
  return true;
}

}  // namespace monotape

// The gate for a text that is known: before pass i, `evidence[i]` equal tokens are found (0: no match), and of the drafts
// that may follow `right[i]` would be accepted. Says which passes have drafts.
extern "C" void monotape_gate(int32_t passes, const int32_t* evidence, const int32_t* right, int32_t predicted,
                              int64_t alone_ns, int64_t with_drafts_ns, uint8_t* drafted) {
  constexpr int kDrafts = 3;
  monotape::DraftGate gate;
  gate.begin(predicted);
  int64_t now_ns = 1;
  gate.pass_ended(0, 0, now_ns);
  for (int i = 0; i < passes; i++) {
    drafted[i] = evidence[i] && gate.opens(evidence[i]);
    now_ns += drafted[i] ? with_drafts_ns : alone_ns;
    gate.pass_ended(drafted[i] ? kDrafts : 0, right[i], now_ns);
  }
}
