// Chooses the next token from a row of logits. backends/reference/sampler.py is the definition.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "masks.h"

namespace monotape {

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab);

  // A new job: what the penalties have to know about its prompt.
  void begin(const Job& job);
  // The token at `position`, of which `produced` came before it in this job; -1 if the logits hold no number.
  // Writes the log-probabilities that the job asked for. `mask` null: every token may come.
  int32_t choose(const float* logits, int position, int produced, const Mask* mask = nullptr);
  // A token that was not chosen here comes next.
  void note(int32_t token);

 private:
  struct Candidate {
    float score;
    int32_t id;
  };
  static bool better(const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.id < b.id;
  }

  int32_t choose_among(const float* logits, int position, int produced, const Mask* mask);
  void adjust(const float* logits, int produced, const Mask* mask);
  bool needs_adjusting(int produced) const;
  void keep_best(size_t count);
  void keep_nucleus();
  int32_t draw_from_all(const float* scores, float peak, int position);
  int32_t draw_from_candidates(int position) const;
  void report(const float* logits, int32_t chosen, int index);

  const Kernels& kernels_;
  int vocab_;
  const Job* job_ = nullptr;
  std::vector<float> adjusted_, weights_;
  std::vector<int32_t> counts_;       // of each id in the output
  std::vector<uint8_t> seen_;         // ids in the prompt or the output
  std::vector<int32_t> touched_;      // ids whose counts_ or seen_ are not zero
  std::vector<Candidate> candidates_;
};

}  // namespace monotape
