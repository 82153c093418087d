// Drafts: tokens that may follow, read off a predicted text, the prompt and the output so far. A pass checks them all at
// once, and the gate says whether that pays. Neither changes a token: the chooser keeps a draft only if it was chosen.
#pragma once
#include <cstdint>

#include "abi.h"

namespace monotape {

// Measures passes with and without drafts by the clock and keeps an account in thousandths of a pass: an accepted draft
// saves a pass, and a pass with drafts costs what it takes longer. While the account is overdrawn, each pass alone earns it
// kAllowance, so drafts that are always wrong cost no more than that share of the time.
class DraftGate {
 public:
  // A new job. What passes cost was measured before and stays.
  void begin(bool predicted);
  // A pass of `drafts` drafts has ended at `now_ns`; of the first pass of a job only the end is known.
  void pass_ended(int drafts, int accepted, int64_t now_ns);
  // Whether drafts that follow `evidence` equal tokens are to be checked.
  bool opens(int evidence);
  // For tests: drafts are checked wherever there are any.
  void stay_open(bool open) { stays_open_ = open; }

  static constexpr int kEvidence = 8;  // tokens in a row that need no better match

 private:
  static constexpr int kPass = 1000, kAllowance = 5;
  static constexpr int kPredictedCredit = 2 * kPass, kLeastCredit = -kPass, kMostCredit = 4 * kPass;
  static constexpr int kLongestWait = 255;

  void time(int drafts, int64_t took_ns);
  int cost() const;

  bool stays_open_ = false;
  int credit_ = 0;
  int held_back_ = 0, wait_ = 0;  // offers with all the evidence: held back since the last one, and to be held back
  int64_t ended_ns_ = 0, ns_alone_ = 0, ns_with_drafts_ = 0;
};

class Drafter {
 public:
  void begin(const Job& job);
  // A token has been chosen.
  void tell(int32_t token);
  // A pass has ended and its tokens have been told: up to `most` drafts of those that follow.
  int draft(int drafted, int accepted, int most, int64_t now_ns, int32_t* drafts);
  DraftGate& gate() { return gate_; }

 private:
  static constexpr int kLeastEvidence = 2;
  static constexpr int kFarthest = 1 << 16;  // tokens that are searched

  void find();
  int run_before(int at) const;

  int32_t* history_ = nullptr;  // the prediction, the prompt and the output; null: no drafts
  int length_ = 0;
  int match_ = -1, evidence_ = 0;  // where the text goes on that ended like the history, and how many tokens are equal
  DraftGate gate_;
};

}  // namespace monotape
