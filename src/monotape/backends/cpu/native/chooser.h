// What worker 0 of rank 0 does after a pass: chooses tokens off its rows while drafts are right, and drafts the next ones.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "abi.h"
#include "drafter.h"
#include "kernels.h"
#include "masks.h"
#include "sampler.h"

namespace monotape {

constexpr int kPassTokens = 32;  // of a decision: longer runs of forced tokens take several passes

// What a decision says to all workers. Without tokens, in prefill, only whether the job goes on.
struct Decision {
  int32_t told = 0;   // new tokens: one that was chosen, as many drafts as were right, and those that a mask forces then
  int32_t rows = 0;   // of the next pass
  int32_t known = 0;  // rows that are no drafts: the token that was chosen last, and forced ones after it
  int32_t tokens[kPassTokens] = {};  // of the rows; either drafts or forced tokens follow the first
};

class Chooser {
 public:
  // A pass never has more than `chunk` rows.
  Chooser(const Kernels& kernels, int vocab, int chunk)
      : sampler_(kernels, vocab), masks_(vocab), most_rows_(std::min(chunk, kPassRows)),
        most_known_(std::min(chunk, kPassTokens)) {}

  void begin(const Job& job);
  // Chooses off the rows of the pass that `decision` described; row 0 is about `position`. Writes the tokens with their
  // times, and the next decision.
  Finish choose(const float* logits, size_t stride, int position, Decision& decision, const std::atomic<bool>& cancelled);

  DraftGate& gate() { return drafter_.gate(); }
  Masks& masks() { return masks_; }
  // Leading positions that had their KV when the latest tokens were chosen.
  int kept() const { return kept_; }
  int produced() const { return produced_; }
  int drafted() const { return drafted_; }
  int accepted() const { return accepted_; }

 private:
  // The token at `position`, off a row of logits; -1: there is none, and the result says why.
  Finish choose_one(const float* logits, int position, const std::atomic<bool>& cancelled, int32_t& token);
  Finish tell_forced(Decision& decision, const std::atomic<bool>& cancelled);
  Finish tell(int32_t token, bool cancelled);

  Sampler sampler_;
  Drafter drafter_;
  Masks masks_;
  int most_rows_, most_known_;
  const Job* job_ = nullptr;
  int kept_ = 0;
  int produced_ = 0, drafted_ = 0, accepted_ = 0;  // of this job
};

}  // namespace monotape
