// What worker 0 of rank 0 does after a pass: chooses tokens off its rows while drafts are right, and drafts the next ones.
#pragma once
#include <atomic>
#include <cstdint>

#include "abi.h"
#include "drafter.h"
#include "kernels.h"
#include "sampler.h"

namespace monotape {

// What a decision says to all workers. Without tokens, in prefill, only whether the job goes on.
struct Decision {
  int32_t told = 0;  // tokens that were chosen: one, and as many drafts as were right
  int32_t rows = 0;  // of the next pass
  int32_t tokens[kPassRows] = {};  // the last one that was chosen, then drafts
};

class Chooser {
 public:
  // Rows of a pass never exceed `most_rows`.
  Chooser(const Kernels& kernels, int vocab, int most_rows) : sampler_(kernels, vocab), most_rows_(most_rows) {}

  void begin(const Job& job);
  // Chooses off the rows of the pass that `decision` described; row 0 is about `position`. Writes the tokens with their
  // times, and the next decision.
  Finish choose(const float* logits, size_t stride, int position, Decision& decision, const std::atomic<bool>& cancelled);

  DraftGate& gate() { return drafter_.gate(); }
  int produced() const { return produced_; }
  int drafted() const { return drafted_; }
  int accepted() const { return accepted_; }

 private:
  Finish tell(int32_t token, bool cancelled);

  Sampler sampler_;
  Drafter drafter_;
  int most_rows_;
  const Job* job_ = nullptr;
  int produced_ = 0, drafted_ = 0, accepted_ = 0;  // of this job
};

}  // namespace monotape
