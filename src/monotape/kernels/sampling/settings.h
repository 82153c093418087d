// The host's settings for sampling, and the sampler's state. Needs the integer types of machine/hopper.h.
#pragma once

namespace monotape {

// backends/cuda/sampling.py: SamplingStruct. All zeros: greedy, and nothing else is read.
struct Sampling {
  double top_p;             // 1: off
  uint64_t seed;
  float* adjusted;          // [vocab]: logits after bias, penalties and temperature; each worker has its own part
  uint32_t* counts;         // [vocab]: how often an id was chosen; null without penalties
  const int* bias_ids;      // ascending
  const float* bias_values;
  float* logprobs;          // pinned: [max_tokens] of the chosen tokens
  int* top_ids;             // pinned: [max_tokens][top_logprobs]
  float* top_values;
  const uint64_t* masks;    // pinned: masks, then hints; null: every token may be drawn. See sampling/mask.h
  float temperature;        // 0: the best of the adjusted logits
  float log_min_p;          // 0 when min-p is off or 1
  float repetition_penalty, presence_penalty, frequency_penalty;
  int active;               // anything but plain greedy
  int top_k;                // 0: off
  int has_min_p;
  int min_tokens;           // stop ids are banned before
  int bias_count;
  int top_logprobs;         // -1: no log-probabilities
  int spare;
};
static_assert(sizeof(Sampling) == 128, "as backends/cuda/sampling.py lays it out");

constexpr uint32_t kInPrompt = 1u << 31;  // of a count

struct SamplerState {  // in shared memory, from one token to the next
  int turn;
  int written[3];  // words of this worker in each slot of the sampler's exchange
};

}  // namespace monotape
