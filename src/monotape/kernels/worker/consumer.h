// The state of a consumer thread, and the trace of its stages.
#pragma once
#include "exchange/words.h"

namespace monotape {

// When a stage began, had its input, and ended, and how long its parts took, for `monotape trace`. A slot is a stage of a layer
// of one of the first tokens; the head and the sampler follow the last layer. Compiled out otherwise.
constexpr int kTraceSlots = kLayers * kTracedStages + 2;
enum TraceField { kBegan, kArrived, kEnded, kMultiplied, kStarved, kMet, kTraceFields };  // the last three are lengths of time

class Trace {
 public:
  __device__ void start_token(const Params& params, int token) {
    if constexpr (kTrace)
      record_ = params.trace && thread_number() == 0 && token >= 0 && token < params.trace_tokens
                    ? params.trace + (static_cast<int64_t>(worker_number()) * params.trace_tokens + token) * kTraceSlots * kTraceFields
                    : nullptr;
  }
  __device__ void begin(Stage stage, int layer) {
    if constexpr (kTrace) {
      slot_ = layer < kLayers ? layer * kTracedStages + static_cast<int>(stage) : kLayers * kTracedStages + (stage == Stage::sample);
      mark(kBegan);
    }
  }
  __device__ void arrived() { mark(kArrived); }
  __device__ void end() { mark(kEnded); }
  // A part that may come several times in a stage takes from here ...
  __device__ void part() {
    if constexpr (kTrace) part_ = clock_ns();
  }
  // ... to here, where the next one begins.
  __device__ void part_ends(TraceField what) {
    if constexpr (kTrace) {
      const int64_t began = part_;
      part();
      add(what, part_ - began);
    }
  }
  __device__ void add(TraceField what, int64_t ns) {
    if constexpr (kTrace)
      if (record_) record_[slot_ * kTraceFields + what] += ns;
  }

 private:
  __device__ void mark(TraceField what) {
    if constexpr (kTrace)
      if (record_) record_[slot_ * kTraceFields + what] = clock_ns();
  }
  int64_t* record_ = nullptr;
  int64_t part_ = 0;
  int slot_ = 0;
};

// A candidate for the next token.
struct Candidate {
  float score;
  int id;
};
// A NaN beats everything, so that it is noticed; among equals the lower id is better.
__device__ __forceinline__ bool better(Candidate a, Candidate b) {
  return a.score != a.score || (b.score == b.score && (a.score > b.score || (a.score == b.score && a.id < b.id)));
}
__device__ __forceinline__ Candidate nobody() { return {-infinity(), 0x7fffffff}; }

struct Consumer {
  const Params& params;
  Shared& shared;
  PageReader pages;
  int thread;
  // Each counter goes up with every use of its buffers, and only then: it selects the copy.
  int turn = 0;      // a turn is a layer's pass
  int buffer = 0;    // which of the two sum buffers
  Candidate best = nobody();  // of the rows of the head that this thread has finished
  bool lost = false; // a poll ended because the request failed
  int token_step = 0;  // the number of this token's first matrix: see exchange/janitor.h
  int step_before = -1;  // the last matrix that this worker had tiles of
  bool early = false;    // whether the stage's first look for words came before some of them
  Trace trace;

  __device__ Consumer(const Params& p, Shared& s) : params(p), shared(s), pages(s) { refresh(); }
  __device__ __forceinline__ Carried carried() const { return {pages.cursor(), turn, buffer, token_step, step_before}; }
  __device__ __forceinline__ void go_on(const Carried& from) {
    pages.go_on(from.cursor);
    turn = from.turn, buffer = from.buffer, token_step = from.token_step, step_before = from.step_before;
  }
  // Hides the thread number from the compiler: addresses derived from it would otherwise be kept for all stages and spill.
  __device__ __forceinline__ void refresh() {
    thread = opaque(thread_number());
  }
  __device__ __forceinline__ int sample_turn() const { return shared.sample_turn; }  // a token has one of the sampler
  // The turn of the head's input: a pass has one, whatever the number of tokens that are drawn in it.
  __device__ __forceinline__ int head_turn() const { return kRows == 1 ? shared.sample_turn : shared.drafts.pass; }
  // Those that a token is drawn from.
  __device__ __forceinline__ const float* logits() const { return kRows == 1 ? params.logits : params.logits + shared.drafts.row * kRowLogits; }
  // Unsigned, because the compiler does not know that a thread number is not negative, and signed divisions are slower.
  __device__ __forceinline__ int part(unsigned by) const { return static_cast<unsigned>(thread) / by; }
  __device__ __forceinline__ int within(unsigned by) const { return static_cast<unsigned>(thread) % by; }
  __device__ __forceinline__ int warp() const { return part(kLanes); }
  __device__ __forceinline__ int lane() const { return within(kLanes); }
  // Of this lane's 16 bytes in a block: see the machine's header.
  __device__ __forceinline__ int side() const { return fragment_side(lane()); }
  __device__ __forceinline__ int word() const { return fragment_word(lane()); }
  __device__ __forceinline__ int row() const { return fragment_row(lane()); }
  __device__ __forceinline__ int column() const { return fragment_column(lane()); }
  __device__ const Span& span(Stage stage) const { return shared.spans[static_cast<int>(stage)]; }
  // A new stage: the clock of the trace starts, and the watchdog sees that there is progress.
  __device__ void begin(Stage stage, int layer) {
    refresh();
    if (thread == 0) shared.progress = shared.progress + 1;
    trace.begin(stage, layer);
  }
  // A barrier of the consumers; false if a poll of any of them ended without its word. The result is the same for all, or
  // some would leave and the others would wait for them at the next barrier.
  __device__ bool meet() {
    if constexpr (kFewRegisters) refresh();
    return consumers_agree(kConsumers, !lost);
  }
  // How much the producer may have in flight.
  __device__ __forceinline__ void set_pace(Pace pace, int step = 0) {
    if (thread == 0) shared.pace = step * 4 + pace;
  }
};

}  // namespace monotape
