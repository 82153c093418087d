// Drafts: tokens that may follow, read off a predicted text, the prompt and the output so far.
#pragma once
#include <cstdint>

#include "abi.h"
#include "draft_gate.h"

namespace monotape {

class Drafter {
 public:
  void begin(const Job& job);
  // A token has been chosen.
  void tell(int32_t token);
  // A pass has ended and its tokens have been told. The clock stands still while the chooser waits for a mask: a slow
  // grammar makes no pass longer.
  void pass_ended(int known, int drafted, int accepted, int64_t now_ns);
  // Up to `most` drafts of the tokens that follow.
  int draft(int most, int32_t* drafts);
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
