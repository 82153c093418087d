// The gate before drafts: whether it pays to check them. It changes no token, because the chooser keeps a draft only if it
// was chosen.
#pragma once
#include <cstdint>

namespace monotape {

// Measures passes with and without drafts by the clock and keeps an account in thousandths of a pass: an accepted draft
// saves a pass, and a pass with drafts costs what it takes longer. While the account is overdrawn, each pass alone earns it
// kAllowance, so drafts that are always wrong take no more than that share of the time.
class DraftGate {
 public:
  // A new job. What passes cost was measured before and stays. A predicted text may be tried at once; without one, the
  // account is overdrawn by the first try.
  void begin(bool predicted);
  // A pass of `drafts` drafts has ended at `now_ns`. The first call of a job only sets the clock.
  void pass_ended(int drafts, int accepted, int64_t now_ns);
  // A pass that counts as neither kind has ended.
  void restart_clock(int64_t now_ns) { ended_ns_ = now_ns; }
  // Whether drafts that follow `evidence` equal tokens are to be checked.
  bool opens(int evidence);
  // For tests: drafts are checked wherever there are any.
  void stay_open(bool open) { stays_open_ = open; }
  int64_t ns_alone() const { return ns_alone_; }
  int64_t ns_with_drafts() const { return ns_with_drafts_; }

  static constexpr int kEvidence = 8;  // tokens in a row that need no better match

 private:
  static constexpr int kPass = 1000, kAllowance = 5;
  static constexpr int kPredictedCredit = 2 * kPass, kMostCredit = 4 * kPass, kLeastCredit = -8 * kPass;
  static constexpr int kFirstCost = kPass, kHighestCost = 8 * kPass;
  static constexpr int kLongestWait = 255;
  static constexpr int kMostInARow = 128;  // passes with drafts; then one alone, to measure it again

  void time(int drafts, int64_t took_ns);
  int cost() const;

  bool stays_open_ = false;
  int credit_ = 0;
  bool sure_ = false;             // the drafts of the pass at hand have all the evidence
  int held_back_ = 0, wait_ = 0;  // such offers: held back since the last one, and to be held back
  int in_a_row_ = 0;
  int64_t ended_ns_ = 0, ns_alone_ = 0, ns_with_drafts_ = 0;
};

}  // namespace monotape
